"""One model of a public library: five training steps of Tilework beside five of eager PyTorch, from the same weights, on the same
batches, with the same random numbers, in train() mode.

Where the two part by more than rounding, float64 decides: Tilework is right if it is not much further from what PyTorch computes
in float64 than PyTorch's own float32 is, in four runs whose parameters differ in their last bits."""

from __future__ import annotations

import copy
import importlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

import tilework
from tilework.artifact.random import next_seed
from tilework.artifact.structure import flatten, flatten_outputs, unflatten
from tilework.capture.seeded import seeded
from tilework.errors import TileworkError

SEED, STEPS = 5, 5
LOSS, UPDATE = 1e-4, 0.02  # how far a loss may be off, and a parameter, as a part of the largest update of all
SLACK = 3.0  # how much further from float64 than eager PyTorch's float32
FAMILIES = ("cases_transformers", "cases_timm", "cases_diffusers", "cases_geometric", "cases_torch")


@dataclass
class Case:
    """What a user has: a model, a batch, and the way to its loss."""

    model: nn.Module
    inputs: Any  # a tuple of tensors, or a dict for keyword arguments
    targets: Any = ()
    loss: Any = "auto"
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)
    missing: str = ""  # what Tilework cannot do yet, for models that it refuses although it need not
    refused: str = ""  # why a static compiler must refuse it, for models that are here to show that it does


@dataclass
class Outcome:
    verdict: str  # "trains", "trains (float64 decided)", "refused", "failed", "wrong"
    detail: str = ""
    compile_cpu: float = 0.0  # CPU seconds of the compile, its children included
    called: list[str] = field(default_factory=list)  # operators that are called through torch's dispatcher

    @property
    def trains(self) -> bool:
        return self.verdict.startswith("trains")


CASES: dict[str, Callable[[], Case]] = {}


def case(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def register(make: Callable[[], Case]) -> Callable[[], Case]:
        assert name not in CASES, name
        CASES[name] = make
        return make

    return register


def all_cases() -> dict[str, Callable[[], Case]]:
    """Of every library that is installed (make coverage installs them all)."""
    for family in FAMILIES:
        try:
            importlib.import_module(family)
        except ModuleNotFoundError as e:
            print(f"{family}: {e}")
    return CASES


def run(name: str, folder: Path, **options: Any) -> Outcome:
    torch.manual_seed(0)
    made = all_cases()[name]()
    twin = copy.deepcopy(made)
    model = made.model.train()
    step = tilework.Step(
        model=model, inputs=made.inputs, targets=made.targets, loss=made.loss, optimizer=made.optimizer(trained(model))
    )
    start = _cpu()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = tilework.compile(step, folder / "model.pef", options=tilework.Options(**options), weights="inside")
        cost = _cpu() - start
        with tilework.load(folder / "model.pef", seed=SEED) as session:
            losses = [float(session.run(*_leaves(made)).loss.sum()) for _ in range(STEPS)]
            found = {k.removeprefix("param/"): t for k, t in session.tensors().items() if k.startswith("param/")}
            skips = session.manifest.signature.skips
            called = sorted({op for p in session.manifest.programs.values() for op in p.called})
    except TileworkError as e:
        return Outcome("refused" if isinstance(e, tilework.UserError) else "failed", str(e), _cpu() - start)
    except Exception as e:
        return Outcome("failed", f"{type(e).__name__}: {e}", _cpu() - start)
    verdict, detail = judge(twin, losses, found, skips)
    if compiled.verification.retreats:
        detail = f"{detail} retreats: {compiled.verification.retreats}".strip()
    return Outcome(verdict, detail, cost, called)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def judge(twin: Case, losses: list[float], found: dict[str, Tensor], skips: Sequence[Any] = ()) -> tuple[str, str]:
    """`skips`: what random numbers leave out of the model, as the artifact tells it."""
    before = {k: p.detach().clone() for k, p in twin.model.named_parameters()}
    again = copy.deepcopy(twin)
    theirs, after = eager(twin, skips)
    largest = max((float((after[k] - before[k]).abs().max()) for k in after if after[k].numel()), default=0.0)
    wrong = _apart(losses, theirs, {k: found[k] for k in after if k in found}, after, UPDATE * max(largest, 1e-12))
    if not wrong:
        return "trains", ""
    others = [eager(_shaken(copy.deepcopy(again), k), skips) for k in range(3)]
    exact, exactly = eager(_doubled(again), skips)
    far, own = _distance(found, exactly), max(_distance(a, exactly) for _, a in [(theirs, after), *others])
    loss, *owns = (max(abs(a - b) for a, b in zip(x, exact, strict=True)) for x in (losses, theirs, *(o for o, _ in others)))
    own_loss = max(owns)
    if far <= SLACK * own and loss <= SLACK * own_loss:
        return "trains (float64 decided)", ""
    return "wrong", f"{wrong}; from float64: {far:.2g}, eager {own:.2g}"


def eager(case: Case, skips: Sequence[Any] = ()) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = case.model.train(), []
    optimizer = case.optimizer(trained(model))
    structure, targets = flatten(_call(case.inputs))[1], flatten(tuple(case.targets))[1]
    own = len(flatten(_call(case.inputs))[0])
    for i in range(STEPS):
        optimizer.zero_grad()
        leaves = [t.clone() for t in _leaves(case)]
        with seeded(torch.tensor(next_seed(SEED, i)), skips=skips):
            inputs = unflatten(structure, iter(leaves[:own]))
            output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            if callable(case.loss):
                loss = case.loss(output, *unflatten(targets, iter(leaves[own:])))
            elif case.loss != "auto":
                loss = output[case.loss]
            elif isinstance(output, Mapping):
                loss = output["loss"]
            else:
                loss = next(o for o in flatten_outputs(output)[0] if o.dim() == 0)
            # backward by another name, which modes over torch's functions do not switch off: checkpoints draw the same numbers
            total = loss.sum()
            one = torch.ones_like(total)
            if total.requires_grad:  # not where random numbers have left out all that has parameters
                _engine_run_backward((total,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        optimizer.step()
        losses.append(float(loss.detach().sum()))
    return losses, {k: p.detach().clone() for k, p in model.named_parameters()}


def _call(inputs: Any) -> Any:
    return inputs if isinstance(inputs, (tuple, list, dict)) else (inputs,)


def _leaves(case: Case) -> list[Tensor]:
    return [*flatten(_call(case.inputs))[0], *flatten(tuple(case.targets))[0]]


def _shaken(case: Case, seed: int) -> Case:
    """With parameters that differ in their last bits: how far float32 goes by itself, one run being only one draw of that."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in case.model.parameters():
            if p.is_floating_point():
                p.mul_(1 + torch.finfo(p.dtype).eps * torch.randn(p.shape, generator=generator).to(p.dtype))
    return case


def _doubled(case: Case) -> Case:
    def double(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t.to(torch.complex128) if t.is_complex() else t

    case.model.double()
    for kind in ("inputs", "targets"):
        leaves, structure = flatten(_call(getattr(case, kind)))
        setattr(case, kind, unflatten(structure, iter([double(t) for t in leaves])))
    return case


def _apart(losses: list[float], theirs: list[float], found: Any, after: Any, most: float) -> str:
    for i, (a, b) in enumerate(zip(losses, theirs, strict=True)):
        if not abs(a - b) <= LOSS * max(1.0, abs(b)):
            return f"loss of step {i + 1}: {a:.6g}, eager {b:.6g}"
    for name, want in after.items():
        if name not in found:  # tied to another, or never used: then eager must have left it alone
            continue
        apart = float((found[name] - want).abs().max()) if want.numel() else 0.0
        if not apart <= most:
            return f"{name}: {apart:.3g} apart, where {most:.2g} is allowed"
    return ""


def _distance(found: dict[str, Tensor], exactly: dict[str, Tensor]) -> float:
    return max(float((found[k].to(t.dtype) - t).abs().max()) for k, t in exactly.items() if k in found and t.numel())


def _cpu() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system
