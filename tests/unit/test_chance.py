"""Layers that a random number leaves out (capture/chance.py): several steps beside eager PyTorch, which takes the branch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import checkpoint

import tilework
from tilework.artifact.random import next_seed
from tilework.capture.reached import ALWAYS, all_of, any_of, holds
from tilework.capture.seeded import seeded

pytestmark = pytest.mark.slow

SEED, STEPS, WIDTH = 3, 8, 6
Optimizer = Callable[[Any], torch.optim.Optimizer]


class Layers(nn.Module):
    """`layer` makes each of them."""

    p = 0.4

    def __init__(self, layer: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = self.through(layer, h)
        return self.drop(h).square().mean()


class Continue(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            if self.training and torch.rand([]) < self.p:
                continue
            h = h + layer(h)
        return self.drop(h).square().mean()


class Call(Layers):
    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        if not self.training or torch.rand(1) > self.p:
            h = torch.tanh(layer(h)) + h
        return h


class AskTwice(Layers):
    """As libraries write it: the layer gives a tuple, and the outcome is read again."""

    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        skip = self.training and torch.rand([]) < self.p
        if not skip:
            given = layer(hidden=h, other=None)
            h = given[0]
        if skip:
            given = (None, None)
        return h


class BothWays(Layers):
    """Two lines, whose outcomes mean the opposite."""

    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        if not self.training or torch.rand(()) >= self.p:
            h = layer(h)
        if self.training and torch.rand(()) < self.p:
            return h
        return h + self.first(h)


class OneDraw(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h, keep = self.first(x), torch.rand(3) > self.p
        for i, layer in enumerate(self.layers):
            if not self.training or keep[i]:
                h = layer(h)
        return self.drop(h).square().mean()


class Trend(Layers):
    """A layer with two results, both of which are added or not."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        trend = h.mean()
        for layer in self.layers:
            if self.training and torch.rand([]) < self.p:
                continue
            h, more = layer(hidden=h, other=None)
            trend = trend + more
        return self.drop(h).square().mean() + trend


class Crossed(Layers):
    """All layers look at `first`, and at nothing before them: it has a gradient if any of them is called."""

    def forward(self, x: Tensor) -> Tensor:
        memory, h = self.first(x), x
        for layer in self.layers:
            if self.training and torch.rand([]) < self.p:
                continue
            h = h + layer(memory)
        return self.drop(h).square().mean()


class Checkpointed(Layers):
    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        if self.training and torch.rand([]) < self.p:
            return h
        return checkpoint(layer, h, use_reentrant=False)


class Tied(Layers):
    """One layer, called three times: it has a gradient if any of the calls is made."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(3):
            if self.training and torch.rand([]) < 0.6:
                continue
            h = h + self.layers[0](h)
        return self.drop(h).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, other: Any = None) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.a(hidden)) + hidden, self.b(hidden).mean()


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


class InnerLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), with_dropout()

    def forward(self, h: Tensor) -> Tensor:
        if not self.training or torch.rand([]) > 0.4:
            h = h + self.two(h)
        return self.one(h)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.02, weight_decay=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.3)


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.02)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.1)


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], skips: list[Any], micro: int, clip: float | None
) -> tuple[list[float], int]:
    """(losses, how often a parameter had no gradient), in eager PyTorch."""
    losses, without = [], 0
    model.train()
    for number, x in enumerate(batches):
        optimizer.zero_grad()
        total = 0.0
        for i, part in enumerate(x.chunk(micro)):
            with seeded(torch.tensor(next_seed(SEED, number * micro + i)), skips=skips):
                loss = model(part)
                if loss.requires_grad:
                    # backward by another name, which modes over torch's functions do not switch off: checkpoints draw again
                    one = torch.full_like(loss, 1 / micro)
                    _engine_run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
            total += float(loss.detach()) / micro
        without += sum(p.grad is None for p in model.parameters())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(total)
    return losses, without


def compiled(make: Callable[[], nn.Module], optimizer: Optimizer, path: Path, micro: int = 1, **options: Any) -> tilework.Session:
    model = make().train()
    clip = options.pop("clip", None)
    step = tilework.Step(
        model=model,
        inputs=(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)),),
        optimizer=optimizer(model.parameters()),
        num_micro_batches=micro,
        clip_norm=clip,
    )
    options = {"device": "reference", "programs": "fused", "opt_level": 1, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tilework.compile(step, path, options=tilework.Options(**options), weights="inside")
    return tilework.load(path, seed=SEED)


def beside(
    make: Callable[[], nn.Module],
    tmp_path: Path,
    optimizer: Optimizer = adam,
    *,
    micro: int = 1,
    sections: list[str] | None = None,
    **options: Any,
) -> tilework.Session:
    """Trains both, and compares losses, parameters, buffers, and the optimizer's state as the host gets it."""
    session = compiled(make, optimizer, tmp_path / "a.pef", micro, **options)
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(4 * micro, WIDTH, generator=generator) for _ in range(STEPS)]
    twin, host = make(), make()
    own, theirs = optimizer(twin.parameters()), optimizer(host.parameters())
    losses, without = trained(twin, own, batches, session.manifest.signature.skips, micro, options.get("clip"))
    found = [float(session.run(x, sections=sections).loss) for x in batches]
    assert without, "no layer was left out: nothing is shown"
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-4, atol=1e-6)
    session.to_host(host, theirs)
    torch.testing.assert_close(dict(host.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)
    for p, q in zip(host.parameters(), twin.parameters(), strict=True):
        have, want = theirs.state.get(p, {}), own.state.get(q, {})
        want = {k: torch.as_tensor(v) for k, v in want.items() if v is not None}
        torch.testing.assert_close(dict(have), want, rtol=1e-4, atol=1e-5, check_dtype=False)
    return session


CASES: dict[str, Callable[[], nn.Module]] = {
    "continue": Continue,
    "call": Call,
    "ask-twice": lambda: AskTwice(Block),
    "both-ways": BothWays,
    "one-draw": OneDraw,
    "two-results": lambda: Trend(Block),
    "cross-attention": Crossed,
    "tied": Tied,
    "checkpoint": lambda: Checkpointed(with_dropout),
    "dropout": lambda: Continue(with_dropout),
    "statistics": lambda: Continue(with_statistics),
    "nested": lambda: Call(InnerLayers),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_that_is_left_out_at_random(name: str, tmp_path: Path) -> None:
    beside(CASES[name], tmp_path)


@pytest.mark.parametrize("optimizer", [adamw, nadam, sgd, plain])
def test_optimizers_leave_alone_what_was_left_out(optimizer: Optimizer, tmp_path: Path) -> None:
    beside(lambda: Continue(with_dropout), tmp_path, optimizer)


def test_clipping(tmp_path: Path) -> None:
    beside(Continue, tmp_path, clip=0.05)


def test_micro_batches(tmp_path: Path) -> None:
    """Left alone only where no micro-batch has called it."""
    beside(lambda: Continue(with_dropout), tmp_path, sgd, micro=2)


def test_sections(tmp_path: Path) -> None:
    beside(lambda: Continue(with_dropout), tmp_path, sections=["fwd", "bwd", "opt"], programs="sections")


@pytest.mark.parametrize("micro", [1, 2])
def test_native_code(micro: int, tmp_path: Path) -> None:
    beside(lambda: Continue(with_dropout), tmp_path, device="cpu", micro=micro)


def test_checkpoints_and_hosts_keep_the_counts_apart(tmp_path: Path) -> None:
    session = beside(Continue, tmp_path)
    counts = {k: int(t) for k, t in session.tensors().items() if k.endswith("/step")}
    assert len(set(counts.values())) > 1, counts
    session.save(tmp_path / "saved")
    other = tilework.load(tmp_path / "a.pef", seed=SEED)
    other.load(tmp_path / "saved")
    assert counts == {k: int(t) for k, t in other.tensors().items() if k.endswith("/step")}
    host = Continue()
    optimizer = adam(host.parameters())
    session.to_host(host, optimizer)
    third = tilework.load(tmp_path / "a.pef", seed=SEED)
    third.to_device(host, optimizer)
    assert counts == {k: int(t) for k, t in third.tensors().items() if k.endswith("/step")}


def test_an_optimizer_that_has_made_steps(tmp_path: Path) -> None:
    """Its counts, which differ, go into the artifact."""
    model = Continue()
    optimizer = adam(model.parameters())
    trained(model, optimizer, [torch.randn(4, WIDTH) for _ in range(4)], [], 1, None)
    counts = [int(optimizer.state[layer.weight]["step"]) for layer in model.layers]
    assert len(set(counts)) > 1
    step = tilework.Step(model=model, inputs=(torch.randn(4, WIDTH),), optimizer=optimizer)
    tilework.compile(step, tmp_path / "a.pef", options=tilework.Options(device="reference"), weights="inside")
    tensors = tilework.load(tmp_path / "a.pef").tensors()
    assert [int(tensors[f"state/opt0.g0.part{n}/step"]) for n in (1, 2, 3)] == counts


def test_inference_calls_every_layer(tmp_path: Path) -> None:
    session = compiled(Continue, adam, tmp_path / "a.pef")
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(session.infer(x), Continue().eval()(x))


class Other(Layers):
    """Leaving it out is something else than its input, or nothing."""

    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        if torch.rand([]) < self.p:
            return h * 2
        return layer(h)


class Detached(Layers):
    """The same numbers, and another gradient."""

    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        if torch.rand([]) < self.p:
            return h.detach()
        return layer(h)


class NoCall(Layers):
    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        return h * 2 if torch.rand([]) < self.p else h


class Together(Layers):
    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        if torch.rand([]) < self.p and torch.rand([]) < self.p:
            return h
        return layer(h)


class Counted(Layers):
    """Each alone is as if it were not there; two of them are something else."""

    def forward(self, x: Tensor) -> Tensor:
        h, left_out = self.first(x), 0
        for layer in self.layers:
            if torch.rand([]) < self.p:
                left_out += 1
                continue
            h = h + layer(h)
        return h.square().mean() * (2 if left_out > 1 else 1)


class EverySecond(Layers):
    """Random numbers that do not lie side by side."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.first(x), (torch.rand(6)[::2] < self.p)
        for i, layer in enumerate(self.layers):
            if self.training and out[i]:  # torch.rand([]) < self.p
                continue
            h = h + layer(h)
        return h.square().mean()


class TwoCalls(Layers):
    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        if self.training and torch.rand([]) < self.p:
            return h
        return torch.tanh(layer(self.first(h)))


class InPlace(Layers):
    """The layer changes its input: with it left out, the input is what it was."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))

    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        if self.training and torch.rand([]) < self.p:
            return h
        return layer(h)


class InEval(Layers):
    def through(self, layer: nn.Module, h: Tensor) -> Tensor:
        return h if not self.training and torch.rand([]) < self.p else layer(h)


@pytest.mark.parametrize("kind", [Other, Detached, NoCall, Together, Counted, EverySecond, TwoCalls, InPlace, InEval])
def test_other_branches_are_refused_with_their_line(kind: type[Layers], tmp_path: Path) -> None:
    with pytest.raises(tilework.UserError) as e:
        compiled(kind, adam, tmp_path / "a.pef")
    assert e.value.id == "capture-python"
    assert "test_chance.py" in str(e.value) and "torch.rand([]) < self.p" in str(e.value)
    assert "depends on a random number" in str(e.value) and "choose with tensors" in str(e.value)


def test_hooks_are_gone(tmp_path: Path) -> None:
    model = Continue().train()
    step = tilework.Step(model=model, inputs=(torch.randn(4, WIDTH),), optimizer=adam(model.parameters()))
    tilework.compile(step, tmp_path / "a.pef", options=tilework.Options(device="reference"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_formulas() -> None:
    called, left_out = all_of(ALWAYS, 1), all_of(ALWAYS, -1)
    assert any_of(called, left_out) == ALWAYS
    assert all_of(called, -1) == frozenset()
    either = any_of(called, all_of(ALWAYS, 2))
    assert [holds(either, out) for out in ((), (0,), (1,), (0, 1))] == [True, True, True, False]
    assert any_of(called, all_of(called, 2)) == called
    assert any_of(all_of(called, 2), all_of(called, -2)) == called
