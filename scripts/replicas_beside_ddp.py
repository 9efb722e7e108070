"""Two ranks of one core each: Tilework beside DistributedDataParallel, and one rank alone.

python scripts/replicas_beside_ddp.py [--rows ffn-1,ffn-64,...] [--rounds 3] [--json FILE]

Each has processes of its own, by turns. The losses of the first two steps must agree. Efficiency is the speed of one rank among
two over its speed alone, on the same core.
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
SIDES = ("tilework", "ddp")
SECONDS, SLICES = 0.25, 5  # of a slice, about; how many a process times


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


def rank(row_name: str, path: str, side: str) -> None:
    """One of two, or the only one. Prints the first losses, and the time of a step in each slice."""
    import torch
    import torch.distributed as dist
    from bench.models import build, make_data, optimizer_for
    from bench.rows import row_named
    from torch.nn.parallel import DistributedDataParallel

    import tilework
    from tilework import parallel

    torch.set_num_threads(1)
    row = row_named(row_name)
    group = parallel.start() if parallel.launched().size > 1 else None
    me = group.rank if group else 0
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[me]})
    x, y = make_data(row)
    x, y = x.roll(me, 0), y.roll(me, 0)  # other samples on the other rank
    model, loss = build(row)
    if side == "tilework":
        session = tilework.load(path, num_threads=1, group=group)
        session.to_device(model)

        def run(count: int) -> float:
            left, value = count, None
            while left > 0:
                steps = min(left, row.steps_per_call)
                value = session.run(x[: steps * row.batch], y[: steps * row.batch], num_steps=steps, outputs="last")
                left -= steps
            return float(value.losses.flatten()[-1])  # type: ignore[union-attr]
    else:
        trained = DistributedDataParallel(model) if group else model
        optimizer = optimizer_for(row, model.parameters())
        n = row.batch
        batches = [(x[i * n : (i + 1) * n], y[i * n : (i + 1) * n]) for i in range(row.steps_per_call)]

        def run(count: int) -> float:
            value = torch.zeros(())
            for i in range(count):
                bx, by = batches[i % len(batches)]
                optimizer.zero_grad()
                value = loss(trained(bx), by)
                value.backward()
                optimizer.step()
            return float(value)

    losses = [run(1), run(1)]
    run(row.steps_per_call)
    begin = time.perf_counter()
    run(row.steps_per_call)
    each = (time.perf_counter() - begin) / row.steps_per_call
    count = max(1, int(SECONDS / each / row.steps_per_call)) * row.steps_per_call
    count = group.tell(count)[0] if group else count
    times = []
    for _ in range(SLICES):
        if group:
            dist.barrier()
        begin = time.perf_counter()
        run(count)
        times.append((time.perf_counter() - begin) / count)
    if me == 0:
        print("RESULT", json.dumps({"losses": losses, "times": times}))


def measured(row_name: str, path: Path, side: str, ranks: int) -> dict[str, list[float]]:
    words = [sys.executable, __file__, "--rank", row_name, str(path), side]
    if ranks > 1:
        words = [sys.executable, "-m", "tilework", "launch", "-n", str(ranks), "--no-tag", "--", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TILEWORK_LEASE": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT)
    line = next((s for s in done.stdout.splitlines() if s.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"{row_name}, {side}, {ranks} ranks:\n{done.stdout[-500:]}\n{done.stderr[-2000:]}")
    return dict(json.loads(line.removeprefix("RESULT ")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=3, help="how often each has its turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(*args.rank)
        return 0
    import tempfile

    from bench.rows import row_named

    results = {}
    print(f"{'row':10s} {'Tilework':>10s} {'DDP':>10s} {'times DDP':>9s}  efficiency: Tilework, DDP")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows.split(","):
            path = compiled(name, Path(folder))
            found: dict[tuple[str, int], list[float]] = {}
            for _ in range(args.rounds):
                for ranks in (1, 2):
                    two = {side: measured(name, path, side, ranks) for side in SIDES}
                    for a, b in zip(two["tilework"]["losses"], two["ddp"]["losses"], strict=True):
                        assert abs(a - b) <= row_named(name).rtol * abs(b), f"{name}: losses differ: {a} and {b}"
                    for side in SIDES:
                        found.setdefault((side, ranks), []).extend(two[side]["times"])
            step = {k: statistics.median(v) for k, v in found.items()}
            results[name] = {f"{side} {ranks}": v for (side, ranks), v in found.items()}
            times, wanted = step["ddp", 2] / step["tilework", 2], WANTED.get(name)
            alone = {side: step[side, 1] / step[side, 2] for side in SIDES}
            print(f"{name:10s} {step['tilework', 2] * 1e6:7.0f} us {step['ddp', 2] * 1e6:7.0f} us {times:8.2f}x  "
                  f"{alone['tilework']:.0%}, {alone['ddp']:.0%}"
                  + (f"   wanted {wanted}: {'met' if times >= wanted else 'MISSED'}" if wanted else ""), flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
