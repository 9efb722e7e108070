"""What cannot be captured is a user error: the file, the line and its text, why, a rewrite; all places in one report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilework
from tilework.capture.capture import capture

X, Y = torch.randn(4, 6), torch.randn(4, 6)


def report(forward, *, model: nn.Module | None = None, **attributes) -> str:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            for name, value in attributes.items():
                setattr(self, name, value)

        def forward(self, x):
            return forward(self, self.fc(x))

    m = model or Model()
    step = tilework.Step(model=m, inputs=(X,), targets=(Y,), loss=F.mse_loss, optimizer=torch.optim.SGD(m.parameters(), lr=0.1))
    with pytest.raises(tilework.UserError) as e:
        capture(step)
    assert e.value.exit_code == 2
    return str(e.value)


def branch(self, x):
    if x.sum() > 0:  # HERE branch
        x = x * 2
    return x


def while_loop(self, x):
    while x.abs().max() > 1:  # HERE while
        x = x / 2
    return x


def for_loop(self, x):
    for _ in range(int(x.abs().sum())):  # HERE for
        x = x + 1
    return x


def item(self, x):
    return x * x.mean().item()  # HERE item


def masked(self, x):
    return x[x > 0].cumsum(0).sum() + x  # HERE masked


def nonzero(self, x):
    return x + torch.nonzero(x).sum()  # HERE nonzero


def to_numpy(self, x):
    return x + float(x.detach().numpy().mean())  # HERE numpy


def prints(self, x):
    print("x is", x.shape)  # HERE print
    return x


def counts(self, x):
    self.calls = getattr(self, "calls", 0) + 1  # HERE counter
    return x


@pytest.mark.parametrize(
    ("forward", "line", "fix"),
    [
        (branch, "if x.sum() > 0:", "torch.where"),
        (while_loop, "while x.abs().max() > 1:", "fixed number of times"),
        (for_loop, "for _ in range(int(x.abs().sum())):", "fixed number of times"),
        (item, "return x * x.mean().item()", "keep the value as a tensor"),
        (masked, "return x[x > 0].cumsum(0).sum() + x", "mask"),
        (nonzero, "return x + torch.nonzero(x).sum()", "mask"),
        (to_numpy, "x.detach().numpy()", "torch function"),
        (prints, 'print("x is", x.shape)', "return the value"),
        (counts, "self.calls = getattr", "register_buffer"),
    ],
)
def test_one_place(forward, line: str, fix: str, capsys) -> None:
    text = report(forward)
    number = next(i for i, s in enumerate(Path(__file__).read_text().splitlines(), 1) if line in s and "HERE" in s)
    assert f"test_capture_errors.py:{number}" in text
    assert line in text and fix in text and "why:" in text
    assert "1 place" in text and "tilework explain capture-python" in text


def test_append_to_a_list_is_found() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.history = nn.Linear(6, 6), []

        def forward(self, x):
            self.history.append(x.detach())  # HERE keeps
            return self.fc(x)

    m = Keeps()
    text = report(None, model=m)
    number = next(i for i, s in enumerate(Path(__file__).read_text().splitlines(), 1) if "HERE keeps" in s)
    assert f"test_capture_errors.py:{number}" in text and "register_buffer" in text


def test_all_places_in_one_report(capsys) -> None:
    def many(self, x):
        print("hello")
        x = x * x.max().item()
        if x.mean() > 0:
            x = x + 1
        self.calls = getattr(self, "calls", 0) + 1
        return x[x > 0].cumsum(0).mean() + x

    text = report(many)
    assert "5 places" in text
    for line in ('print("hello")', "x.max().item()", "if x.mean() > 0:", "self.calls =", "x[x > 0]"):
        assert line in text


def test_the_model_is_left_as_it_was(capsys) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.bn = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return self.bn(self.fc(x))

    m = Model()
    before = {k: v.clone() for k, v in m.state_dict().items()}
    rng = torch.get_rng_state()
    report(None, model=m)
    assert not hasattr(m, "calls")
    assert all(torch.equal(v, m.state_dict()[k]) for k, v in before.items())
    assert torch.equal(rng, torch.get_rng_state())


def test_a_value_set_once_and_for_all_is_accepted() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            self.width = x.shape[1]
            return self.fc(x) / self.width

    m = Caches()
    capture(tilework.Step(model=m, inputs=(X,), targets=(Y,), loss=F.mse_loss))


def test_custom_operator() -> None:
    @torch.library.custom_op("tests::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x):
        return torch.empty_like(x)

    text = report(lambda self, x: x + double(x).detach())
    assert "tests.double" in text and "not one of PyTorch's own" in text


def test_unknown_optimizer() -> None:
    m = nn.Linear(6, 6)
    step = tilework.Step(model=m, inputs=(X,), targets=(Y,), loss=F.mse_loss, optimizer=torch.optim.Rprop(m.parameters()))
    with pytest.raises(tilework.UserError, match="no update rule"):
        capture(step)


def test_wrong_step_arguments_are_listed_together() -> None:
    with pytest.raises(tilework.UserError) as e:
        tilework.Step(model=nn.Linear(1, 1), inputs=(X,), num_micro_batches=0, precision="int4", clip_norm=-1.0)  # type: ignore[arg-type]
    assert all(word in str(e.value) for word in ("num_micro_batches", "precision", "clip_norm"))


def test_loss_that_is_not_there() -> None:
    m = nn.Linear(6, 6)
    with pytest.raises(tilework.UserError, match="not among"):
        capture(tilework.Step(model=m, inputs=(X,), loss=3))


def test_outputs_that_cannot_be_described() -> None:
    class Odd(nn.Module):
        def forward(self, x):
            return {1: x}

    with pytest.raises(tilework.UserError, match="not a string"):
        capture(tilework.Step(model=Odd(), inputs=(X,)))
