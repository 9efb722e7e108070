"""Step(examples="shapes"): whatever values the examples have, the step is captured and is checked on values that are valid."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilework
from models import MODELS
from tilework.capture.capture import capture

REFERENCE = tilework.Options(device="reference")


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        return F.binary_cross_entropy(self.head(self.embed(tokens)).sigmoid(), wanted)


def test_values_mean_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Both()
    tokens, wanted = torch.full((5,), 10**6), torch.randn(5, 3) * 10
    step = tilework.Step(model=model, inputs=(tokens, wanted), loss=0, examples="shapes",
                         optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    done = tilework.compile(step, tmp_path / "m.pef", options=REFERENCE, weights="inside")
    assert done.verification.compared
    with tilework.load(done.path) as session:
        tokens, wanted = torch.randint(0, 7, (5,)), torch.rand(5, 3)
        assert float(session.run(tokens, wanted).loss) == pytest.approx(float(model(tokens, wanted)), rel=1e-5)
    step.examples = "data"
    with pytest.raises(tilework.UserError, match="fails on the example inputs"):
        tilework.compile(step, tmp_path / "n.pef", options=REFERENCE)


def test_own_values_come_first() -> None:
    """They may have a structure: lengths, say."""
    model = Both()
    tokens, wanted = torch.tensor([6, 5, 4]), torch.full((3, 3), 0.25)
    inputs = tilework.settled(tilework.Step(model=model, inputs=(tokens, wanted), examples="shapes")).inputs
    assert inputs[0] is tokens and inputs[1] is wanted
    odd = tilework.settled(tilework.Step(model=model, inputs=(tokens, wanted - 7), examples="shapes")).inputs
    assert odd[0] is tokens and float(odd[1].min()) > 0


def test_what_values_do_not_mend(tmp_path: Path) -> None:
    model = Both()
    step = tilework.Step(model=model, inputs=(torch.full((5,), 99), torch.randn(4, 3)), examples="shapes")
    with pytest.raises(tilework.UserError, match=r"Using a target size|input size"):
        tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)


@pytest.mark.slow
def test_shapes_show_what_values_show() -> None:
    """The same graphs, for every model of the suite; and none of them is computed."""
    for name, make in MODELS.items():
        with_values, told = capture(make()), list[str]()
        found = capture(dataclasses.replace(make(), examples="shapes"), report=told.append)
        assert not any("with values" in line for line in told), name
        assert {k: g.digest() for k, g in found.sections.items()} == {k: g.digest() for k, g in with_values.sections.items()}
        assert (found.signature, found.params, found.hyper) == (with_values.signature, with_values.params, with_values.hyper)


def test_where_shapes_are_not_enough() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not bool((x == x).all()):
                raise ValueError("not a number")
            return self.layer(x).sum()

    told: list[str] = []
    step = tilework.Step(model=Branches(), inputs=(torch.randn(4, 3),), examples="shapes")
    assert capture(step, report=told.append).signature.checks and any("with values: DataDependent" in line for line in told)
    with torch.device("meta"):
        empty = Branches()
    with pytest.raises(tilework.UserError, match="shapes are not enough") as e:
        capture(dataclasses.replace(step, model=empty))
    assert e.value.id == "model-meta"


def test_a_model_without_weights(tmp_path: Path) -> None:
    """On the meta device it is planned and compiled; weights come later. The model itself stays as it is."""
    model = Both()
    with torch.device("meta"):
        empty = Both()
    tokens, wanted = torch.randint(0, 7, (5,)), torch.rand(5, 3)
    step = tilework.Step(model=empty, inputs=(tokens, wanted), loss=0, optimizer=torch.optim.Adam(empty.parameters(), 0.1))
    with pytest.raises(tilework.UserError, match="no weights to write"):
        tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE, weights="none", verify=False)
    assert all(p.is_meta for p in empty.parameters()) and not step.optimizer.state
    with tilework.load(tmp_path / "m.pef") as session:
        session.load_tensors(model.state_dict())
        for _ in range(3):
            loss = session.run(tokens, wanted).loss
        session.to_host(trained := Both())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        expected = model(tokens, wanted)
        expected.backward()
        optimizer.step()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(trained.parameters(), model.parameters(), strict=True))


def test_what_shapes_began_is_forgotten() -> None:
    """Inference reads a value, training does not: the real run begins anew, and constants are there once."""
    scale = torch.full((3,), 2.0)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training and not bool((x == x).all()):
                raise ValueError("not a number")
            return (self.layer(x * scale) * torch.tensor([1.0, 3.0])).sum()

    def step(examples: str) -> tilework.Step:
        model = Reads()
        return tilework.Step(model=model, inputs=(torch.randn(4, 3),), loss=0, examples=examples,
                             optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip

    told: list[str] = []
    found, expected = capture(step("shapes"), report=told.append), capture(step("data"))
    assert any("with values" in line for line in told)
    assert {k: t.tolist() for k, t in found.constants.items()} == {k: t.tolist() for k, t in expected.constants.items()}
    assert {k: g.digest() for k, g in found.sections.items()} == {k: g.digest() for k, g in expected.sections.items()}
