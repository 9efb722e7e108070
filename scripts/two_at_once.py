"""Two training scripts on one machine, neither with tiles of its own: what each keeps of its speed alone.

python scripts/two_at_once.py [--rows ffn-64,lenet-64,unet-4,gpt-4] [--seconds 3] [--rounds 3] [--eager]

Rows are the benchmark's. Alone and together by turns; the median of the rounds, of the slower of the two."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the benchmark's models


def work(row_name: str, folder: Path, seconds: float, eager: bool) -> None:
    """Prints a line when it is ready, waits for one, works, and prints how many steps a second."""
    import torch
    from bench.models import build, make_data
    from bench.rows import row_named

    import tilework

    row = row_named(row_name)
    model, loss = build(row)
    x, y = (t[: row.batch] for t in make_data(row))
    if eager:
        optimizer = torch.optim.SGD(model.parameters(), 0.001)

        def run() -> int:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            return 1
    else:
        session = tilework.load(folder / f"{row_name}.pef")
        many = [t.repeat(10, *[1] * (t.dim() - 1)) for t in (x, y)]

        def run() -> int:
            session.run(*many, num_steps=10, outputs="loss")
            return 10

    run()
    print("ready", flush=True)
    sys.stdin.readline()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        count += run()
    print(count / (time.perf_counter() - begin), flush=True)


def together(number: int, command: list[str]) -> list[float]:
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(number)]
    for other in others:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
    for other in others:
        assert other.stdin is not None
        other.stdin.write("go\n")
        other.stdin.flush()
    return [float(other.communicate()[0]) for other in others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="ffn-64,lenet-64,unet-4,gpt-4")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="eager PyTorch, to compare with")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work[0], Path(args.work[1]), args.seconds, args.eager)
    os.environ["TILEWORK_LEASE"] = "0"
    import torch
    from bench.models import build, make_data
    from bench.rows import row_named

    import tilework

    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows.split(","):
            if not args.eager:
                model, loss = build(row_named(name))
                x, y = (t[: row_named(name).batch] for t in make_data(row_named(name)))
                step = tilework.Step(model=model, inputs=(x,), targets=(y,), loss=loss,
                                     optimizer=torch.optim.SGD(model.parameters(), 0.001))  # fmt: skip
                tilework.compile(step, Path(folder) / f"{name}.pef", options=tilework.Options(programs="fused"), weights="inside")
            command = [sys.executable, __file__, "--work", name, folder, "--seconds", str(args.seconds)]
            command += ["--eager"] * args.eager
            alone, both = [], []
            for _ in range(args.rounds):
                alone += together(1, command)
                both.append(min(together(2, command)))
            one, two = statistics.median(alone), statistics.median(both)
            print(f"{name:<10} alone {one:9.1f} steps/s, two at once {two:9.1f} each: {two / one:4.0%}", flush=True)


if __name__ == "__main__":
    main()
