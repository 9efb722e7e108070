"""Runs that are killed anywhere, again and again, end with the same weights and the same losses, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import tilework
from tilework.runs.checkpoints import Checkpoints, name_of
from tilework.runs.folder import RunFolder

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
STEPS, EVERY = 400, 5
DATA = """
import torch, time
from tilework.data import Each

def records():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(160, 12, generator=g)
    def read(number):
        time.sleep(0.0002)  # seconds for a run: there is time to be killed
        return x[number], x[number, :5].argmax()
    return Each(160, read, str)
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 64), nn.BatchNorm1d(64), nn.Linear(64, 5)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))))


@dataclass
class Place:
    folder: Path

    def command(self, run: str, *more: str, ranks: int = 1) -> list[str]:
        launch = [str(BIN / "tilework"), "launch", "-n", str(ranks), "--"] if ranks > 1 else []
        return [*launch, str(BIN / "tilework"), "run", "m.pef", "--data", "data.py:records", "--run-dir", run, "--epochs", "1000",
                "--steps", str(STEPS), "--save-every", str(EVERY), "--seed", "3", "--resume", *more]  # fmt: skip

    def start(self, run: str, *more: str, ranks: int = 1) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(run, *more, ranks=ranks), cwd=self.folder, text=True, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip

    def finish(self, run: str, *more: str, ranks: int = 1) -> str:
        process = self.start(run, *more, ranks=ranks)
        text = process.communicate(timeout=120)[0]
        assert process.returncode == 0, text
        return text

    def killed(self, run: str, when: random.Random, *more: str, ranks: int = 1) -> bool:
        """Kills the run, all its processes, some time after it has made its first new step. False where it ended before."""
        metrics = self.folder / run / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        process = self.start(run, *more, ranks=ranks)
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_mtime_ns > before):
            time.sleep(0.005)
        time.sleep(when.uniform(0, 0.4))
        ended = process.poll() is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return not ended

    def result(self, run: str) -> tuple[dict[str, torch.Tensor], tuple[int, ...], list[tuple[int, float]]]:
        found = Checkpoints(self.folder / run / "checkpoints").newest()
        assert found is not None and found[0].step == STEPS
        losses = [(m["step"], m["loss"]) for m in RunFolder(self.folder / run).metrics()]
        return found[1].tensors, found[1].random, losses


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("resume")
    torch.manual_seed(0)
    model = Net()
    step = tilework.Step(model=model, loss=nn.CrossEntropyLoss(),
                         inputs=(torch.randn(8, 12),), targets=(torch.randint(0, 5, (8,)),),
                         optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))  # fmt: skip
    tilework.compile(step, folder / "m.pef", options=tilework.Options(opt_level=1, programs="fused", num_replicas=2))
    (folder / "data.py").write_text(DATA)
    return Place(folder)


@pytest.fixture(scope="module")
def straight(place: Place):
    """What a run gives that nobody has stopped."""
    place.finish("straight")
    found = place.result("straight")
    assert [s for s, _ in found[2]] == list(range(1, STEPS + 1))
    return found


def same(found, expected) -> None:
    assert found[0].keys() == expected[0].keys()
    assert [k for k, t in expected[0].items() if not torch.equal(t, found[0][k])] == []
    assert found[1:] == expected[1:]


def torture(place: Place, run: str, kills: int, seed: int, *more: str, ranks: int = 1) -> None:
    when, done = random.Random(seed), 0
    for _ in range(10 * kills):
        done += place.killed(run, when, *more, ranks=ranks)
        if done == kills or Checkpoints(place.folder / run / "checkpoints").steps()[-1:] == [STEPS]:
            break
    assert done
    place.finish(run, *more, ranks=ranks)


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_a_few_times(place: Place, straight, workers: int) -> None:
    torture(place, f"killed-{workers}", 2, workers, "--num-workers", str(workers))
    same(place.result(f"killed-{workers}"), straight)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_killed_fifty_times(place: Place, straight) -> None:
    """In several runs: each gets further between two kills."""
    left, number = 50, 0
    when = random.Random(17)
    while left > 0:
        run = f"tortured-{number}"
        number += 1
        while left > 0 and Checkpoints(place.folder / run / "checkpoints").steps()[-1:] != [STEPS]:
            left -= place.killed(run, when, "--num-workers", str(when.choice([0, 1, 2])))
        place.finish(run)
        same(place.result(run), straight)


def test_two_ranks_killed(place: Place) -> None:
    place.finish("two", ranks=2)
    torture(place, "two-killed", 1, 5, ranks=2)
    same(place.result("two-killed"), place.result("two"))


def test_sigterm_saves_first(place: Place, straight) -> None:
    process = place.start("asked")
    metrics = place.folder / "asked" / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size < 300:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM, text
    steps = Checkpoints(place.folder / "asked" / "checkpoints").steps()
    assert f"SIGTERM: saved at step {steps[-1]}" in text
    note = json.loads((place.folder / "asked" / "run.json").read_text())
    assert note["state"] == "stopped by SIGTERM" and note["step"] == steps[-1] < STEPS
    text = place.finish("asked")
    assert f"continuing from {name_of(steps[-1])}" in text
    same(place.result("asked"), straight)


def test_another_number_of_ranks(place: Place) -> None:
    """Allowed, and what changes is said."""
    process = place.start("grows")
    metrics = place.folder / "grows" / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size < 300:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    text = place.finish("grows", ranks=2)
    assert "not the same as before: ranks was 1, is 2" in text
    losses = place.result("grows")[2]
    assert [s for s, _ in losses] == list(range(1, STEPS + 1)) and losses[-1][1] < losses[0][1]


def test_all_steps_were_done(place: Place, straight) -> None:
    assert "were done already" in place.finish("straight")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_processes_saves_first(place: Place, straight, number: signal.Signals) -> None:
    """As Slurm sends it: those that read the data get it too. And to the launcher, which passes it on."""
    for run, ranks, more in ((f"group-{number}", 1, ("--num-workers", "2")), (f"launched-{number}", 2, ())):
        process = place.start(run, *more, ranks=ranks)
        metrics = place.folder / run / "metrics.jsonl"
        while not metrics.exists() or metrics.stat().st_size < 300:
            assert process.poll() is None
            time.sleep(0.01)
        if ranks == 1:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        text = process.communicate(timeout=60)[0]
        steps = Checkpoints(place.folder / run / "checkpoints").steps()
        assert steps and f"{number.name}: saved at step {steps[-1]}" in text, text
        assert process.returncode == 128 + number, text
