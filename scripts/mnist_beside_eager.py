"""MNIST as PopTorch programs have it (batch 8, 50 device iterations) beside the same loop in eager PyTorch: in one run, by turns,
by median. Also what a call costs beyond the native loop, and how well the asynchronous loader feeds it.

python scripts/mnist_beside_eager.py --rounds 7 --write     # --write puts the lines into docs/poptorch.md
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import poptorch
from tilework.zoo import digits

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "apps" / "graphcore" / "mnist"))
from mnist_poptorch import Network, TrainingModelWithLoss  # noqa: E402

BATCH, ITERATIONS = 8, 50
BEGIN, END = "<!-- speed: scripts/mnist_beside_eager.py -->", "<!-- end of speed -->"


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    return statistics.median(values)


def options(iterations: int) -> poptorch.Options:
    return poptorch.Options().deviceIterations(iterations).showCompilationProgressBar(False)


def eager(pipe: Connection, x: torch.Tensor, y: torch.Tensor) -> None:
    """Whenever something comes, the updates of one call, and how many seconds they took."""
    model = TrainingModelWithLoss(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def updates() -> None:
        for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad(set_to_none=True)
            model(a, b)[1].backward()
            optimizer.step()

    while True:
        pipe.recv()
        pipe.send(seconds(updates))


def measure(rounds: int) -> str:
    rows = BATCH * ITERATIONS
    x, y = digits.load("train")
    x, y = x[:rows].contiguous(), y[:rows].contiguous()
    model = TrainingModelWithLoss(Network())
    executor = poptorch.trainingModel(model, options(ITERATIONS), poptorch.optim.SGD(model.parameters(), lr=0.01))
    # In a process of its own: eager PyTorch's threads spin for a while after its backward pass, and would take the cores from us.
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=eager, args=(theirs, x, y), daemon=True)
    peer.start()

    def by_eager() -> float:
        ours.send(None)
        return float(ours.recv())

    data = TensorDataset(x.repeat(8, 1, 1, 1), y.repeat(8))
    loader = poptorch.DataLoader(executor.options, data, batch_size=BATCH, mode=poptorch.DataLoaderMode.Async)

    def from_memory() -> None:
        for _ in range(8):
            executor(x, y)

    def from_loader() -> None:
        for a, b in loader:
            executor(a, b)

    acts = {"call": lambda: executor(x, y), "memory": from_memory, "loader": from_loader}
    for act in (*acts.values(), by_eager):
        act()
    order: list[str] = [*acts, "eager"]
    times: dict[str, list[float]] = {name: [] for name in order}
    for i in range(rounds):
        for name in order[i % 4 :] + order[: i % 4]:  # another one first each time
            times[name].append(seconds(acts[name]) if name in acts else by_eager())
            time.sleep(0.05)
    peer.terminate()
    loader.terminate()
    executor.destroy()
    a, b = median(times["call"]), median(times["eager"])
    c, d = median(times["memory"]), median(times["loader"])
    beyond = overhead(rounds)
    day = datetime.date.today().isoformat()
    return (
        f"{torch.get_num_threads()} threads, {day}, medians of {rounds} rounds that take turns, `python "
        f"scripts/mnist_beside_eager.py`:\n\n"
        "| MNIST, batch 8, 50 device iterations | |\n|---|---|\n"
        f"| one call (50 updates) | {a * 1e3:.1f} ms |\n| the same 50 updates in eager PyTorch | {b * 1e3:.1f} ms |\n"
        f"| times faster | {b / a:.1f} x |\n"
        f"| eight calls, data in memory | {c * 1e3:.0f} ms |\n| eight calls from `DataLoader(mode=Async)` | {d * 1e3:.0f} ms |\n"
        f"| a call of `trainingModel` beyond its session's (a linear layer) | {beyond * 1e6:.0f} us |"
    )


def overhead(rounds: int) -> float:
    """Of one call of the executor, beyond one of its session."""

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.fc(x), y)

    model = Linear()
    executor = poptorch.trainingModel(model, options(1), poptorch.optim.SGD(model.parameters(), lr=0.01))
    x, y = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    executor(x, y)
    session = executor._device.session  # type: ignore[union-attr]

    def loop(act: Callable[[], object]) -> float:
        return seconds(lambda: [act() for _ in range(2000)] and None) / 2000

    pairs = [(loop(lambda: executor(x, y)), loop(lambda: session.run(x, y, outputs="last").raw)) for _ in range(rounds)]
    return median([a - b for a, b in pairs])


def written(page: str, lines: str, begin: str = BEGIN, end: str = END) -> str:
    head, rest = page.split(begin)
    return head + begin + "\n" + lines + "\n" + end + rest.split(end)[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    print(found)
    if arguments.write:
        target = ROOT / "docs" / "poptorch.md"
        target.write_text(written(target.read_text(), found))
