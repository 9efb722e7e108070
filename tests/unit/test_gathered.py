"""What is put under each other lies there from the start: the right memory at the right time, and no copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_pieces import FUSED, Recurrent, step_of
from torch import Tensor, nn

import tilework
from tilework.compiler.build import plan_step
from tilework.plan import gathered
from tilework.plan.pieces import Cut

pytestmark = pytest.mark.slow

CAT, STACK = "aten.cat.default", "aten.stack.default"


class Tangled(nn.Module):
    """States of a loop that are stacked, put under each other in other orders, twice, with inputs among them, picked out again,
    looked at through views, and read while later ones are still made."""

    def __init__(self, steps: int = 9) -> None:
        super().__init__()
        self.steps = steps
        self.cell, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("kept", torch.zeros(steps, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        h, states, others = x, [], []
        for i in range(self.steps):
            h = torch.tanh(self.cell(h)) * (1 + h.sigmoid())
            states.append(h)
            recent = torch.cat(states[-5:] if i >= 4 else [h] * 5)  # within what repeats
            others.append(self.second(recent.view(5, 4, 8).mean(0)).relu())
        whole = torch.stack(states)
        joined = torch.cat([x, *states[::-1], x, states[2], states[2]])
        more = torch.cat([o.t().contiguous() for o in others])  # views of what the loop makes
        self.kept.copy_(torch.stack([o.detach() for o in others]))
        mixed = torch.cat([(s > 0.1).to((torch.float32, torch.int64)[i % 2]) for i, s in enumerate(states)])  # converts
        self.kept.mul_(1 + mixed.mean() * 0.01)
        picked = whole.transpose(0, 1)[:, -1] * whole[3]
        return (joined.square().mean() + more.sin().mean() + picked.mean()) * whole.transpose(0, 2).mean() + joined[
            8:12
        ].sum() / 9


def _copies(cut: Cut) -> int:
    return sum(len(n.refs()) for call in cut.calls for n in cut.pieces[call.piece].nodes if n.op in (CAT, STACK))


@pytest.mark.parametrize("size", [8, 400])
def test_numbers(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_WORTH", 1)
    torch.manual_seed(0)
    model, x = Tangled(), torch.randn(4, 8)
    options = tilework.Options(programs="fused", piece_size=size)
    made = tilework.compile(step_of(model, x, torch.optim.Adam), tmp_path / "gathered.pef", options=options)
    cut = made.plan.cuts["step"]
    assert not made.verification.retreats
    wholes = {n.name for n in cut.graph.nodes if n.op in (CAT, STACK)}
    assert wholes & set(cut.temporaries), "nothing is gathered"
    results = []
    for device in ("cpu", "reference"):
        with tilework.load(made.path, device=device) as session:
            losses = [session.run(x).loss.item() for _ in range(3)]
            results.append((losses, {k: v.clone() for k, v in session.tensors().items()}))
    (losses, tensors), (expected_losses, expected) = results
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, want in expected.items():
        torch.testing.assert_close(tensors[name], want, rtol=1e-3, atol=2e-5, msg=name)


def test_a_recurrent_layer_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0][:, -1].square().mean()

    x = torch.randn(3, 14, 8)
    cut = plan_step(step_of(Last(width=120), x), FUSED).cuts["step"]
    gates = 4 * 14  # one cat of four gates in each time step
    assert _copies(cut) == gates
    assert not any(n.op == STACK for n in cut.graph.nodes)  # of which only the last part is used
    monkeypatch.setattr(gathered, "_MANY", 1000)
    assert _copies(plan_step(step_of(Last(width=120), x), FUSED).cuts["step"]) == gates + 14 + 14
