"""Values that a model's Python may read, because they are the same at every step or because another value is an error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilework
from tilework.capture.capture import capture


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 4)


class Checks(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        classes = 4
        if y.min() == 1:
            raise ValueError(f"labels must not begin at 1 of {classes}, found {y}")
        assert torch.isfinite(x).all(), "x is not finite"
        if (x > 1e6).any():
            warnings.warn("large numbers", stacklevel=2)
        return F.cross_entropy(self.net(x), y)


def session_of(model: nn.Module, tmp_path: Path, *inputs: Tensor, device: str = "reference", **kwargs: Any) -> tilework.Session:
    step = tilework.Step(model=model, inputs=inputs, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    options = tilework.Options(device=device, programs=kwargs.pop("programs", "fused"), opt_level=1)
    tilework.compile(step, tmp_path / "a.pef", options=options, weights="inside")
    return tilework.load(tmp_path / "a.pef", device=device, **kwargs)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_checks_of_the_model_are_checks_of_every_run(tmp_path: Path, device: str) -> None:
    x, y = torch.randn(3, 6), torch.tensor([0, 1, 3])
    with session_of(Checks(), tmp_path, x, y, device=device) as session:
        assert [c.text for c in session.manifest.signature.checks["fwd"]] == [
            "labels must not begin at 1 of 4, found ...",
            "x is not finite",
        ]
        session.run(x, y)
        with pytest.raises(tilework.UserError, match="labels must not begin at 1") as error:
            session.run(x, torch.tensor([2, 1, 3]))
        assert error.value.id == "run-check" and "test_reads.py" in str(error.value) and "changed the weights" in str(error.value)
        with pytest.raises(tilework.UserError, match="x is not finite"):
            session.infer(x.index_fill(0, torch.tensor([1]), float("inf")), y)
        with pytest.raises(tilework.UserError, match=r"out of range(?s:.*)labels must not begin at 1") as error:
            session.run(x, torch.tensor([0, 1, 4]))
        assert error.value.id == "run-check"
        # of several steps in one call, those before the one at fault are done
        before = session.num_steps
        with pytest.raises(tilework.UserError, match="labels"):
            session.run(x.repeat(3, 1), torch.tensor([0, 1, 3, 1, 2, 3, 0, 1, 3]), num_steps=3)
        assert session.num_steps == before + 1
    with tilework.load(tmp_path / "a.pef", device=device, nan_error=True) as session:
        start = session.state_dict()
        with pytest.raises(tilework.UserError, match="was undone"):
            session.run(x, torch.tensor([2, 1, 3]))
        assert all(torch.equal(start[k], t) for k, t in session.state_dict().items())


class Constants(Net):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4).triu(1).bool()
        if mask.any() and int(mask.sum()) == 6 and mask[0].tolist() == [False, True, True, True]:
            x = x * torch.nonzero(mask).shape[0]
        if torch.rand([]) < 0.0 or not torch.rand(()) < 1.0:  # never
            x = x * 100
        return self.net(x).square().mean()


def test_what_follows_from_constants_may_be_read(tmp_path: Path) -> None:
    x, model = torch.randn(4, 6), Constants()
    expected = model.net(x * 6).square().mean()
    with session_of(model, tmp_path, x) as session:
        torch.testing.assert_close(session.run(x).loss, expected.detach())


def _branch_on_random(self: Net, x: Tensor) -> Tensor:
    return self.net(x).mean() * (2 if torch.rand([]) < 0.5 else 1)


def _branch_on_input(self: Net, x: Tensor) -> Tensor:
    return self.net(x).mean() * (2 if x.sum() > 0 else 1)


def _number_in_a_check(self: Net, x: Tensor) -> Tensor:
    if x.max().item() > 100:  # the number itself is read, and may be another one next time
        raise ValueError
    return self.net(x).mean()


def _written_constant(self: Net, x: Tensor) -> Tensor:
    flag = torch.zeros(())
    flag += x.sum()
    return self.net(x).mean() * (2 if flag > 0 else 1)


def _raises_and_goes_on(self: Net, x: Tensor) -> Tensor:
    if x.sum() > 1e9:
        x = x * 2
    return self.net(x).mean()


@pytest.mark.parametrize("forward", [_branch_on_random, _branch_on_input, _number_in_a_check, _written_constant,
                                     _raises_and_goes_on])  # fmt: skip
def test_other_reads_are_refused(forward: Any) -> None:
    model = type("Model", (Net,), {"forward": forward})()
    with pytest.raises(tilework.UserError) as error:
        capture(tilework.Step(model=model, inputs=(torch.randn(3, 6),), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    assert error.value.id == "capture-python" and "test_reads.py" in str(error.value)


def test_objects_among_the_outputs_are_left_out_and_named(tmp_path: Path) -> None:
    class Cache:
        pass

    class Model(Net):
        def forward(self, x: Tensor) -> Any:
            return {"loss": self.net(x).mean(), "past": [Cache()], "n": 3}

    with pytest.warns(UserWarning, match=r"past\[0\] \(Cache\)"):
        session = session_of(Model(), tmp_path, torch.randn(3, 6))
    with session:
        assert session.run(torch.randn(3, 6)).outputs["past"] == [None]


def test_attributes_that_forward_sets_anew_are_left_out_and_named(tmp_path: Path) -> None:
    class Keeps(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.net(x)
            return self.hidden.mean()

    class Carries(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.net(x) + self.hidden.detach()
            return self.hidden.mean()

    x = torch.randn(3, 6)
    model = Keeps()
    model.hidden = torch.zeros(())
    with pytest.warns(UserWarning, match="hidden"), session_of(model, tmp_path, x):
        assert model.hidden.shape == ()
    model = Carries()
    model.hidden = torch.zeros(3, 4)
    with pytest.raises(tilework.UserError, match="changes Python state"):
        session_of(model, tmp_path, x)


class Selects(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        labels = y.masked_select(y >= 0)
        return F.cross_entropy(self.net(x[: len(labels)]), labels)


def test_masked_select_of_integer_inputs_is_of_a_fixed_size(tmp_path: Path) -> None:
    x, y = torch.randn(6, 6), torch.tensor([1, -1, 3, 2, -1, 0])
    with pytest.warns(tilework.TileworkWarning, match="4 elements are chosen here"):
        session = session_of(Selects(), tmp_path, x, y)
    other = torch.tensor([-1, 3, 0, -1, 2, 1])
    torch.testing.assert_close(session.run(x, other).loss, Selects()(x, other).detach())
    with pytest.raises(tilework.UserError, match="4 elements are chosen here"):
        session.run(x, y.clamp(min=0))
