"""Fixtures. Native compiles are slow (seconds), so they share one cache, and artifacts are made once a session."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "outside"))  # a device of another distribution, found by its entry points
# Several tests run at once: processes that they start have one thread, where the test does not say otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TILEWORK_LEASE", "0")  # tests run beside each other; those of tiles take leases, in folders of their own

import tilework
from models import MODELS
from tilework.compiler.build import compile_step
from tilework.plan.options import Options

FULL = os.environ.get("TILEWORK_FULL") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("full") and not FULL:
            item.add_marker(pytest.mark.skip(reason="big numbers: make test-full"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where artifacts of this test session are."""
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture(scope="session")
def artifact(workshop: Path) -> Callable[..., Path]:
    """artifact("mlp", device="cpu", optimizer="adam") -> path of an artifact without weights, compiled once."""
    made: dict[str, Path] = {}

    def make(name: str, device: str = "cpu", programs: str = "all", **kwargs: object) -> Path:
        key = f"{name}-{device}-{programs}-" + hashlib.sha256(repr(sorted(kwargs.items())).encode()).hexdigest()[:8]
        if key not in made:
            path = workshop / f"{key}.pef"
            options = Options(device=device, programs=programs)  # type: ignore[arg-type]
            compile_step(MODELS[name](**kwargs), path, options=options, weights="none")
            made[key] = path
        return made[key]

    return make


@pytest.fixture
def session_of(artifact: Callable[..., Path]) -> Callable[..., tuple[tilework.Session, tilework.Step]]:
    """A session with the weights of a fresh step, and that step."""

    def make(name: str, device: str = "cpu", seed: int = 0, **kwargs: object) -> tuple[tilework.Session, tilework.Step]:
        session = tilework.load(artifact(name, device, **kwargs), seed=seed)
        step = MODELS[name](**kwargs)
        loss = step.loss if isinstance(step.loss, torch.nn.Module) else None
        session.to_device(step.model, step.optimizers or None, loss=loss)
        return session, step

    return make
