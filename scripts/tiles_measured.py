"""What docs/tiles.md says in numbers: jobs beside each other on their tiles, the cost of a lease, the cost of the counters.

python scripts/tiles_measured.py [--rounds 5] [--write]
Everything is measured in one run, interleaved; medians. A speed is a ratio to the same thing alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tilework.tiles import place

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- measured: scripts/tiles_measured.py -->", "<!-- end of measured -->"

BUILD = """
import sys, torch, tilework
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 12 * 12, 10))
x, y = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def eager():
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""
COMPILE = BUILD + "tilework.compile(tilework.Step(model=model, inputs=(x,), targets=(y,), loss=nn.CrossEntropyLoss(), " \
    "optimizer=optimizer), sys.argv[1], weights='inside')\n"  # fmt: skip
# Warm up, say so, wait for the word, run for the time, print steps a second.
JOB = (
    BUILD
    + """
import os, time
if sys.argv[2] == "eager":
    os.sched_setaffinity(0, {int(sys.argv[3])})
    torch.set_num_threads(1)
    once = eager
else:
    session = tilework.load(sys.argv[1], tiles="tiles:" + sys.argv[3])
    once = lambda: session.run(x, y)
for _ in range(50):
    once()
print("ready", flush=True)
sys.stdin.readline()
count, end = 0, time.perf_counter() + float(sys.argv[4])
while time.perf_counter() < end:
    once()
    count += 1
print(count / float(sys.argv[4]), flush=True)
"""
)
LEASES = """
import time
from tilework.tiles import client
from tilework.tiles.asks import Ask
begin = time.perf_counter(); lease = client.lease(Ask(count=1)); first = time.perf_counter() - begin; lease.release()
times = []
for _ in range(100):
    begin = time.perf_counter(); lease = client.lease(Ask(count=1)); times.append(time.perf_counter() - begin); lease.release()
print(first * 1e3, sorted(times)[50] * 1e3)
"""
SHARED = """
import time
from tilework.tiles import holding
begin = time.perf_counter(); held = holding.hold(); first = time.perf_counter() - begin; holding.let_go(held)
time.sleep(1)
times = []
for _ in range(100):
    begin = time.perf_counter(); held = holding.hold(); times.append(time.perf_counter() - begin); holding.let_go(held)
print(first * 1e3, sorted(times)[50] * 1e3)
"""

# The fastest step there is, with the page and without, interleaved; the quietest rounds.
COUNTERS = """
import sys, time, torch, tilework
from torch import nn
model = nn.Linear(8, 2)
x, y = torch.randn(1, 8), torch.randint(0, 2, (1,))
tilework.compile(tilework.Step(model=model, inputs=(x,), targets=(y,), loss=nn.CrossEntropyLoss(),
                               optimizer=torch.optim.SGD(model.parameters(), 1e-3)), sys.argv[1], weights="inside")
counted, not_counted = tilework.load(sys.argv[1]), tilework.load(sys.argv[1])
not_counted._device.driver.tilework_count_at(None, None)
many, best = (x.expand(20000, 8).contiguous(), y.expand(20000).contiguous()), {}
for _ in range(60):
    for session in (counted, not_counted):
        begin = time.perf_counter()
        session.run(*many, num_steps=20000, outputs="loss")
        best[session] = min(best.get(session, 1.0), time.perf_counter() - begin)
print((best[counted] - best[not_counted]) / 20000 * 1e9)
"""


def rates(kind: str, cores: list[int], artifact: Path, seconds: float, env: dict[str, str]) -> list[float]:
    jobs = [subprocess.Popen([sys.executable, "-c", JOB, str(artifact), kind, str(c), str(seconds)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, env=env) for c in cores]  # fmt: skip
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
    return [float(job.communicate()[0]) for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--write", action="store_true", help="into docs/tiles.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TILEWORK_RUN": folder + "/run", "TILEWORK_LEASE": "1"}
        artifact = Path(folder) / "m.pef"
        subprocess.run([sys.executable, "-c", COMPILE, str(artifact)], check=True, env=env)
        found: dict[str, list[float]] = {}
        for i in range(args.rounds):
            for kind in ("tiles", "eager"):
                runs = {}
                for cores in [[0], [0, 1]] if i % 2 else [[0, 1], [0]]:  # neither is always first
                    runs[len(cores)] = rates(kind, cores, artifact, args.seconds, env)
                alone, beside = runs[1][0], runs[2]
                found.setdefault(f"{kind} alone", []).append(alone)
                found.setdefault(f"{kind} beside", []).append(statistics.mean(beside))
                found.setdefault(f"{kind} kept", []).append(statistics.mean(beside) / alone)
        costs: dict[str, list[float]] = {}
        for i in range(7):
            for name, code in (("lease", LEASES), ("shared", SHARED)):
                run = Path(f"{folder}/run-{name}-{i}")
                words = [sys.executable, "-c", code]
                done = subprocess.run(words, check=True, capture_output=True, text=True, env={**env, "TILEWORK_RUN": str(run)})
                for kind, value in zip(("first", "median"), map(float, done.stdout.split()), strict=True):
                    costs.setdefault(f"{name} {kind}", []).append(value)
        words = [sys.executable, "-c", COUNTERS, f"{folder}/small.pef"]
        counters = float(subprocess.run(words, check=True, capture_output=True, text=True, env=env).stdout)
        for run in Path(folder).glob("run*"):
            pid = place.process_at(run)
            if pid is not None:
                os.kill(pid, 15)
    middle = {k: statistics.median(v) for k, v in found.items()}
    cost = {k: statistics.median(v) for k, v in costs.items()}
    lines = [
        f"Measured {time.strftime('%Y-%m-%d')} on {os.cpu_count()} cores, median of {args.rounds} interleaved rounds, "
        "`python scripts/tiles_measured.py --write`:",
        "",
        "| two jobs, each on one tile (a small CNN, batch 32) | alone | both at once | kept |",
        "|---|---|---|---|",
        *(f"| {name} | {middle[f'{kind} alone']:.0f} steps/s | {middle[f'{kind} beside']:.0f} steps/s each | "
          f"{100 * middle[f'{kind} kept']:.0f} % |" for kind, name in (("tiles", "Tilework, leased tiles"),
                                                                       ("eager", "eager PyTorch, pinned by hand"))),
        "",
        f"To begin: a shared session {cost['shared median']:.1f} ms, or {cost['shared first']:.1f} ms if no daemon runs yet; "
        f"a lease {cost['lease median']:.1f} ms, or {cost['lease first']:.0f} ms. The counters: {counters:.0f} ns per step.",
    ]  # fmt: skip
    text = "\n".join(lines)
    print(text)
    if args.write:
        page = ROOT / "docs" / "tiles.md"
        head, rest = page.read_text().split(BEGIN)
        page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
