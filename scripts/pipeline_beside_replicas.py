"""Would a pipeline of two stages on two cores pay? G micro-batches of one update in three ways, by turns, by median:

one after the other on all cores, as poptorch.PipelinedExecution runs here; 2 replicas of one core each, with G/2 of them; and the
least that a pipeline can take, which is both stages at once, each on a core of its own, without handing anything over, times
(G + 1) / G for filling and draining it.

python scripts/pipeline_beside_replicas.py --rounds 7 --write     # --write puts the table into docs/poptorch.md
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

import tilework
from tilework.parallel import Replicas

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
BEGIN, END = "<!-- pipeline: scripts/pipeline_beside_replicas.py -->", "<!-- end of pipeline -->"
G = 8  # micro-batches of an update


def mlp() -> tuple[nn.Module, nn.Module, Tensor]:
    first = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    return first, nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), torch.randn(8, 512)


def encoder() -> tuple[nn.Module, nn.Module, Tensor]:
    def stage() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True), 3)

    return stage(), stage(), torch.randn(4, 64, 256)


def convolutions() -> tuple[nn.Module, nn.Module, Tensor]:
    def stage(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())

    return stage(32), stage(32), torch.randn(4, 32, 16, 16)


MODELS = {"4 linear layers of 512, 8 rows": mlp, "6 encoder layers of 256, 4 x 64 tokens": encoder,
          "4 convolutions of 32 channels, 4 images of 16 x 16": convolutions}  # fmt: skip


def squares(out: Tensor, wanted: Tensor) -> Tensor:
    return (out - wanted).square().mean()


def compiled(model: nn.Module, x: Tensor, path: Path, *, micro: int, replicas: int = 1, wants_grad: bool = False) -> Path:
    example = x.clone().requires_grad_(wants_grad)
    step = tilework.Step(model=model, inputs=(example,), targets=(model(x).detach() * 0,), loss=squares,
                         optimizer=torch.optim.SGD(model.parameters(), 1e-3), num_micro_batches=micro)  # fmt: skip
    tilework.compile(step, path, options=tilework.Options(programs="fused", num_replicas=replicas))
    return path


def ways(make: Callable[[], tuple[nn.Module, nn.Module, Tensor]], folder: Path) -> dict[str, Callable[[], object]]:
    first, second, x = make()
    middle = first(x).detach()
    last = second(middle).detach()
    many, wanted = torch.cat([x] * G), torch.cat([last * 0] * G)
    whole = tilework.load(compiled(nn.Sequential(first, second), x, folder / "whole.pef", micro=G), num_threads=2)
    replicas = Replicas(compiled(nn.Sequential(first, second), x, folder / "half.pef", micro=G // 2, replicas=2), 2)
    paths = [compiled(first, x, folder / "first.pef", micro=G),
             compiled(second, middle, folder / "second.pef", micro=G, wants_grad=True)]  # fmt: skip
    stages = [tilework.load(path, num_threads=1) for path in paths]
    given = [(many, torch.cat([middle * 0] * G)), (torch.cat([middle] * G).requires_grad_(), wanted)]
    pools = [ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {core}))
             for core in sorted(os.sched_getaffinity(0))[:2]]  # fmt: skip

    def both() -> None:
        for each in [pool.submit(s.run, *g) for pool, s, g in zip(pools, stages, given, strict=True)]:
            each.result()

    return {"one": lambda: whole.run(many, wanted), "replicas": lambda: replicas.run(many, wanted), "stages": both}


def measure(rounds: int) -> str:
    heads = ("ms an update of 8 micro-batches", "one after the other", "2 replicas of one core", "a pipeline takes at least")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---|"]
    for name, make in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            acts = ways(make, Path(folder))
            times: dict[str, list[float]] = {k: [] for k in acts}
            for _ in range(rounds):
                for key, act in acts.items():
                    act()
                    begin = time.perf_counter()
                    for _ in range(10):
                        act()
                    times[key].append((time.perf_counter() - begin) / 10 * 1e3)
                    time.sleep(0.05)
        one, replicas, stages = (statistics.median(times[k]) for k in ("one", "replicas", "stages"))
        lines.append(f"| {name} | {one:.2f} | {replicas:.2f} | {stages * (G + 1) / G:.2f} |")
    date = datetime.date.today().isoformat()
    command = "`python scripts/pipeline_beside_replicas.py`"
    return "\n".join([f"2 cores, {date}, medians of {rounds} rounds that take turns, {command}:", "", *lines])


if __name__ == "__main__":
    from mnist_beside_eager import written

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found = measure(arguments.rounds)
    print(found)
    if arguments.write:
        page = ROOT / "docs" / "poptorch.md"
        page.write_text(written(page.read_text(), found, BEGIN, END))
