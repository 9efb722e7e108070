"""Real runs of the user's step, watched: they find every place that cannot be captured, and what the tracer must know.

Tracing stops at the first problem; a real run does not. So the step is run twice in eager PyTorch on the example inputs, with
everything put back afterwards, while we look for what an artifact could not do (watch.py). All of it goes into one error report.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..artifact.structure import Structure, flatten, flatten_outputs, names
from ..errors import Place, TileworkError, TileworkWarning, UserError
from ..reach import hidden_parameters
from ..step import Step
from .chance import Chance, Gate, settle
from .masked import Masked, NotMasked
from .reached import ALWAYS, Formula, reached
from .reads import Read, storage_of
from .rewrites import captured
from .seeded import DropoutSite, seeded
from .snapshot import Change, Snapshot
from .source import line_text, short, user_line_of_exception
from .trace import gradients
from .watch import CHANCE, STATE, UNSTEADY, Findings, Line, WatchFunctions, WatchOperators, WatchPython


@dataclass
class Probe:
    """What the real run showed."""

    outputs: list[Tensor]  # every tensor that the step returns, detached: the loss first where it is separate
    structure: Structure  # of what the model returns
    losses: tuple[int, ...]  # which outputs are losses
    differentiable: tuple[bool, ...]  # which outputs can take a gradient
    trainable: dict[str, Tensor]  # name -> every leaf that the outputs depend on and that requires a gradient
    buffers: dict[str, Tensor]
    frozen: dict[str, Tensor]
    sites: list[DropoutSite]
    changing: list[UntypedStorage]  # memory from before the run that the step changes
    reads: list[Read]  # values that Python reads on the way
    differentiates: bool  # whether forward takes gradients itself
    masks: bool  # whether x[mask] keeps the shape of x (masked.py)
    chances: list[Chance]  # random numbers that leave parts of the model out
    when: dict[str, Formula]  # parameter -> when it has a gradient, where that is not always


def _line_that_names(module: nn.Module, name: str) -> tuple[str, int] | None:
    """The line of the module's forward that mentions the attribute: where a list was appended to, say."""
    try:
        lines, start = inspect.getsourcelines(type(module).forward)
        path = inspect.getsourcefile(type(module).forward)
    except (OSError, TypeError):
        return None
    for offset, line in enumerate(lines):
        if re.search(rf"\.{re.escape(name)}\b|\b{re.escape(name)} *[-+*/]?=", line):
            return (path or "?"), start + offset
    return (path or "?"), start


@contextmanager
def preserved(step: Step, changing: Iterable[UntypedStorage] = ()) -> Iterator[None]:
    """What the model holds in Python, its buffers' values, train or eval mode, and torch's random state, put back afterwards; and
    the memory `changing`, which the step is known to change."""
    snapshot = Snapshot(step.modules)
    storages = {b.untyped_storage()._cdata: b.untyped_storage() for _, root in step.modules for b in root.buffers()}
    storages |= {s._cdata: s for s in changing}
    values = [(s, s.clone()) for s in storages.values()]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        snapshot.restore()
        for storage, value in values:
            storage.copy_(value)


def evaluate(step: Step, inputs: Any, targets: Any, *, tell: bool = False) -> tuple[list[Tensor], Structure]:
    """Forward and loss: every output tensor (a separate loss first), and the structure of the model's own output. `tell`: warn
    of objects among the outputs that are left out."""
    with step.autocast(cache=False):
        output = step.call_model(inputs)
        outputs, structure, dropped = flatten_outputs(output)
        if step.loss_function is not None:
            outputs = [step.call_loss(output, targets), *outputs]
    if any(f"({Masked.__name__})" in name for name in dropped):
        raise NotMasked  # its shape would depend on values
    if dropped and tell:
        warnings.warn(f"the model returns objects that an artifact cannot hold; they are left out: {', '.join(dropped)}",
                      TileworkWarning, stacklevel=2)  # fmt: skip
    return outputs, structure


@contextmanager
def model_errors() -> Iterator[None]:
    """What the user's own model or loss raises on the example inputs is the user's, with the user's line."""
    try:
        yield
    except (TileworkError, NotMasked):
        raise
    except Exception as e:
        at = user_line_of_exception(e)
        where, text = (short(*at), line_text(*at)) if at else ("the model", "")
        why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        place = Place(where, text, why, "make the step run in eager PyTorch on these example inputs first")
        raise UserError("user-code", "the model or its loss fails on the example inputs", places=[place]) from e


@dataclass
class _Run:
    """One eager run, and what was seen of it."""

    outputs: list[Tensor]
    structure: Structure
    sites: list[DropoutSite]
    trainable: dict[str, Tensor]
    log: list[Any]
    assigned: dict[tuple[int, str], Line | None]
    line: Line | None
    after: Snapshot
    changing: list[UntypedStorage]
    reads: list[Read]
    differentiates: bool
    used: set[int]
    grads: dict[str, Tensor]
    left: dict[str, Tensor]  # buffers, and other memory that the run has changed, as it left them
    undecided: list[Line | None]  # branches on random numbers that nobody answered
    gate: Gate | None


def run_probe(step: Step, example: Callable[[], tuple[Any, Any]], mode: FakeTensorMode | None = None) -> Probe:
    """`example` gives fresh (inputs, targets) as leaves that the step may use and change. `mode`: one in which nothing is
    computed (shapes.py)."""
    try:
        return _probe(step, example, True, mode)
    except NotMasked:
        return _probe(step, example, False, mode)


def _probe(step: Step, example: Callable[[], tuple[Any, Any]], masks: bool, mode: FakeTensorMode | None) -> Probe:
    findings, chances, decided = Findings(), list[Chance](), False
    with preserved(step), torch.enable_grad(), ExitStack() as stack:

        def run(line_at: int | None = None, tell: bool = False) -> _Run:
            gate = Gate(step.modules, chances, replaces=True) if decided else None
            return _watched(step, example, findings, stack, line_at, masks=masks, tell=tell, gate=gate, mode=mode)

        first = run(tell=True)
        if first.undecided:
            chances, lines = settle(step.modules, lambda gate: _tried(step, example, gate, masks), first.undecided)
            decided = not lines
            first = run() if decided else first
            for line in lines or first.undecided:  # the gate does not know every number: of a part of what was drawn, say
                findings.add("read", *CHANCE, at=line)
        second = run()
        changed = second.after.changed_since(first.after)
        if changed or first.log != second.log:  # done once and for all, or different at every call? Ask again.
            third = run(_first_difference(first.log, second.log))
            changed = _carried(third.after.changed_since(second.after), third)
            _report_state(changed, {**first.assigned, **second.assigned, **third.assigned}, findings)
            if not changed and second.log != third.log:
                fourth = run(_first_difference(second.log, third.log))
                findings.add("unsteady", *UNSTEADY, at=fourth.line or third.line, where="the model")
        refuse(findings)
    buffers = {f"{prefix}{k}": b for prefix, root in step.modules for k, b in root.named_buffers()}
    known = {id(t) for t in first.trainable.values()}
    frozen: dict[str, Tensor] = {
        f"{pre}{k}": p for pre, root in step.modules for k, p in root.named_parameters() if id(p) not in known
    }
    losses = _losses(step, first.outputs, first.structure)
    return Probe(
        outputs=[o.detach() for o in first.outputs],
        structure=first.structure,
        losses=losses,
        differentiable=tuple(o.requires_grad for o in first.outputs),
        trainable=first.trainable,
        buffers=buffers,
        frozen=frozen,
        sites=first.sites,
        changing=first.changing,
        reads=first.reads,
        differentiates=first.differentiates,
        masks=masks,
        chances=chances,
        when=_when(first, losses),
    )


def _when(run: _Run, losses: Sequence[int]) -> dict[str, Formula]:
    """Parameters that a gradient from the losses (from any output, where there are none) does not always reach."""
    if run.gate is None:
        return {}
    sources = [run.outputs[i] for i in losses] or [o for o in run.outputs if o.requires_grad]
    found = reached(sources, run.gate.choices)
    return {k: found[id(t)] for k, t in run.trainable.items() if found.get(id(t), ALWAYS) != ALWAYS}


def _tried(step: Step, example: Callable[[], tuple[Any, Any]], gate: Gate, masks: bool) -> _Run:
    """A run of its own, which leaves nothing behind, not even findings."""
    with preserved(step), ExitStack() as stack:
        return _watched(step, example, Findings(), stack, None, masks=masks, tell=False, gate=gate, tries=True)


def _watched(
    step: Step,
    example: Callable[[], tuple[Any, Any]],
    findings: Findings,
    stack: ExitStack,
    line_at: int | None,
    *,
    masks: bool,
    tell: bool,
    gate: Gate | None = None,
    tries: bool = False,
    mode: FakeTensorMode | None = None,
) -> _Run:
    """Forward and backward. Values that it changed are put back when `stack` ends."""
    inputs, targets = example()
    module_names = {id(m): path for _, root in step.modules for path, m in root.named_modules()}
    own = [t for _, root in step.modules for t in [*root.parameters(), *root.buffers()]]
    operators = WatchOperators(findings, own, [*flatten(inputs)[0], *flatten(targets)[0]])
    operators.line_at = line_at
    operators.gate, operators.undecided = gate, [] if step.train else None
    stack.callback(operators.put_back)
    grads: dict[str, Tensor] = {}
    python = WatchPython(findings, calls=not tries)
    with model_errors(), captured(masks=masks), seeded(torch.tensor(1), module_names=module_names) as random:
        with mode or nullcontext(), python, WatchFunctions(operators), operators, ExitStack() as hooks:
            if gate is not None:
                gate.random = random
                hooks.enter_context(gate.watching())
            outputs, structure = evaluate(step, inputs, targets, tell=tell)
            trainable = _leaves(step, outputs)
            sources = [o for o in outputs if o.requires_grad]
            if sources and trainable:
                made = gradients(sources, list(trainable.values()), [torch.ones_like(o) for o in sources])
                if tries:  # otherwise they only take memory
                    grads = {k: g for k, g in zip(trainable, made, strict=True) if g is not None}
                del made
    if operators.fixed and tell:
        warnings.warn("numbers that depend on integer inputs are fixed in the artifact, and checked in each run: "
                      + "; ".join(dict.fromkeys(operators.fixed)), TileworkWarning, stacklevel=2)  # fmt: skip
    return _Run(
        outputs, structure, random.sites, trainable, operators.log, python.assigned, operators.line, Snapshot(step.modules),
        operators.changing, operators.reads, operators.differentiates, operators.used,
        grads, _left(step, operators) if tries else {}, operators.undecided or [], gate,
    )  # fmt: skip


def _left(step: Step, operators: WatchOperators) -> dict[str, Tensor]:
    buffers = {f"{prefix}{k}": b for prefix, root in step.modules for k, b in root.named_buffers()}
    own = {storage_of(b) for b in buffers.values()}
    others = {str(k): torch.empty(0, dtype=torch.uint8).set_(s.clone()) for k, (s, _) in operators.saved.items() if k not in own}
    return {k: b.detach().clone() for k, b in buffers.items()} | others


def refuse(findings: Findings) -> None:
    """UserError where anything was found that an artifact could not do: all places at once."""
    places = list(findings.places.values())
    if places:
        many = "places" if len(places) > 1 else "place"
        raise UserError("capture-python", f"{len(places)} {many} in the model cannot be captured", places=places)


def _carried(changed: list[Change], run: _Run) -> list[Change]:
    """Without attributes that are set to a tensor in each run, before anything reads what was there: nothing is carried over in
    them from step to step. Outside of the step they stay as they are, which is said once."""
    new = [c for c in changed if isinstance(c.before, Tensor) and isinstance(c.after, Tensor) and c.module is not None]
    kept = [c for c in new if storage_of(c.before) not in run.used]
    if kept:
        names = ", ".join(sorted({c.path.replace(".__dict__", "") for c in kept}))
        warnings.warn(f"forward sets attributes of the model that an artifact does not: {names}", TileworkWarning, stacklevel=2)
    return [c for c in changed if not any(c is k for k in kept)]


def _first_difference(a: list[Any], b: list[Any]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _report_state(changed: list[Change], assigned: dict[tuple[int, str], Line | None], findings: Findings) -> None:
    for change in changed:
        at = assigned.get((id(change.module), change.name)) if change.module is not None else None
        if at is None and change.module is not None:
            at = _line_that_names(change.module, change.name)
        findings.add(f"state {change.name}", *STATE, at=at, where=change.path)


def _leaves(step: Step, outputs: list[Tensor]) -> dict[str, Tensor]:
    """Every tensor at the far end of the autograd graph, by name: also those that no module has registered."""
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    todo: list[Any] = [o.grad_fn for o in outputs if o.grad_fn is not None]
    while todo:
        fn = todo.pop()
        if fn is None or fn in seen:
            continue
        seen.add(fn)
        if hasattr(fn, "variable"):
            found[id(fn.variable)] = fn.variable
        todo += [next_fn for next_fn, _ in fn.next_functions]
    named = {}
    for prefix, root in step.modules:
        for name, p in root.named_parameters():
            if id(p) in found:
                named[f"{prefix}{name}"] = found.pop(id(p))
        for name, t in hidden_parameters(root).items():
            if id(t) in found:
                named[f"{prefix}{name}"] = found.pop(id(t))
    strays = [t for t in found.values() if isinstance(t, nn.Parameter) or _in_optimizer(step, t)]
    order = {id(p): i for i, p in enumerate(p for o in step.optimizers for group in o.param_groups for p in group["params"])}
    for i, t in enumerate(sorted(strays, key=lambda t: order.get(id(t), -1))):
        named[f"unregistered{i}"] = t
    return named


def _in_optimizer(step: Step, tensor: Tensor) -> bool:
    return any(tensor is p for opt in step.optimizers for group in opt.param_groups for p in group["params"])


def _losses(step: Step, outputs: list[Tensor], structure: Structure) -> tuple[int, ...]:
    """Positions, among all outputs, of the losses that the backward section starts from."""
    if step.loss_function is not None:
        return (0,)
    if step.loss is None:
        return ()
    if isinstance(step.loss, str) and step.loss == "auto":
        return _only_loss(outputs, names(structure, "output"))
    wanted = step.loss if isinstance(step.loss, (list, tuple)) else [step.loss]
    known = names(structure, "output")
    positions = []
    for w in wanted:
        name = w if isinstance(w, str) else known[w] if isinstance(w, int) and -len(known) <= w < len(known) else None
        if name not in known:
            raise UserError(
                "loss-position",
                "the loss is not among what forward returns",
                found=repr(w),
                expected=f"a position or name among {known}",
            )
        positions.append(known.index(name))
    for i in positions:
        if not outputs[i].requires_grad:
            raise UserError(
                "loss-gradient",
                f"the loss {known[i]!r} does not depend on any parameter that requires a gradient",
                fix="check that forward does not detach it, and that the parameters are not all frozen",
            )
    return tuple(positions)


def _only_loss(outputs: list[Tensor], known: list[str]) -> tuple[int, ...]:
    """The scalar among what forward returns: the only one, or the one called loss. Their sum would count parts twice."""
    scalars = [i for i, o in enumerate(outputs) if o.dim() == 0 and o.requires_grad]
    named = [i for i in scalars if known[i] in ("loss", "output.loss")]
    if len(scalars) > 1 and not named:
        raise UserError(
            "loss-ambiguous",
            "forward returns several scalars, and it is not clear which of them is the loss",
            found=", ".join(known[i] for i in scalars),
            expected="one scalar, or one called loss",
            fix=f"say which one: loss={known[scalars[0]]!r}, or loss={[known[i] for i in scalars]} for the sum of them",
        )
    return tuple(named or scalars)
