"""Branches on a random number that leave a part of the model out: `if torch.rand(()) < p: continue`.

A compiled step always computes the part, and chooses between its result and what stands for it: the part's input, or zeros. Which
of the two it is, and that it is right, is not read from the source but found in real runs: with each part left out alone, with
all of them, and with every other one, the branch itself must give the same outputs, gradients and buffers as the choice does. Any
other branch is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..artifact.manifest import Skip
from ..errors import UserError
from .reached import holds, reached
from .reads import Draw
from .seeded import SeededRandom, current_site

Line = tuple[str, int]
Lines = Sequence[Line | None]
Key = tuple[int, int]  # site and index of the random number
# What may stand for the first tensor that a part returns, and for the others; "": they stay, and nobody looks at them then.
INSTEAD = (("input", ""), ("zeros", ""), ("input", "zeros"), ("zeros", "zeros"))


@dataclass(frozen=True)
class Chance:
    """One random number that decides whether a part of the model is called."""

    draw: Draw
    line: Line | None
    called: bool  # the outcome with which it is
    first: int  # sites of the part's own random numbers: from here
    last: int  # up to here
    dropouts: int
    buffers: tuple[tuple[str, str], ...]  # that the part changes: the path of the module inside it, and the name
    instead: tuple[str, str] = ("", "")  # what stands for its result where it is left out

    @property
    def key(self) -> Key:
        return self.draw.site, self.draw.index

    @property
    def skip(self) -> Skip:
        d = self.draw
        return Skip(site=d.site, index=d.index, test=d.test, limit=d.limit, called=self.called,
                    first=self.first, last=self.last, dropouts=self.dropouts)  # fmt: skip


@dataclass
class _Part:
    """A call of a part that is under way."""

    key: Key
    skip: Tensor | None  # whether it is left out; None: nothing is replaced
    first: int
    dropouts: int
    before: list[tuple[str, nn.Module, str, Tensor, Tensor]] = field(default_factory=list)  # buffers, with copies


class Gate:
    """Answers the branches on random numbers in one run of the model, and sees the call that follows each of them.

    chances: those that are known. `replaces`: each of these calls its part in any case, and a tensor chooses the result.
    called: by line, the outcome with which a part is called. left_out: which are; None: as the random numbers say."""

    def __init__(
        self,
        roots: Sequence[tuple[str, nn.Module]],
        chances: Sequence[Chance] = (),
        *,
        called: Mapping[Line | None, bool] | None = None,
        left_out: Collection[Key] | None = None,
        replaces: bool = False,
    ) -> None:
        self._roots, self._called, self._replaces = roots, called or {}, replaces
        self.left_out = left_out
        self.chances = list(chances)
        self._numbers = {c.key: i for i, c in enumerate(chances)}
        self.random: SeededRandom | None = None
        self.lines: dict[Line | None, None] = {}  # of decisions, in their order
        self.calls = 0  # of any module
        self.found: dict[Key, Chance] = {}  # what was seen of each decision
        self.unclear: dict[Line | None, None] = {}  # lines of decisions that no call follows, or two of them before one call
        self.choices: dict[Any, int] = {}  # nodes of autograd, with the number of the chance
        self.skips: dict[int, Tensor] = {}  # by the number of the chance
        self._said: dict[Key, bool] = {}
        self._waiting: list[tuple[Key, Tensor | None]] = []  # decisions whose call is still to come
        self._stack: list[_Part | None] = []
        self._again: dict[int, _Part] = {}  # by module: a backward pass may run it once more

    # ---- decisions ----

    def answer(self, draw: Draw, line: Line | None, outcome: Tensor) -> tuple[bool, int | None]:
        """What Python hears, and the number of the chance where it is the first time that it asks."""
        key = draw.site, draw.index
        if key in self._said:
            return self._said[key], None
        number = self._numbers.get(key)
        called = self.chances[number].called if number is not None else self._called.get(line, False)
        self.lines.setdefault(line)
        out = self.left_out is not None and key in self.left_out
        self.found[key] = Chance(draw, line, called, 0, 0, 0, ())
        if self._replaces and number is not None:
            self.decide(number, outcome.reshape(()) != called if self.left_out is None else torch.tensor(out))
        elif not out:
            self._await(key, None)
        elif number is not None and self.random is not None:
            self.random.leave_out(self.chances[number].skip)
        self._said[key] = called != (out and not self._replaces)
        return self._said[key], number

    def decide(self, number: int, skip: Tensor) -> None:
        self.skips[number] = skip
        self._await(self.chances[number].key, skip)

    def _await(self, key: Key, skip: Tensor | None) -> None:
        for other, _ in self._waiting:
            self._not_clear(other, key)
        self._waiting.append((key, skip))

    def _not_clear(self, *keys: Key) -> None:
        self.unclear |= {self.found[k].line: None for k in keys if k in self.found}

    # ---- calls ----

    @contextmanager
    def watching(self) -> Iterator[Gate]:
        handles = []
        modules = {id(m): m for _, root in self._roots for m in root.modules() if m is not root}
        for m in modules.values():
            if not isinstance(m, torch.jit.ScriptModule):
                handles += [m.register_forward_pre_hook(self._before, with_kwargs=True)]
                handles += [m.register_forward_hook(self._after, with_kwargs=True)]
        try:
            yield self
            self._not_clear(*(key for key, _ in self._waiting))
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls += 1
        part: _Part | None = None
        if self._waiting:
            key, skip = self._waiting.pop()
            part = _Part(key, skip, current_site(), len(self.random.sites) if self.random is not None else 0)
            wanted = self.chances[self._numbers[key]].buffers if key in self._numbers else None
            for path, m in module.named_modules():
                part.before += [(path, m, name, b, b.clone()) for name, b in m._buffers.items()
                                if b is not None and (wanted is None or (path, name) in wanted)]  # fmt: skip
            self._again[id(module)] = part
        elif torch._C._current_graph_task_id() != -1:
            part = self._again.get(id(module))
        self._stack.append(part)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        part = self._stack.pop()
        if part is None:
            return None
        number = self._numbers.get(part.key)
        if part.skip is None or number is None:
            self._note(part)
            return None
        with torch.no_grad():
            for _, m, name, buffer, copy in part.before:
                _put_back(m, name, buffer, copy, part.skip)
        several = type(output) in (tuple, list)
        results = list(output) if several else [output]
        first, others = self.chances[number].instead
        for i, result in enumerate(results):
            other = _instead(others if i else first, result, (*args, *kwargs.values()))
            if other is not None:  # where there is none the runs after this show that it is not the same
                results[i] = chosen = torch.where(part.skip, other, result)
                if chosen.grad_fn is not None:
                    self.choices[chosen.grad_fn] = number
        return type(output)(results) if several else results[0]

    def _note(self, part: _Part) -> None:
        """What a run in which the part is called shows of it."""
        if part.key not in self.found or self.found[part.key].last:
            return
        changed = tuple((path, name) for path, m, name, _, copy in part.before if not _equal(m._buffers[name], copy))
        dropouts = (len(self.random.sites) if self.random is not None else 0) - part.dropouts
        self.found[part.key] = replace(
            self.found[part.key], first=part.first, last=current_site(), dropouts=dropouts, buffers=changed
        )


def _equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and torch.equal(a, b)


def _put_back(m: nn.Module, name: str, buffer: Tensor, copy: Tensor, skip: Tensor) -> None:
    now = m._buffers[name]
    if now is None:
        return
    if now is not buffer:  # forward has put another tensor in its place
        m._buffers[name] = torch.where(skip, copy, now)
        return
    with _unsafe_preserve_version_counter(now):  # operators that keep statistics do not count their changes either
        now.copy_(torch.where(skip, copy, now))


def _instead(kind: str, result: Any, inputs: Sequence[Any]) -> Tensor | None:
    if not isinstance(result, Tensor) or not kind:
        return None
    if kind == "zeros":
        return torch.zeros_like(result)
    like = (t for t in inputs if isinstance(t, Tensor) and t.shape == result.shape and t.dtype == result.dtype)
    return next(like, None)


# ---- finding out what the branches do ----


class Run(Protocol):
    """An eager run, forward and backward."""

    outputs: list[Tensor]
    trainable: dict[str, Tensor]
    grads: dict[str, Tensor]
    left: dict[str, Tensor]  # buffers, and what else it has changed, as it left them


def settle(roots: Sequence[tuple[str, nn.Module]], run: Callable[[Gate], Run], lines: Lines) -> tuple[list[Chance], Lines]:
    """(the chances, and the lines of those that are none: that cannot be captured). `lines`: where the model asks."""
    try:
        called = _polarity(roots, run)
        gate = Gate(roots, called=called)
        run(gate)
        if gate.unclear:
            return [], list(gate.unclear)
        return _verified(roots, run, list(gate.found.values()))
    except UserError:  # the model fails where a part is left out
        return [], lines


def _polarity(roots: Sequence[tuple[str, nn.Module]], run: Callable[[Gate], Run]) -> dict[Line | None, bool]:
    """For each line, the outcome with which more is called. Where it makes no difference, no call follows the decision, or the
    runs after this one show that leaving the part out is something else."""
    called: dict[Line | None, bool] = {}
    while True:
        no = Gate(roots, called=called)
        run(no)
        new = [n for n in no.lines if n not in called]
        if not new:
            return called
        line = new[0]
        yes = Gate(roots, called={**called, line: True})
        run(yes)
        called[line] = yes.calls > no.calls


def _verified(
    roots: Sequence[tuple[str, nn.Module]], run: Callable[[Gate], Run], chances: list[Chance]
) -> tuple[list[Chance], Lines]:
    wrong: dict[Line | None, None] = {}

    def agrees(left_out: Collection[Key], instead: tuple[str, str] | None = None) -> bool:
        now = [replace(c, instead=instead) if instead and c.key in left_out else c for c in chances]
        chosen = Gate(roots, now, left_out=left_out, replaces=True)
        return _agree(truth, run(chosen), chosen, {i for i, c in enumerate(chances) if c.key in left_out})

    kinds = list(INSTEAD)
    for i, chance in enumerate(chances):
        truth = run(Gate(roots, chances, left_out={chance.key}))
        instead = next((kind for kind in kinds if agrees({chance.key}, kind)), None)
        if instead is None:
            wrong[chance.line] = None
        else:
            chances[i] = replace(chance, instead=instead)
            kinds.sort(key=lambda kind: kind != instead)  # the next layer is most likely of the same kind
    every = [c.key for c in chances]
    several = [every] * (len(every) > 1) + [every[::2], every[1::2]] * (len(every) > 2)
    for left_out in several if not wrong else []:
        truth = run(Gate(roots, chances, left_out=left_out))
        if not agrees(left_out):
            wrong |= dict.fromkeys(c.line for c in chances)
    return chances, list(wrong)


def _agree(truth: Run, chosen: Run, gate: Gate, left_out: set[int]) -> bool:
    """Whether the branch itself and the choice between tensors come to the same, also in which parameters have a gradient."""
    if len(truth.outputs) != len(chosen.outputs) or truth.left.keys() != chosen.left.keys():
        return False
    pairs = [*zip(truth.outputs, chosen.outputs, strict=True), *((t, chosen.left[k]) for k, t in truth.left.items())]
    pairs += [(truth.grads.get(k, torch.zeros_like(g)), g) for k, g in chosen.grads.items()]
    when = reached([o for o in chosen.outputs if o.requires_grad], gate.choices)
    expected = {k for k, t in chosen.trainable.items() if holds(when.get(id(t), frozenset()), left_out)}
    return expected == set(truth.trainable) and all(_same(a, b) for a, b in pairs)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """But for rounding: sums may have come about in another order."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    a, b = a.detach(), b.detach()
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    if not a.numel():
        return True
    scale = float(torch.where(b.isfinite(), b, 0).abs().max())
    return torch.allclose(a, b, rtol=1e-5 if a.dtype in (torch.float32, torch.complex64) else 1e-2 if a.itemsize == 2 else 1e-10,
                          atol=1e-6 * scale, equal_nan=True)  # fmt: skip
