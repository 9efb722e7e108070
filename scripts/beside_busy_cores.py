"""Steps of small and larger models, on a quiet machine and with a busy process on every core: wall and CPU seconds.

python scripts/beside_busy_cores.py [--seconds 3]      run it on two commits by turns to compare them
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import tilework
from tilework.zoo import lenet

_BURN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def steps() -> dict[str, tilework.Step]:
    wide = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    found = {f"LeNet, batch {b}": lenet.build(batch_size=b) for b in (1, 64)}
    for b in (1, 64):
        found[f"784-512-256-10, batch {b}"] = tilework.Step(
            model=wide, inputs=(torch.randn(b, 784),), targets=(torch.randint(0, 10, (b,)),), loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.SGD(wide.parameters(), 0.01))  # fmt: skip
    return found


def measured(session: tilework.Session, inputs: list[torch.Tensor], seconds: float) -> str:
    many = [t.repeat(50, *[1] * (t.dim() - 1)) for t in inputs]
    session.run(*many, num_steps=50, outputs="loss")
    begin, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begin < seconds:
        session.run(*many, num_steps=50, outputs="loss")
        count += 50
    wall, used = time.perf_counter() - begin, time.process_time() - cpu
    return f"{wall / count * 1e6:9.1f} us a step, {used / count * 1e6:9.1f} us of CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    args = parser.parse_args()
    os.environ["TILEWORK_LEASE"] = "0"  # as a process without tiles of its own
    with tempfile.TemporaryDirectory() as folder:
        sessions = {}
        for name, step in steps().items():
            path = Path(folder) / f"{len(sessions)}.pef"
            tilework.compile(step, path, options=tilework.Options(programs="fused"), weights="inside")
            sessions[name] = tilework.load(path), [*step.inputs, *step.targets]
        for title in ("quiet", "a busy process on every core"):
            cores = sorted(os.sched_getaffinity(0)) if title != "quiet" else []
            others = [subprocess.Popen([sys.executable, "-c", _BURN, str(c)]) for c in cores]
            print(title)
            try:
                for name, (session, inputs) in sessions.items():
                    print(f"  {name:<25} {measured(session, inputs, args.seconds)}", flush=True)
            finally:
                for other in others:
                    other.kill()


if __name__ == "__main__":
    main()
