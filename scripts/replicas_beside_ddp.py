"""Two ranks of one core each: Tilework beside DistributedDataParallel, by turns in the same processes, and one rank alone.

python scripts/replicas_beside_ddp.py [--rows ffn-1,ffn-64,...] [--rounds 7] [--json FILE]

Each rank holds both. A slice is a number of steps; slices of the two come by turns, and ranks begin each together. Before
anything is timed, the losses of both must agree. Efficiency is the speed of one rank among two over its speed alone, on the same
core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
ROWS = ("logreg-1", "ffn-1", "ffn-64", "lenet-1", "lenet-64", "unet-4", "lstm-32", "gpt-4")
WANTED = {"ffn-1": 2.0, "lenet-1": 3.0, "ffn-64": 0.97, "lenet-64": 0.97, "unet-4": 0.97, "gpt-4": 0.97}  # times DDP
SECONDS = 0.25  # of a slice, about


def compiled(row_name: str, folder: Path) -> Path:
    from bench.models import build, make_data, optimizer_for
    from bench.rows import row_named

    import tilework

    row = row_named(row_name)
    model, loss = build(row)
    x, y = make_data(row)
    step = tilework.Step(model=model, inputs=(x[: row.batch],), targets=(y[: row.batch],), loss=loss,
                         optimizer=optimizer_for(row, model.parameters()))  # fmt: skip
    path = folder / f"{row_name}.pef"
    tilework.compile(step, path, options=tilework.Options(programs="fused", num_replicas=2))
    return path


def rank(row_name: str, path: str, rounds: int) -> None:
    """One of two, or the only one."""
    import torch
    import torch.distributed as dist
    from bench.models import build, make_data, optimizer_for
    from bench.rows import CHECKED_STEPS, row_named
    from torch.nn.parallel import DistributedDataParallel

    import tilework
    from tilework import parallel

    torch.set_num_threads(1)
    row = row_named(row_name)
    group = parallel.start() if parallel.launched().size > 1 else None
    me, size = (group.rank, group.size) if group else (0, 1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[me]})
    x, y = make_data(row)
    x, y = x.roll(me, 0), y.roll(me, 0)  # other samples on the other rank
    model, loss = build(row)
    trained = DistributedDataParallel(model) if group else model
    optimizer = optimizer_for(row, model.parameters())
    batches = [
        (x[i * row.batch : (i + 1) * row.batch], y[i * row.batch : (i + 1) * row.batch]) for i in range(row.steps_per_call)
    ]

    def eager(count: int) -> float:
        value = torch.zeros(())
        for i in range(count):
            bx, by = batches[i % len(batches)]
            optimizer.zero_grad()
            value = loss(trained(bx), by)
            value.backward()
            optimizer.step()
        return float(value)

    with tilework.load(path, num_threads=1, group=group) as session:
        session.to_device(build(row)[0])

        def own(count: int) -> float:
            left, value = count, None
            while left > 0:
                steps = min(left, row.steps_per_call)
                value = session.run(x[: steps * row.batch], y[: steps * row.batch], num_steps=steps, outputs="last")
                left -= steps
            return float(value.losses.flatten()[-1])  # type: ignore[union-attr]

        for _ in range(min(CHECKED_STEPS, 2)):
            a, b = own(1), eager(1)
            assert abs(a - b) <= row.rtol * abs(b), f"losses differ: {a} and {b}"
        times: dict[str, list[float]] = {"tilework": [], "ddp": []}
        counts = {}
        for name, once in (("tilework", own), ("ddp", eager)):
            once(row.steps_per_call)
            begin = time.perf_counter()
            once(row.steps_per_call)
            each = (time.perf_counter() - begin) / row.steps_per_call
            found = max(1, int(SECONDS / each / row.steps_per_call)) * row.steps_per_call
            counts[name] = group.tell(found)[0] if group else found
        for _ in range(rounds):
            for name, once in (("tilework", own), ("ddp", eager)):
                if group:
                    dist.barrier()
                begin = time.perf_counter()
                once(counts[name])
                times[name].append((time.perf_counter() - begin) / counts[name])
    if me == 0:
        medians = {k: statistics.median(v) for k, v in times.items()}
        spread = {k: (max(v) - min(v)) / medians[k] for k, v in times.items()}
        print("RESULT", json.dumps({"ranks": size, **medians, "spread": spread}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(*args.rank, args.rounds)
        return 0
    import tempfile

    results = {}
    print(f"{'row':10s} {'Tilework':>10s} {'DDP':>10s} {'times DDP':>9s}  efficiency: Tilework, DDP")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows.split(","):
            path = compiled(name, Path(folder))
            found = {}
            for count in (1, 2):
                words = [sys.executable, __file__, "--rounds", str(args.rounds), "--rank", name, str(path)]
                if count > 1:
                    words = [sys.executable, "-m", "tilework", "launch", "-n", "2", "--no-tag", "--", *words]
                env = {**os.environ, "OMP_NUM_THREADS": "1", "TILEWORK_LEASE": "0"}
                done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT)
                line = next((s for s in done.stdout.splitlines() if s.startswith("RESULT ")), None)
                if line is None:
                    print(done.stdout[-500:], done.stderr[-2000:], sep="\n")
                    return 1
                found[count] = json.loads(line.removeprefix("RESULT "))
            two, one = found[2], found[1]
            results[name] = found
            times, wanted = two["ddp"] / two["tilework"], WANTED.get(name)
            print(f"{name:10s} {two['tilework'] * 1e6:7.0f} us {two['ddp'] * 1e6:7.0f} us {times:8.2f}x  "
                  f"{one['tilework'] / two['tilework']:.0%}, {one['ddp'] / two['ddp']:.0%}"
                  + (f"   wanted {wanted}: {'met' if times >= wanted else 'MISSED'}" if wanted else ""), flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
