"""x[mask]: rows that are selected by values, with the numbers of eager PyTorch or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilework
from tilework.capture.capture import capture

X, Y, M = torch.randn(3, 5, 8), torch.randint(0, 4, (3, 5)), torch.rand(3, 5) > 0.4


def _cross_entropy(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return F.cross_entropy(net(x)[m], y[m])


def _weighted(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]), ignore_index=2)(net(x)[m], y[m])


def _none(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return F.cross_entropy(net(x).transpose(1, 2), y, reduction="none")[m].mean()


def _regression(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return F.smooth_l1_loss(net(x)[..., 0][m], y[m].float()) + F.mse_loss(net(x)[m], x[m][:, :4], reduction="sum")


def _logarithms(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    p = torch.where(m[..., None], net(x).softmax(-1), 0.0)  # zero where it does not count: its logarithm would be infinite
    return -(p[m].log() * 0.3).sum(-1).mean() + (1 / p[m]).clamp(max=50).sum() * 0.01


def _back(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    out = torch.zeros(3, 5, 4)
    out[m] = net(x[m]).tanh() * 2
    return out.square().mean()


def _rows(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return (F.normalize(net(x)[m], dim=-1) * F.one_hot(y, 4)[m]).sum(1).mean() + net(x)[m, 1:3].mean() + net(x)[m].sum() * 0.01


def _dimensions(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    flags = (y > 1)[m]
    rows = F.normalize(net(x)[m]) + F.layer_norm(net(x)[m], (4,)) + F.embedding(y[m], net.weight)[:, :4].softmax(1)
    return (rows.amax(1) * (~flags).float()).mean() + rows.logsumexp(-1)[:, None].mean() + flags.float().mean()


RIGHT = [_dimensions, _cross_entropy, _weighted, _none, _regression, _logarithms, _back, _rows]


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.how = nn.Linear(8, 4), forward

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return self.how(self.net, x, y, m)


@pytest.mark.parametrize("mask", [M, torch.ones(3, 5) > 0], ids=["some", "all"])
@pytest.mark.parametrize("how", RIGHT, ids=lambda f: f.__name__)
def test_the_numbers_are_eagers(how: Callable[..., Tensor], mask: Tensor, tmp_path: Path) -> None:
    model, twin = Model(how), Model(how)
    step = tilework.Step(model=model, inputs=(X, Y, M), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    made = tilework.compile(step, tmp_path / "a.pef", options=tilework.Options(device="reference"), weights="inside")
    assert made.verification.compared and not made.verification.retreats
    loss = twin(X, Y, mask)
    loss.backward()
    with tilework.load(tmp_path / "a.pef") as session:
        torch.testing.assert_close(session.run(X, Y, mask, keep_gradients=True).loss, loss.detach())
        for name, p in twin.named_parameters():
            torch.testing.assert_close(session.gradients()[name], p.grad)


def _over_rows(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return net(x)[m].cumsum(0).mean()


def _number_of_rows(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return net(x)[m].sum() / net(x)[m].shape[0]


def _other_masks(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return (net(x)[m] + net(x)[m.clone()]).mean()


def _products(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return (net(x)[m] @ net(x)[m].T).mean()


def _dropout(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return F.dropout(net(x)[m], 0.5).mean()


def _norms(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return net(x)[m].norm(1, -1).mean()


def _softmax_over_rows(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
    return net(x)[m].softmax(0).square().sum()


@pytest.mark.parametrize("how", [_over_rows, _number_of_rows, _other_masks, _products, _dropout, _softmax_over_rows, _norms],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_what_needs_the_number_of_rows_is_refused(how: Callable[..., Tensor]) -> None:
    model = Model(lambda net, x, y, m: how(net, x, y, m & (x[..., 0] > -100)))
    with pytest.raises(tilework.UserError, match="shape of the result depends on a tensor's values") as error:
        capture(tilework.Step(model=model, inputs=(X, Y, M), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert "test_masked.py" in str(error.value)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_numbers_that_follow_from_integer_inputs_are_fixed_and_checked(device: str, tmp_path: Path) -> None:
    def how(net: Any, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return net(x)[m].cumsum(0).mean() + torch.zeros(int(y.max()) + 1).index_add(0, y.flatten(), x[..., 0].flatten()).max()

    m, y = torch.zeros(3, 5, dtype=torch.bool), torch.zeros(3, 5, dtype=torch.int64)
    m[0, :4], y[1, 2] = True, 3
    model, twin = Model(how), Model(how)
    step = tilework.Step(model=model, inputs=(X, y, m), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    options = tilework.Options(device=device, programs="fused", opt_level=1)
    with pytest.warns(tilework.TileworkWarning, match="4 elements are chosen here; .*the number that is read here is 3"):
        tilework.compile(step, tmp_path / "a.pef", options=options, weights="inside")
    with tilework.load(tmp_path / "a.pef", device=device) as session:
        others, turned = y.flip(0), m.flip(1)
        torch.testing.assert_close(session.run(X, others, turned).loss, twin(X, others, turned).detach())
        with pytest.raises(tilework.UserError, match="4 elements are chosen here in this artifact"):
            session.run(X, y, ~m)
        with pytest.raises(tilework.UserError, match="the number that is read here is 3 in this artifact"):
            session.run(X, y.clamp(max=1), m)
