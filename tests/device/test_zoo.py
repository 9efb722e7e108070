"""The zoo: each model, at its tiny size, gives what it gives in eager PyTorch for ten steps, and learns its synthetic data."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilework
from parity import FIRST_STEP, SEED, relative, train_eager, train_session
from tilework.artifact.structure import flatten
from tilework.compiler.build import compile_step
from tilework.plan.options import Options
from tilework.zoo.common import MODELS

pytestmark = pytest.mark.slow

NUM_STEPS = 10


@dataclass(frozen=True)
class Case:
    module: str
    learns: float  # the mean loss over data it has not seen falls below this
    steps: int = 200
    changes: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None
    later: float = 1e-3  # losses of ten steps, relative

    @property
    def zoo(self) -> Any:
        return importlib.import_module(f"tilework.zoo.{self.module}")

    def build(self) -> tilework.Step:
        return self.zoo.build("tiny", **self.changes)

    def rows(self, count: int, seed: int) -> list[Tensor]:
        from tilework.zoo.common import chosen

        config = chosen(self.zoo.SIZES, "tiny", self.changes)
        return [torch.as_tensor(t) for t in flatten(self.zoo.synthetic(config, count, seed))[0]]


CASES = {
    "unet": Case("unet", 0.2, steps=300, lr=1e-2),
    "unet3d": Case("unet", 0.7, steps=200, lr=1e-2, changes={"dims": 3, "in_channels": 1, "image_size": 8}),
    "resnet": Case("resnet", 0.2),
    "vit": Case("vit", 0.1),
    "cosmic": Case("cosmic", 0.7, steps=80),
    "gpt": Case("gpt", 1.1, steps=400, lr=5e-3),  # ln 2 = 0.69 for who knows the language, ln 64 = 4.16 for who does not
    "bert": Case("bert", 2.5, steps=1500),
    "llama": Case("llama", 1.0, steps=400, lr=5e-3),
    "braggnn": Case("braggnn", 0.002, steps=800, lr=3e-3),  # the middle of the patch, always: 0.013
    "uno": Case("uno", 0.05, steps=300),
    "phase": Case("phase", 0.6, steps=100),
    "dcrnn": Case("dcrnn", 0.2),
    "fno": Case("fno", 0.5),
}


def test_every_model_of_the_zoo_is_here() -> None:
    folder = Path(importlib.import_module("tilework.zoo").__file__).parent  # type: ignore[arg-type]
    files = {p.stem for p in folder.glob("*.py")} - {"__init__", "common", "digits", "lenet", "logreg", "pretrained"}
    assert {c.module for c in CASES.values()} == set(MODELS) == files


@pytest.fixture(scope="module")
def zoo_artifact(workshop: Path):
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            path = workshop / f"zoo-{name}.pef"
            with warnings.catch_warnings():
                warnings.simplefilter("error", tilework.TileworkWarning)  # a step that runs at eager's speed, say
                compile_step(CASES[name].build(), path, options=Options(programs="fused", opt_level=1), weights="none")
            made[name] = path
        return made[name]

    return make


def session_of(path: Path, step: tilework.Step) -> tilework.Session:
    session = tilework.load(path, seed=SEED)
    session.to_device(step.model, step.optimizers, loss=step.loss if isinstance(step.loss, torch.nn.Module) else None)
    return session


def stirred(step: tilework.Step) -> tilework.Step:
    """Parameters that begin as zeros become a little different: else some gradients are zeros too, and nothing is compared."""
    g = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for p in step.model.parameters():
            if not p.any():
                p.add_(0.02 * torch.randn(p.shape, generator=g))
    return step


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_beside_eager(zoo_artifact, name: str) -> None:
    """Losses, and how far all parameters have come: element by element, Adam makes steps of full size out of rounding noise."""
    case = CASES[name]
    step, twin = stirred(case.build()), stirred(case.build())
    before = {k: p.detach().clone() for k, p in twin.model.named_parameters()}
    rows = len(flatten(step.inputs)[0][0])
    data = [case.rows(rows, seed) for seed in range(1, NUM_STEPS + 1)]
    expected = train_eager(twin, data)
    session = session_of(zoo_artifact(name), step)
    found = train_session(session, step, data, sections=False)
    assert relative(found.losses[0], expected.losses[0]) <= FIRST_STEP
    for number, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert relative(mine, theirs) <= case.later, f"loss of step {number + 1}"
    after = session.state_dict()
    moved = {k: p.detach() - before[k] for k, p in twin.model.named_parameters()}
    wrong = {k: after[k] - before[k] - m for k, m in moved.items()}
    assert length(wrong) <= 30 * case.later * length(moved)
    assert all(m.any() for m in moved.values())
    for name_, buffer in twin.model.named_buffers():
        if name_ in twin.model.state_dict():
            assert relative(after[name_], buffer, floor=1e-2) <= 30 * case.later, f"buffer {name_}"


def length(tensors: dict[str, Tensor]) -> float:
    return float(sum(t.double().pow(2).sum() for t in tensors.values())) ** 0.5


@pytest.mark.parametrize("name", CASES)
def test_learns_its_synthetic_data(zoo_artifact, name: str) -> None:
    """Batches that it has not seen before; the last twenty of them count."""
    case = CASES[name]
    step = case.build()
    session = session_of(zoo_artifact(name), step)
    if case.lr is not None:
        session.set(lr=case.lr)
    rows = len(flatten(step.inputs)[0][0])
    result = session.run(*case.rows(rows * case.steps, seed=1), num_steps=case.steps, outputs="loss")
    losses = result.losses.flatten().tolist()
    assert sum(losses[-20:]) / 20 < case.learns, (losses[0], sum(losses[-20:]) / 20)
