"""Parity: every model on every device gives what the user's untouched module gives in eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from devices import COMPUTING

import tilework
from models import MODELS, OPTIMIZERS
from parity import SEED, assert_same, batches, train_eager, train_session

NUM_STEPS = 20


@pytest.fixture(autouse=True)
def _several_threads() -> Iterator[None]:
    """As a user has it. Other tests run on one thread, beside each other."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def compare(session_of, name: str, device: str, **kwargs) -> None:
    for sections in (False, True):
        session, step = session_of(name, device, seed=SEED, **kwargs)
        if sections and step.num_micro_batches > 1:
            continue
        twin = MODELS[name](**kwargs)
        data = batches(step, NUM_STEPS * step.num_micro_batches)
        expected = train_eager(twin, data)
        assert_same(train_session(session, step, data, sections=sections), expected)


LONG = ("gru", "lstm", "unet")


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.slow] if m in LONG else []) for m in MODELS])
def test_models(session_of, name: str, device: str) -> None:
    """Each model with an optimizer of its own; between them all optimizers occur."""
    compare(session_of, name, device)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["linear", "conv_bn", "tied", "multi_optimizer", "clipped"])
def test_combinations_on_reference(session_of, name: str, optimizer: str) -> None:
    """Capture and update rules below the native compiler, where combinations are cheap."""
    compare(session_of, name, "reference", optimizer=optimizer)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_all_combinations(session_of, name: str, optimizer: str) -> None:
    compare(session_of, name, "cpu", optimizer=optimizer)


BF16_FIRST, BF16_LATER = 3e-2, 1e-1  # bf16 keeps 8 bits: 0.4 % a rounding, and a few of them in a row


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("conv_bn", "attention"))])
def test_bfloat16(session_of, name: str) -> None:
    """bf16 products with float32 master weights, against torch.autocast, with bounds of their own."""
    session, step = session_of(name, "cpu", seed=SEED, precision="bfloat16", optimizer="sgd")
    assert all(p.type.dtype == "float32" for p in session.manifest.parameters)
    text = session.artifact.graphs["step"].to_text()
    assert "bfloat16" in text
    data = batches(step, NUM_STEPS)
    expected = train_eager(MODELS[name](precision="bfloat16", optimizer="sgd"), data)
    found = train_session(session, step, data, sections=True)
    assert_same(found, expected, first=BF16_FIRST, later=BF16_LATER)


def test_pure_bfloat16_model(session_of, workshop) -> None:
    """A model that the user turned to bf16 keeps bf16 parameters, as in eager."""

    def make() -> tilework.Step:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).bfloat16()
        x, y = torch.randn(4, 8).bfloat16(), torch.randn(4, 2).bfloat16()
        return tilework.Step(model=model, loss=torch.nn.functional.mse_loss, inputs=(x,), targets=(y,),
                             optimizer=torch.optim.SGD(model.parameters(), lr=0.1))  # fmt: skip

    step, twin = make(), make()
    path = workshop / "bf16.pef"
    tilework.compile(step, path, options=tilework.Options(opt_level=1, programs="fused"), weights="inside")
    session = tilework.load(path)
    for _ in range(3):
        loss = session.run(step.inputs[0], step.targets[0]).loss
        twin.optimizer.zero_grad()
        expected = twin.loss(twin.model(twin.inputs[0]), twin.targets[0])
        expected.backward()
        twin.optimizer.step()
        assert abs(float(loss) - float(expected)) <= 0.03 * abs(float(expected))
    assert session.memory.read("param/0.weight").dtype == torch.bfloat16
