"""Packed sequences: lengths that the program knows, or reads from an input, beside eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tilework
from tilework.errors import TileworkError

pytestmark = pytest.mark.slow

LENGTHS = [6, 3, 4]


class Packed(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], given: bool, **settings: object) -> None:
        super().__init__()
        self.net, self.given = kind(4, 5, batch_first=True, **settings), given

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        known = lengths if self.given else LENGTHS
        packed = nn.utils.rnn.pack_padded_sequence(x, known, batch_first=True, enforce_sorted=False)
        out, last = self.net(packed)
        padded, found = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, padding_value=0.5, total_length=7)
        end = last[0] if isinstance(last, tuple) else last
        return (padded * torch.linspace(-1, 1, padded.shape[-1])).square().mean() + end.tanh().mean() * found.sum()


def compiled(tmp_path: Path, kind: type[nn.RNNBase], given: bool, **settings: object) -> tilework.Session:
    torch.manual_seed(0)
    model = Packed(kind, given, **settings)
    inputs = (torch.randn(3, 6, 4), torch.tensor(LENGTHS))
    step = tilework.Step(model=model, inputs=inputs, loss=0, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    options = tilework.Options(device="reference")
    made = tilework.compile(step, tmp_path / "m.pef", options=options, weights="inside")  # checks itself beside the module
    assert made.verification.compared and not made.verification.retreats
    session = tilework.load(made.path)
    expected = model(*inputs).item()
    if not settings.get("dropout"):
        assert session.run(*inputs).loss.item() == pytest.approx(expected, rel=1e-5)
    return session


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"proj_size": 3}),
        (nn.LSTM, {"num_layers": 2, "dropout": 0.3}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    ],
)
def test_packed(kind: type[nn.RNNBase], settings: dict[str, object], given: bool, tmp_path: Path) -> None:
    compiled(tmp_path, kind, given, **settings).close()


def test_other_lengths_are_refused_in_the_run(tmp_path: Path) -> None:
    with compiled(tmp_path, nn.GRU, given=True) as session, pytest.raises(TileworkError, match="run-check"):
        session.run(torch.randn(3, 6, 4), torch.tensor([6, 2, 4]))
