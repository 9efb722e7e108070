"""One real run of the user's step, watched: it finds every place that cannot be captured, and what the tracer must know.

Tracing stops at the first problem; a real run does not. So the step is run once in eager PyTorch on the example inputs,
with everything put back afterwards, while we note each read of a tensor's value by Python, each data-dependent shape,
print, and change of Python state. All of them go into one error report.
"""

from __future__ import annotations

import builtins
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from ..artifact.structure import Structure, flatten
from ..errors import Place, TileworkError, UserError
from ..random import RANDOM_OPERATORS, DropoutSite, seeded
from ..reach import hidden_parameters
from ..step import Step
from .rewrites import captured
from .source import line_text, short, user_frame, user_line_of_exception

aten = torch.ops.aten

_READS = {
    "__bool__": ("the branch depends on a tensor's value, which does not exist yet when the step is compiled",
                 "choose with tensors: torch.where(condition, a, b); or decide on the host, before the step"),
    "item": (".item() brings a tensor's value to Python, where it would be frozen into the artifact",
             "keep the value as a tensor; to see it, return it from forward"),
    "tolist": (".tolist() brings a tensor's values to Python, where they would be frozen into the artifact",
               "keep the values as a tensor; to see them, return them from forward"),
    "numpy": ("a NumPy array leaves PyTorch, so what happens to it cannot be compiled",
              "use the torch function of the same name; or do the NumPy work on the host, before the step"),
}  # fmt: skip
_READS["__int__"] = _READS["__float__"] = _READS["__index__"] = _READS["item"]
_READS["__array__"] = _READS["numpy"]
_LOOP = (
    "the loop's length depends on a tensor's value, which does not exist yet when the step is compiled",
    "loop a fixed number of times and mask what is not wanted with torch.where",
)
_SHAPE = (
    "the shape of the result depends on a tensor's values; shapes in an artifact are fixed",
    "keep the full shape and mask: x * mask, torch.where(mask, x, 0), or x.masked_fill(~mask, 0)",
)
_DYNAMIC_SHAPES = {
    aten.nonzero.default, aten.nonzero_numpy.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.unique_dim_consecutive.default,
    aten.bincount.default, aten.repeat_interleave.Tensor, aten.histc.default,
}  # fmt: skip
_NO_RANDOM = (
    "it draws random numbers in a way that has no seeded form",
    "use torch.rand, randn, bernoulli or F.dropout",
)


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


@dataclass
class _Findings:
    places: dict[tuple[str, str], Place] = field(default_factory=dict)  # one a (line, kind)

    def add(self, kind: str, why: str, fix: str, at: tuple[str, int] | None = None) -> None:
        at = at or user_frame()
        if at is None:
            return
        where = short(*at)
        self.places.setdefault((where, kind), Place(where, line_text(*at), why, fix))

    def add_read(self, method: str, at: tuple[str, int] | None) -> None:
        why, fix = _READS[method]
        if at is not None:
            text = line_text(*at)
            if (method == "__bool__" and text.startswith("while")) or (
                method in ("__int__", "__index__") and text.startswith("for")
            ):
                why, fix = _LOOP
        # every way to read a value at one line is one finding
        self.add("read", why, fix, at)


class _WatchFunctions(TorchFunctionMode):
    """Sees Python-level reads of tensor values, by the name of the method that the user called."""

    def __init__(self, findings: _Findings) -> None:
        super().__init__()
        self.findings = findings

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        method = getattr(func, "__name__", "")
        if method in _READS and "Tensor." in (resolve_name(func) or f"Tensor.{method}"):
            self.findings.add_read(method, user_frame())
        return func(*args, **(kwargs or {}))


def _is_attention(func: Any) -> bool:
    """Attention operators are marked as random for their dropout; with dropout they are replaced before they get here."""
    return "scaled_dot_product" in str(func)


class _WatchOperators(TorchDispatchMode):
    """Sees operators with data-dependent results, whatever Python path led to them."""

    def __init__(self, findings: _Findings) -> None:
        super().__init__()
        self.findings = findings

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is aten._local_scalar_dense.default or func is aten.equal.default:
            self.findings.add_read("item", user_frame())
        elif func in _DYNAMIC_SHAPES or (
            func is aten.index.Tensor and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        ):
            self.findings.add("shape", *_SHAPE)
        elif torch.Tag.nondeterministic_seeded in func.tags and func not in RANDOM_OPERATORS and not _is_attention(func):
            self.findings.add("random", *_NO_RANDOM)
        elif func.namespace not in ("aten", "prims", "prim", "tilework"):
            self.findings.add(
                "operator",
                f"operator {func} is not one of PyTorch's own, so no backend has code for it",
                "write it with PyTorch's operators",
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _watch_prints(findings: _Findings) -> Iterator[None]:
    original = builtins.print

    def watched(*args: Any, **kwargs: Any) -> None:
        at = user_frame()
        if at is not None:
            findings.add(
                "print",
                "forward runs in Python only once, at compile time; this would print then and never again",
                "return the value from forward and print it after the step; or remove the line",
                at,
            )
        else:
            original(*args, **kwargs)

    builtins.print = watched
    try:
        yield
    finally:
        builtins.print = original


class _PythonState:
    """Attributes of the user's modules that are not parameters, buffers or sub-modules; noticed when they change."""

    WHY = "forward changes Python state; it runs in Python only once, at compile time, so this would be frozen"
    FIX = "keep the state as a tensor: self.register_buffer(...) and change it in place; or return it from forward"

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.assigned: dict[tuple[int, str], tuple[str, int] | None] = {}
        self.saved = [dict(m.__dict__) for m in modules]
        self.copies = [self._copies(m) for m in modules]

    @staticmethod
    def _attributes(module: nn.Module) -> dict[str, Any]:
        skip = ("_parameters", "_buffers", "_modules", "training")
        return {k: v for k, v in module.__dict__.items() if k not in skip and not k.endswith("_hooks")}

    def _copies(self, module: nn.Module) -> dict[str, Any]:
        return {k: _shallow(v) for k, v in self._attributes(module).items()}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notes the user's line of every assignment to an attribute of a module."""
        original = nn.Module.__setattr__
        assigned = self.assigned

        def watched(module: nn.Module, name: str, value: Any) -> None:
            if name not in module._buffers and name not in module._parameters and name != "training":
                assigned.setdefault((id(module), name), user_frame())
            original(module, name, value)

        nn.Module.__setattr__ = watched  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = original  # type: ignore[method-assign]

    def changed(self) -> list[tuple[nn.Module, str]]:
        """What differs from the last look; then looks again, so that a value set once and for all shows only once."""
        found = []
        for i, module in enumerate(self.modules):
            before, now = self.copies[i], self._copies(module)
            found += [(module, k) for k, v in now.items() if k not in before or not _same(before[k], v)]
            self.copies[i] = now
        return found

    def report(self, changed: list[tuple[nn.Module, str]], findings: _Findings) -> None:
        for module, name in changed:
            at = self.assigned.get((id(module), name)) or _line_that_names(module, name)
            findings.add(f"state {name}", self.WHY, self.FIX, at)

    def restore(self) -> None:
        for module, saved in zip(self.modules, self.saved, strict=True):
            for name in set(module.__dict__) - set(saved):
                del module.__dict__[name]
            module.__dict__.update(saved)


def _shallow(value: Any) -> Any:
    if isinstance(value, (list, dict, set)):
        return (type(value), len(value), tuple(map(id, value.values() if isinstance(value, dict) else value)))
    return value


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    try:
        return bool(a == b)
    except Exception:  # a user's type with its own idea of equality
        return False


def _line_that_names(module: nn.Module, name: str) -> tuple[str, int] | None:
    """The line of the module's forward that mentions self.<name>: where a list was appended to, say."""
    try:
        lines, start = inspect.getsourcelines(type(module).forward)
        path = inspect.getsourcefile(type(module).forward)
    except (OSError, TypeError):
        return None
    for offset, line in enumerate(lines):
        if re.search(rf"\bself\.{re.escape(name)}\b", line):
            return (path or "?"), start + offset
    return (path or "?"), start


@contextmanager
def preserved(step: Step) -> Iterator[None]:
    """Buffers, their registrations and values, train or eval mode, and torch's random state, put back afterwards."""
    modules = [m for _, root in step.modules for m in root.modules()]
    registered = [(m, dict(m._buffers)) for m in modules]
    values = [(b, b.detach().clone()) for _, root in step.modules for b in root.buffers()]
    training = [(m, m.training) for m in modules]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for module, buffers in registered:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        for module, mode in training:
            module.training = mode


def evaluate(step: Step, inputs: Any, targets: Any) -> tuple[list[Tensor], Structure]:
    """Forward and loss: every output tensor (a separate loss first), and the structure of the model's own output."""
    with captured(), torch.autocast("cpu", torch.bfloat16, enabled=step.precision == "bfloat16", cache_enabled=False):
        output = step.call_model(inputs)
        outputs, structure = flatten(output)
        if step.loss_function is not None:
            outputs = [step.call_loss(output, targets), *outputs]
    return outputs, structure


@contextmanager
def model_errors() -> Iterator[None]:
    """What the user's own model or loss raises on the example inputs is the user's, with the user's line."""
    try:
        yield
    except TileworkError:
        raise
    except Exception as e:
        at = user_line_of_exception(e)
        where, text = (short(*at), line_text(*at)) if at else ("the model", "")
        why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        place = Place(where, text, why, "make the step run in eager PyTorch on these example inputs first")
        raise UserError("user-code", "the model or its loss fails on the example inputs", places=[place]) from e


def run_probe(step: Step, example: Callable[[], tuple[Any, Any]]) -> Probe:
    """`example` gives fresh (inputs, targets) as leaves that the step may use and change."""
    findings = _Findings()
    modules = [m for _, root in step.modules for m in root.modules()]
    state = _PythonState(modules)
    names = {id(m): path for _, root in step.modules for path, m in root.named_modules()}

    def once() -> tuple[list[Tensor], Structure, list[DropoutSite]]:
        inputs, targets = example()
        with model_errors(), seeded(torch.tensor(1), module_names=names) as random:
            outputs, structure = evaluate(step, inputs, targets)
        return outputs, structure, random.sites

    with preserved(step), torch.enable_grad(), ExitStack() as stack:
        stack.callback(state.restore)
        with _watch_prints(findings), state.watch(), _WatchFunctions(findings), _WatchOperators(findings):
            outputs, structure, sites = once()
        if state.changed():  # set once and for all, or different at every call? Ask again.
            once()
            state.report(state.changed(), findings)
        if findings.places:
            places = list(findings.places.values())
            raise UserError(
                "capture-python",
                f"{len(places)} place{'s' if len(places) > 1 else ''} in the model cannot be captured",
                places=places,
            )
        trainable = _leaves(step, outputs)
    buffers = {f"{prefix}{k}": b for prefix, root in step.modules for k, b in root.named_buffers()}
    known = {id(t) for t in trainable.values()}
    frozen: dict[str, Tensor] = {
        f"{pre}{k}": p for pre, root in step.modules for k, p in root.named_parameters() if id(p) not in known
    }
    return Probe(
        outputs=[o.detach() for o in outputs],
        structure=structure,
        losses=_losses(step, outputs, structure),
        differentiable=tuple(o.requires_grad for o in outputs),
        trainable=trainable,
        buffers=buffers,
        frozen=frozen,
        sites=sites,
    )


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
        return tuple(i for i, o in enumerate(outputs) if o.dim() == 0 and o.requires_grad)
    wanted = step.loss if isinstance(step.loss, (list, tuple)) else [step.loss]
    from ..artifact.structure import names

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
