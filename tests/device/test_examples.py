"""Step(examples="shapes"): whatever values the examples have, the step is captured and is checked on values that are valid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilework

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
