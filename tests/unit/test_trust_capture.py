"""Capture leaves nothing behind, and freezes nothing without a word. Each test is a program that once went wrong."""

from __future__ import annotations

import copy
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tilework
from tilework.capture.capture import capture
from tilework.check.check import check

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
REFERENCE = tilework.Options(device="reference")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)


def step_of(model: nn.Module, **kwargs) -> tilework.Step:
    kwargs.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return tilework.Step(model=model, inputs=kwargs.pop("inputs", (X,)), **kwargs)


def refusal(model: nn.Module, **kwargs) -> str:
    with pytest.raises(tilework.UserError) as e:
        capture(step_of(model, **kwargs))
    return str(e.value)


def session_of(model: nn.Module, tmp_path, **kwargs) -> tilework.Session:
    tilework.compile(step_of(model, **kwargs), tmp_path / "m.pef", options=REFERENCE, weights="inside")
    return tilework.load(tmp_path / "m.pef")


# ---- the user's objects stay as they were ----


class HookInFirstForward(Base):
    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def forward(self, x):
        if not self.hooked:
            self.fc.register_forward_hook(lambda m, i, o: o * 2)
            self.hooked = True
        return self.fc(x).square().mean()


class TensorCachedInFirstForward(Base):
    cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.arange(8.0)
        return self.fc(x * self.cache).square().mean()


class CachedInAFunction(Base):
    def forward(self, x):
        return self.fc(x * _cached(8)).square().mean()


_CACHE: dict[int, torch.Tensor] = {}


def _cached(n: int) -> torch.Tensor:
    if n not in _CACHE:
        _CACHE[n] = torch.linspace(0, 1, n)
    return _CACHE[n]


@pytest.mark.parametrize("kind", [HookInFirstForward, TensorCachedInFirstForward, CachedInAFunction])
def test_what_a_model_sets_up_in_its_first_forward(kind, tmp_path) -> None:
    model, twin = kind(), kind()
    want = float(twin(X).detach())
    session = session_of(model, tmp_path)
    assert float(session.run(X).loss) == pytest.approx(want, rel=1e-5)
    assert not model.fc._forward_hooks and getattr(model, "cache", None) is None
    assert type(_CACHE.get(8)) in (torch.Tensor, type(None))
    assert float(model(X).detach()) == pytest.approx(want, rel=1e-5)


class ChangesAParameter(Base):
    def forward(self, x):
        with torch.no_grad():
            self.fc.weight.mul_(0.5)
        return self.fc(x).square().mean()


def test_a_parameter_that_forward_changes(tmp_path) -> None:
    model, twin = ChangesAParameter(), ChangesAParameter()
    before = model.fc.weight.detach().clone()
    session = session_of(model, tmp_path)
    assert torch.equal(model.fc.weight, before)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = twin(X)
        loss.backward()
        optimizer.step()
        assert float(session.run(X).loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert torch.allclose(session.state_dict()["fc.weight"], twin.fc.weight, atol=1e-6)


def test_embedding_with_max_norm_is_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=0.1))
    before = model[0].weight.detach().clone()
    capture(step_of(model, inputs=(torch.arange(10),), loss=lambda out: out.square().sum()))
    assert torch.equal(model[0].weight, before)


# ---- what would be frozen is refused, with its line ----


class Box:
    n = 0


def by_object(self, x):
    self.box.n += 1  # HERE
    return x * self.box.n


def by_nested_container(self, x):
    self.settings["a"]["n"] += 1  # HERE
    return x * self.settings["a"]["n"]


COUNT = 0


def by_global(self, x):
    global COUNT
    COUNT += 1  # HERE
    return x * COUNT


def by_python_random(self, x):
    return x * random.random()  # HERE


def by_numpy_random(self, x):
    return x * float(np.random.rand())  # HERE


def by_own_generator(self, x):
    return x * float(self.generator.random())  # HERE


def by_clock(self, x):
    return x * time.time()  # HERE


def by_plain_tensor(self, x):
    self.ema += 1  # HERE
    return x + self.ema


@pytest.mark.parametrize("forward", [by_object, by_nested_container, by_global, by_python_random, by_numpy_random,
                                     by_own_generator, by_clock, by_plain_tensor])  # fmt: skip
def test_state_outside_of_buffers_is_refused(forward) -> None:
    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.box, self.settings, self.ema = Box(), {"a": {"n": 0}}, torch.zeros(1)
            self.generator = np.random.default_rng(0)

        def forward(self, x):
            return forward(self, self.fc(x)).square().mean()

    model = Model()
    python, numpy, own = random.getstate(), np.random.get_state()[1].copy(), model.generator.bit_generator.state
    text = refusal(model)
    assert "capture-python" in text and ("frozen" in text or "could not keep" in text)
    # everything is put back
    assert model.box.n == 0 and model.settings == {"a": {"n": 0}} and COUNT == 0 and float(model.ema) == 0.0
    assert random.getstate() == python and (np.random.get_state()[1] == numpy).all()
    assert model.generator.bit_generator.state == own


def test_state_in_a_closure_is_refused() -> None:
    count = 0

    class Model(Base):
        def forward(self, x):
            nonlocal count
            count += 1
            return self.fc(x * count).square().mean()

    assert "capture-python" in refusal(Model()) and count == 0


def test_a_model_that_seeds_torch_itself() -> None:
    class Model(Base):
        def forward(self, x):
            torch.manual_seed(3)
            return F.dropout(self.fc(x), 0.5).square().mean()

    assert "random-seed" in refusal(Model())


# ---- random numbers in the backward pass ----


class Recomputed(Base):
    def forward(self, x):
        part = checkpoint(lambda t: F.dropout(torch.tanh(self.fc(t)), 0.5), x, use_reentrant=False)
        return F.dropout(part, 0.25).square().mean()


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.rand_like(x)


class NoisyBackward(Base):
    def forward(self, x):
        return _Noisy.apply(self.fc(x)).square().mean()


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("kind", [Recomputed, NoisyBackward])
def test_random_numbers_of_the_backward_pass_are_seeded(kind, device: str, tmp_path) -> None:
    step = step_of(kind())
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device=device, opt_level=1))
    report = check(tmp_path / "m.pef", step)
    assert report.ok, report.first_difference
    session = tilework.load(tmp_path / "m.pef")
    ops = {n.op for g in session.artifact.graphs.values() for n in g.nodes}
    assert "tilework.random_bits.default" in ops and not any("bernoulli" in op or "aten.rand" in op for op in ops)
    assert len({float(session.run(X, sections=["fwd"]).loss) for _ in range(3)}) == (3 if kind is Recomputed else 1)


def test_recomputation_uses_the_mask_of_the_forward_pass(tmp_path) -> None:
    """dL/dw where half of the elements are dropped: rows of the gradient are zero exactly where the output is."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(64))

        def forward(self, x):
            out = checkpoint(lambda w: F.dropout(w, 0.5), self.w, use_reentrant=False)
            return (out * x).sum(), out

    step = step_of(Model(), inputs=(torch.ones(64),), loss=0)
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    session = tilework.load(tmp_path / "m.pef")
    out = session.run(torch.ones(64), keep_gradients=True).outputs[1]
    assert 0 < int((out == 0).sum()) < 64
    assert torch.equal(session.gradients()["w"] == 0, out == 0)


# ---- optimizers, losses, memory ----


class Plain(Base):
    def forward(self, x):
        return self.fc(x).square().mean()


def test_an_optimizer_that_does_more_is_refused() -> None:
    class Sign(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad.sign())

    model = Plain()
    assert "step() of its own" in refusal(model, optimizer=Sign(model.parameters(), lr=0.1))
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    assert "step hooks" in refusal(model, optimizer=hooked)
    replaced = torch.optim.SGD(model.parameters(), lr=0.1)
    replaced.step = lambda: None  # type: ignore[method-assign]
    assert "replaced" in refusal(model, optimizer=replaced)
    model.fc.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert "post_accumulate_grad" in refusal(model)


def test_optimizers_that_are_plain_all_the_same() -> None:
    class Named(torch.optim.Adam):
        """A name of its own, and nothing else."""

    model = Plain()
    capture(step_of(model, optimizer=Named(model.parameters())))
    followed = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(followed, 2)
    capture(step_of(model, optimizer=followed))


def test_a_hook_on_a_gradient_is_part_of_the_step(tmp_path) -> None:
    model = Plain()
    model.fc.weight.register_hook(lambda g: g * 0)
    before = model.fc.weight.detach().clone()
    session = session_of(model, tmp_path)
    session.run(X)
    assert torch.equal(session.state_dict()["fc.weight"], before)


class Parts(Base):
    def forward(self, x):
        ce, kl = self.fc(x).square().mean(), self.fc.weight.square().mean()
        return ce + kl, ce, kl


def test_which_scalar_is_the_loss_is_asked(tmp_path) -> None:
    text = refusal(Parts())
    assert "loss-ambiguous" in text and "output0, output1, output2" in text
    session = session_of(Parts(), tmp_path, loss=0)
    assert session.manifest.signature.losses == ["output0"]

    class Named(Parts):
        def forward(self, x):
            total, ce, kl = super().forward(x)
            return {"ce": ce, "loss": total, "kl": kl}

    assert session_of(Named(), tmp_path).manifest.signature.losses == ["loss"]


class SharedMemory(Base):
    def __init__(self, change: bool) -> None:
        super().__init__()
        memory, self.change = torch.zeros(4), change
        self.register_buffer("a", memory)
        self.register_buffer("v", memory[:2])

    def forward(self, x):
        if self.change:
            self.a += 1
        return self.fc(x).square().mean() + self.v.sum()


def test_buffers_that_share_memory() -> None:
    assert "memory-shared" in refusal(SharedMemory(change=True))
    capture(step_of(SharedMemory(change=False)))


def test_a_negative_batch_dimension_is_refused() -> None:
    with pytest.raises(tilework.UserError, match="batch_dim"):
        step_of(Plain(), batch_dim=-1)


def test_another_thread_may_print_during_a_compile(tmp_path, capsys) -> None:
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            print("a line of another thread")
            stop.wait(0.001)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        capture(step_of(Plain()))
    finally:
        stop.set()
        thread.join()
    assert "a line of another thread" in capsys.readouterr().out


class Remembers(nn.Module):
    """A buffer in whose place forward puts a new tensor; and a part that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3))
        self.scale, self.beside = nn.Parameter(torch.tensor(0.5)), nn.Linear(3, 2)

    def forward(self, x):
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        return {"beside": self.beside(x), "loss": (x * self.seen * self.scale).mean()}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("programs", ["all", "fused"])
def test_what_the_loss_does_not_reach_stays_and_replaced_buffers_are_kept(tmp_path: Path, programs: str, micro: int) -> None:
    model, x = Remembers(), torch.randn(4, 3)
    eager = copy.deepcopy(model)
    step = tilework.Step(
        model=model, inputs=(x,), loss="loss", optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), num_micro_batches=micro
    )
    options = tilework.Options(device="reference", programs=programs)
    made = tilework.compile(step, tmp_path / "a.pef", options=options, weights="inside")
    assert made.verification.compared and not made.verification.retreats
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.1)
    batch = torch.randn(4 * micro, 3)
    with tilework.load(tmp_path / "a.pef") as session:
        assert torch.equal(session.infer(x)["loss"], eager.eval()(x)["loss"])
        for part in batch.chunk(micro):
            (eager.train()(part)["loss"] / micro).backward()
        optimizer.step()
        session.run(batch, keep_gradients=programs == "all")
        for name, t in session.state_dict().items():
            torch.testing.assert_close(t, eager.state_dict()[name], msg=name)
        if programs == "all":
            assert {"scale", "beside.weight"} >= set(session.gradients()) - {"beside.bias"}
        if programs == "all" and micro == 1:
            grads = {"loss": torch.ones(()), "beside": torch.ones(4, 2)}
            with pytest.raises(tilework.UserError, match=r"beside\.weight") as error:
                session.run(x, out_grads=grads)
            assert error.value.id == "run-out-grads"


def test_other_threads_are_not_told_that_they_are_compiled(tmp_path) -> None:
    """torch's flag is the process's; code in another thread asks it too. Both spellings that libraries use."""
    stop, heard = threading.Event(), set()

    def other() -> None:
        while not stop.is_set():
            told = False
            told |= torch.compiler.is_compiling()
            heard.add(bool(told) or bool(torch.compiler.is_compiling() | False))

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked = False
            asked |= torch.compiler.is_compiling()
            return (self.l(x) * 2 if asked else self.l(x)).sum()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        model = Asks()
        graph = capture(
            tilework.Step(model=model, inputs=(torch.randn(2, 3),), optimizer=torch.optim.SGD(model.parameters(), 0.1))
        )
    finally:
        stop.set()
        thread.join()
    assert heard == {False} and any(n.op.startswith("aten.mul") for n in graph.sections["infer"].nodes)
    assert torch.compiler.is_compiling() is False
