"""Which loss is the final one; and identity_loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pop_helpers import options, same, twin
from torch import nn

import poptorch

G = torch.Generator().manual_seed(3)
X = torch.randn(4, 4, generator=G)
CLASSES = torch.tensor([0, 2, 1, 1])
TARGET = torch.rand(4, 3, generator=G)
SIGNS = torch.tensor([[1.0, -1.0, 1.0]] * 4)


class Net(nn.Module):
    """Returns what it is told, whatever the loss is."""

    def __init__(self, loss, returns: bool = True) -> None:
        super().__init__()
        self.fc, self._loss, self._returns = nn.Linear(4, 3), loss, returns

    def forward(self, x, y):
        out = self.fc(x)
        loss = self._loss(out, y)
        return (out, loss) if self._returns else out


def update(model: nn.Module, y: torch.Tensor, loss) -> nn.Module:
    """One update in eager PyTorch."""
    other = twin(model)
    value = loss(other.fc(X), y)
    value.backward(torch.ones_like(value))
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    return other


LOSSES = {
    "cross_entropy": (F.cross_entropy, CLASSES),
    "cross_entropy module": (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    "nll": (lambda o, y: F.nll_loss(F.log_softmax(o, 1), y), CLASSES),
    "mse": (F.mse_loss, TARGET),
    "mse sum": (nn.MSELoss(reduction="sum"), TARGET),
    "mse none": (nn.MSELoss(reduction="none"), TARGET),
    "l1": (F.l1_loss, TARGET),
    "smooth l1": (F.smooth_l1_loss, TARGET),
    "huber": (F.huber_loss, TARGET),
    "bce logits": (F.binary_cross_entropy_with_logits, TARGET),
    "bce": (lambda o, y: F.binary_cross_entropy(torch.sigmoid(o), y), TARGET),
    "kl": (lambda o, y: F.kl_div(F.log_softmax(o, 1), y, reduction="batchmean"), TARGET),
    "poisson": (F.poisson_nll_loss, TARGET),
    "soft margin": (F.soft_margin_loss, SIGNS),
    "hinge": (F.hinge_embedding_loss, SIGNS),
    "multi margin": (F.multi_margin_loss, CLASSES),
    "identity mean": (lambda o, y: poptorch.identity_loss((o - y).abs(), "mean"), TARGET),
    "identity sum": (lambda o, y: poptorch.identity_loss((o - y).square(), "sum"), TARGET),
    "identity none": (lambda o, y: poptorch.identity_loss((o - y).square().sum(), "none"), TARGET),
    "a sum, marked": (lambda o, y: poptorch.identity_loss(F.mse_loss(o, y) + 0.5 * F.l1_loss(o, y), "none"), TARGET),
    "one in another": (lambda o, y: F.mse_loss(F.l1_loss(o, y), torch.tensor(0.3)), TARGET),
    "marked twice": (lambda o, y: poptorch.identity_loss(poptorch.identity_loss(o - y, "none").square(), "mean"), TARGET),
}


@pytest.mark.parametrize("returns", [True, False], ids=["returned", "not returned"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_found(name: str, returns: bool) -> None:
    loss, y = LOSSES[name]
    model = Net(loss, returns)
    other = update(model, y, loss)
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))(X, y)
    same(model, other)


def with_decay(out, y):
    return F.mse_loss(out, y) + 0.1 * out.square().mean()


@pytest.mark.parametrize("loss", [lambda o, y: 10 * F.mse_loss(o, y), with_decay], ids=["scaled", "with decay"])
def test_a_loss_that_is_changed_afterwards(loss) -> None:
    """What is trained is the loss as its function gave it: a change must be marked, or be for the eye alone."""
    model = Net(loss)
    executor = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="that change would not be trained"):
        executor(X, TARGET)
    marked = Net(lambda o, y: poptorch.identity_loss(loss(o, y), "none"))
    expected = update(marked, TARGET, loss)
    poptorch.trainingModel(marked, options(), torch.optim.SGD(marked.parameters(), lr=0.1))(X, TARGET)
    same(marked, expected)


class FromZero(nn.Module):
    """A loss with something beside it that changes no value at first."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.fc, self.delta, self._loss = nn.Linear(4, 3), nn.Parameter(torch.zeros(3)), loss
        self.register_buffer("one", torch.ones(()))

    def forward(self, x, y):
        out = self.fc(x) + self.delta
        return out, self._loss(self, F.mse_loss(out, y))


@pytest.mark.parametrize("loss", [
    lambda m, value: value + 10 * m.delta.square().sum(),
    lambda m, value: value * m.one,
    lambda m, value: torch.maximum(value, value * m.one).view(1),
    lambda m, value: value.expand(2).sum() / 2,
    lambda m, value: (value + m.delta.square().sum(), value.detach()),
], ids=["penalty", "buffer", "maximum", "reduced", "detached beside it"])  # fmt: skip
def test_a_change_that_is_none_at_the_first_call(loss) -> None:
    model = FromZero(loss)
    with pytest.raises(poptorch.Error, match="that change would not be trained"):
        poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))(X, TARGET)


COPIES = {
    "view": lambda v: v.view(1), "reshape": lambda v: v.reshape(1, 1).squeeze(0), "unsqueeze": lambda v: v.unsqueeze(0),
    "squeeze": lambda v: v[None, None].squeeze((0, 1)), "expand": lambda v: v.expand(1), "clone": torch.clone,
    "half": lambda v: v.half(), "double": lambda v: v.double(), "stack": lambda v: torch.stack([v]),
    "item": lambda v: v.view(1)[0],
    "mean": lambda v: v.view(1).mean(), "sum": torch.sum, "copied": lambda v: torch.zeros(()).copy_(v), "nop": poptorch.nop,
    "checkpoint": poptorch.recomputationCheckpoint, "itself": lambda v: v, "detached": lambda v: 10 * v.detach(),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_the_loss_is_the_loss(name: str) -> None:
    model = Net(lambda o, y: COPIES[name](F.mse_loss(o, y)))
    expected = update(model, TARGET, F.mse_loss)
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))(X, TARGET)
    same(model, expected)


def test_a_part_of_a_loss_is_not_the_loss() -> None:
    model = Net(lambda o, y: F.mse_loss(o, y, reduction="none")[0])
    with pytest.raises(poptorch.Error, match="that change would not be trained"):
        poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))(X, TARGET)


def test_what_is_made_of_a_loss_may_be_returned_beside_it() -> None:
    model = Net(lambda o, y: (value := F.mse_loss(o, y), 10 * value))
    expected = update(model, TARGET, F.mse_loss)
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))(X, TARGET)
    same(model, expected)


def test_no_loss() -> None:
    model = Net(lambda o, y: (o - y).square().mean())
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph!"):
        poptorch.trainingModel(model, options())(X, TARGET)


def test_a_loss_that_trains_nothing() -> None:
    model = Net(lambda o, y: F.mse_loss(o.detach(), y))
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph!"):
        poptorch.trainingModel(model, options())(X, TARGET)


@pytest.mark.parametrize("loss", [
    lambda o, y: (F.mse_loss(o, y), F.l1_loss(o, y)),
    lambda o, y: F.mse_loss(o, y) + F.l1_loss(o, y),
    lambda o, y: (poptorch.identity_loss(o, "mean"), poptorch.identity_loss(o, "sum")),
])  # fmt: skip
def test_two_independent_losses(loss) -> None:
    with pytest.raises(poptorch.Error, match=r"Multiple independent losses found in graph. Graph must have one final loss"):
        poptorch.trainingModel(Net(loss), options())(X, TARGET)


def test_a_metric_without_gradients_is_no_second_loss() -> None:
    def loss(o, y):
        with torch.no_grad():
            F.l1_loss(o, y)
        return F.mse_loss(o, y)

    model = Net(loss)
    other = update(model, TARGET, F.mse_loss)
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))(X, TARGET)
    same(model, other)


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 6.0), ("mean", 2.0)])
def test_identity_loss_reduces_in_eager_as_well(reduction: str, expected: float) -> None:
    assert poptorch.identity_loss(torch.tensor([1.0, 2.0, 3.0]), reduction).item() == expected


@pytest.mark.parametrize("reduction", ["max", None, 1])
def test_another_reduction(reduction) -> None:
    with pytest.raises(ValueError, match="Unsupported reduction type"):
        poptorch.identity_loss(torch.zeros(2), reduction)


def test_inference_needs_no_loss() -> None:
    model = Net(lambda o, y: o + y)
    out, other = poptorch.inferenceModel(model, options())(X, TARGET)
    torch.testing.assert_close(other, out + TARGET)


def test_backward_on_an_output() -> None:
    model = Net(F.mse_loss)
    _, loss = poptorch.trainingModel(model, options())(X, TARGET)
    with pytest.raises(poptorch.Error, match="backward"):
        loss.backward()
    assert type(loss * 2) is torch.Tensor and f"{loss:.2f}" == f"{loss.item():.2f}" and "tensor(" in repr(loss)


def test_an_output_is_saved_as_a_plain_tensor(tmp_path) -> None:
    import copy

    out = poptorch.inferenceModel(nn.Linear(4, 2), options())(X)
    torch.save(out, tmp_path / "o.pt")
    assert type(torch.load(tmp_path / "o.pt", weights_only=True)) is torch.Tensor
    assert torch.equal(copy.deepcopy(out), out) and type(copy.deepcopy(out)) is torch.Tensor
    assert out.numpy().shape == (4, 2)
