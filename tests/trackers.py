"""Programs after reports in PyTorch's tracker, each beside eager PyTorch. What tests/device/test_trackers*.py share.

A case is a small program: tensors that a module owns, and a function of that module which gives tensors. The loss adds them up
with rising weights, so that every element's gradient is its own. Cases of one group are compiled together, to be quick: each
keeps its own tensors, and what differs is named by its case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework

OPTIONS = tilework.Options(opt_level=1, programs="fused")
# Groups that compile several times, because generated code is wrong there and the compiler looks for what to do without.
SLOW = {"resampled", "large numbers", "addmm_without_terms", "erf of small numbers", "pools", "expm1 of small numbers",
        "nearest_same_length", "chosen_by_mask", "floor", "places", "smallest", "constants"}  # fmt: skip
NUM_STEPS = 2


@dataclass(frozen=True)
class Case:
    name: str
    issue: int | None  # of pytorch/pytorch; None: a kind of fault without a report of its own
    words: str
    body: Callable[[Any], Tensor | Sequence[Tensor]]
    params: dict[str, Any] = field(default_factory=dict)  # a shape (normal numbers), a tensor, or what makes a module
    buffers: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    group: str | None = None  # None: compiled alone
    refused: str | None = None  # the id of the error, where Tilework says no
    rtol: float | None = None
    exact: bool = False  # no absolute tolerance: small numbers count too


class Table(list[Case]):
    """`@table.case(...)` puts a function into it."""

    def case(self, issue: int | None, words: str, **options: Any) -> Callable[[Callable], Callable]:
        def add(body: Callable) -> Callable:
            self.append(Case(body.__name__, issue, words, body, **options))
            return body

        return add

    def groups(self) -> list[Any]:
        """For pytest.mark.parametrize: the cases that are compiled together."""
        found: dict[str, list[Case]] = {}
        for case in self:
            found.setdefault(case.group or case.name, []).append(case)
        return [pytest.param(c, id=key, marks=[pytest.mark.full] if key in SLOW else []) for key, c in found.items()]


def tensor(spec: Any, generator: torch.Generator) -> Tensor:
    if isinstance(spec, Tensor):
        return spec.detach().clone(memory_format=torch.preserve_format)
    return torch.randn(spec, generator=generator)


class Part(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        for name, spec in case.params.items():
            if callable(spec):
                torch.manual_seed(1)
                setattr(self, name, spec())
            else:
                setattr(self, name, nn.Parameter(tensor(spec, g)))
        for name, spec in case.buffers.items():
            self.register_buffer(name, spec() if callable(spec) else tensor(spec, g))
        self.body = case.body

    def forward(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        for name, value in given.items():
            self.__dict__[name] = value
        out = self.body(self)
        for name in given:
            del self.__dict__[name]
        return (out,) if isinstance(out, Tensor) else tuple(out)


def total(out: Tensor) -> Tensor:
    if out.dim() == 0:
        return out.float()
    return (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).div(out.numel()).reshape(out.shape)).sum().float()


class Group(nn.Module):
    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({c.name: Part(c) for c in cases})
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, given: dict[str, dict[str, Tensor]], x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, ...]]]:
        found = {name: part(given.get(name, {})) for name, part in self.parts.items()}
        loss = (self.bias * x).sum()
        for outs in found.values():
            for out in outs:
                if out.requires_grad:
                    loss = loss + total(out)
        return loss, found


def build(cases: Sequence[Case]) -> tilework.Step:
    g = torch.Generator().manual_seed(2)
    given = {c.name: {k: tensor(spec, g) for k, spec in c.inputs.items()} for c in cases if c.inputs}
    model = Group(cases)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return tilework.Step(model=model, inputs=(given, torch.ones(3)), loss=0, optimizer=optimizer, batch_dim=None)


def flat(prefix: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {prefix: value.detach().clone()}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: t for key, v in pairs for k, t in flat(f"{prefix}.{key}", v).items()}


def state(step: tilework.Step) -> dict[str, Tensor]:
    names = {p: n for n, p in step.model.named_parameters()}
    found = {f"parameter {n}": p for n, p in step.model.named_parameters()}
    found |= {f"buffer {n}": b for n, b in step.model.named_buffers()}
    for p, values in step.optimizer.state.items():
        found |= {f"state {names[p]}.{k}": v for k, v in values.items() if isinstance(v, Tensor)}
    return {k: t.detach().clone() for k, t in found.items()}


def eager(step: tilework.Step) -> list[dict[str, Tensor]]:
    found = []
    for _ in range(NUM_STEPS):
        step.optimizer.zero_grad()
        loss, outs = step.model(*step.inputs)
        outs = flat("output parts", outs)
        loss.backward()
        step.optimizer.step()
        found.append(outs | state(step))
    return found


def native(step: tilework.Step, path: Path) -> list[dict[str, Tensor]]:
    tilework.compile(step, path, options=OPTIONS, weights="inside")
    found = []
    with tilework.load(path) as session:
        for _ in range(NUM_STEPS):
            outs = flat("output parts", session.run(*step.inputs).outputs[1])
            session.to_host(step.model, step.optimizer)
            found.append(outs | state(step))
    return found


def differs(found: Tensor, expected: Tensor, rtol: float | None, exact: bool) -> str:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    if not expected.is_floating_point():
        wrong = found != expected
    else:
        rtol = rtol or {torch.float64: 1e-11, torch.float32: 2e-5}.get(expected.dtype, 2e-2)
        finite = expected.isfinite() & found.isfinite()
        largest = float(expected[finite].abs().max()) if finite.any() else 0.0
        atol = 0.0 if exact else rtol * max(largest, 1e-6)
        near = (found - expected).abs() <= atol + rtol * expected.abs()
        wrong = ~torch.where(finite, near, (found == expected) | (found.isnan() & expected.isnan()))
    if not wrong.any():
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} wrong; at {at} {found[at].item()!r}, expected {expected[at].item()!r}"


def problems(cases: Sequence[Case], folder: Path) -> list[str]:
    """What the compiled program of `cases` has otherwise than eager PyTorch, in words."""
    expected, found = eager(build(cases)), native(build(cases), folder / "m.pef")
    said = []
    for n, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert theirs.keys() == ours.keys()
        for key, value in theirs.items():
            case = next((c for c in cases if f"parts.{c.name}." in f"{key}."), None)
            why = differs(ours[key], value, case and case.rtol, bool(case and case.exact))
            if why:
                said.append(f"step {n}, {key}: {why}" + (f" (#{case.issue or '-'}: {case.words})" if case else ""))
    return said


def check_cases(cases: Sequence[Case], folder: Path) -> None:
    refused = cases[0].refused
    if refused is not None:
        with pytest.raises(tilework.TileworkError) as e:
            problems(cases, folder)
        assert e.value.id == refused
        return
    said = problems(cases, folder)
    assert not said, "\n    ".join(["", *said])
