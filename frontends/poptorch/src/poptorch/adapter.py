"""What the engine compiles: the program's module, called as the program calls it, with its loss in front of what it returns."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilework.errors import TileworkError

from .errors import Error, StateError
from .losses import Watching, final_loss, require_unchanged

_COERCED = {torch.float64: torch.float32, torch.bfloat16: torch.float32}
NAMES = {torch.int64: "Long", torch.int32: "Int", torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16"}
# What torch's own errors name where floating types do not go together.
_OF_TYPES = re.compile(r"\b(half|float16|bfloat16|double|float64)(tensor)?\b", re.IGNORECASE)


class Call:
    """The form of one call: which leaves of its arguments are tensors, and what the others are."""

    _signature: inspect.Signature | None = None  # of forward

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.is_plain = not kwargs and all(isinstance(a, Tensor) for a in args)

    def learn(self, forward: Callable[..., Any]) -> None:
        """The names and defaults of forward's arguments: another call may pass the same ones in another way."""
        with contextlib.suppress(Exception):  # built in, a call that forward will refuse, containers that check what they hold
            signature = inspect.signature(forward)
            args, kwargs = tree_unflatten([_Slot(i) for i in range(len(self.is_tensor))], self.spec)
            self._bound, self._bound_spec = tree_flatten(_bound(signature, args, kwargs))
            self._signature = signature

    def tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """Those of another call, which must have the same form."""
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.spec:
            placed = self._placed(args, kwargs)
            leaves, spec = (leaves, spec) if placed is None else (placed, self.spec)
        if spec != self.spec or [isinstance(leaf, Tensor) for leaf in leaves] != self.is_tensor:
            raise Error("poptorch-inputs", "The arguments have another structure than when the model was compiled",
                        found=str(spec), expected=str(self.spec), fix="call destroy() to compile again")  # fmt: skip
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        for found, expected in zip(others, self.others, strict=True):
            if found is not expected and found != expected:
                raise _another(found, expected)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _placed(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        """The leaves of a call that passes its arguments in another way, where they were in the first one. None: it is another
        call. What the first one left out has its default in this one too."""
        if self._signature is None:
            return None
        try:
            leaves, spec = tree_flatten(_bound(self._signature, args, kwargs))
        except TypeError:
            return None
        if spec != self._bound_spec:
            return None
        placed: list[Any] = [None] * len(self.is_tensor)
        for leaf, known in zip(leaves, self._bound, strict=True):
            if isinstance(known, _Slot):
                placed[known.position] = leaf
            elif isinstance(leaf, Tensor) or isinstance(known, Tensor):
                if leaf is not known:
                    return None
            elif leaf is not known and leaf != known:
                raise _another(leaf, known)
        return placed

    def build(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, others = iter(tensors), iter(self.others)
        leaves = [next(given) if t else next(others) for t in self.is_tensor]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class _Slot:
    """Where a leaf is in the call that was compiled."""

    position: int


def _bound(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """One form for all calls that mean the same."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, dict(sorted(bound.kwargs.items()))


def _another(found: Any, expected: Any) -> Error:
    return Error("poptorch-inputs", "An argument that is not a tensor has another value than when the model was compiled",
                 found=repr(found), expected=repr(expected), fix="call destroy() to compile again")  # fmt: skip


def coerced(t: Tensor) -> Tensor:
    """float64 and bfloat16 become float32, as on the device; whole numbers keep their width until they come back."""
    kind = _COERCED.get(t.dtype)
    return t if kind is None else t.to(kind)


@dataclass
class Look:
    """What a first run of forward in eager PyTorch showed."""

    spec: Any = None  # of what it returns
    is_tensor: list[bool] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    loss: int = -1  # among the losses, in the order in which they are made
    changed: list[int] = field(default_factory=list)  # inputs that forward changes in place
    blocks: list[tuple[str, int | None]] = field(default_factory=list)
    cpu: list[str] = field(default_factory=list)

    def begin(self, name: str | None, ipu: int | None) -> None:
        name = name or str(len(self.blocks))
        if all(known != name for known, _ in self.blocks):
            self.blocks.append((name, ipu))

    def rebuilt(self, tensors: Sequence[Any]) -> Any:
        given, others = iter(tensors), iter(self.others)
        return tree_unflatten([next(given) if t else next(others) for t in self.is_tensor], self.spec)


def look(model: nn.Module, call: Call, tensors: Sequence[Tensor], *, training: bool) -> Look:
    """Everything that forward changes is put back."""
    found = Look()
    call.learn(model.forward)
    inputs = [t.clone() for t in _widened([t.detach() for t in tensors])]
    versions = [t._version for t in inputs]
    state = torch.get_rng_state()
    held = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    values = {id(b): (b, b.detach().clone()) for b in model.buffers()}
    try:
        with torch.enable_grad() if training else torch.no_grad(), Watching(found, training=training) as watching:
            args, kwargs = call.build(inputs)
            try:
                result = model(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError) as e:
                _require_types(model, inputs, e)
                raise
        for module, parameters, buffers in held:
            _require_same(module, parameters, module._parameters, "parameter")
            _require_same(module, buffers, module._buffers, "buffer")
    finally:
        torch.set_rng_state(state)
        for module, parameters, buffers in held:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        with torch.no_grad():
            for b, value in values.values():
                b.copy_(value)
    leaves, found.spec = tree_flatten(result)
    found.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    found.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    found.changed = [i for i, (t, before) in enumerate(zip(inputs, versions, strict=True)) if t._version != before]
    if training:
        found.loss = final_loss(watching.losses)
        require_unchanged(watching.losses[found.loss], [t for t in leaves if isinstance(t, Tensor)])
    elif not any(found.is_tensor):
        raise Error("poptorch-outputs", "the model returns no tensor", found=type(result).__name__)
    return found


def _require_types(model: nn.Module, inputs: Sequence[Tensor], error: Exception) -> None:
    """Explains an error of torch that comes from types."""
    if isinstance(error, TileworkError) or not _OF_TYPES.search(str(error)):
        return
    weights, given = _floating([*model.parameters(), *model.buffers()]), _floating(inputs)
    wide = [name for name in weights if name in ("float64", "bfloat16")]
    fix = ("model.float(): inputs of float64 and bfloat16 are float32 on the device" if wide else
           "give them one type: model.float() or model.half(), or x.to(...) in forward")  # fmt: skip
    raise StateError("poptorch-types", "forward cannot compute with the types of its weights and inputs",
                     found=f"{str(error).splitlines()[0]}; weights of {' and '.join(weights) or 'no such type'}, inputs of "
                     f"{' and '.join(given) or 'no such type'}",
                     expected="float32, or float16; both in one operator only where PopTorch mixes them",
                     fix=fix) from error  # fmt: skip


def _floating(tensors: Sequence[Tensor]) -> list[str]:
    return sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()})


def _require_same(module: nn.Module, before: dict[str, Any], after: dict[str, Any], kind: str) -> None:
    for name, tensor in before.items():
        if after.get(name) is not tensor:
            what = "deleted" if name not in after else "assigned to"
            raise Error("poptorch-buffer", f"the {kind} {name!r} of {type(module).__name__} was {what} in forward",
                        fix=f"change it in place: self.{name}.copy_(...), self.{name}.add_(...)")  # fmt: skip


def _widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """32 and 64 bits are the same kind of whole number on the device; torch's losses want 64."""
    return [t.long() if t.dtype == torch.int32 else t for t in tensors]


class Traced(nn.Module):
    def __init__(self, model: nn.Module, call: Call, seen: Look, *, training: bool) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._call, self._seen, self._is_for_training = call, seen, training

    def train(self, mode: bool = True) -> Traced:
        """The program's module keeps the mode that it had when it was wrapped."""
        return self

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with Watching(training=self._is_for_training) as watching:
            given = _widened(tensors)
            for i in self._seen.changed:
                given[i] = given[i].clone()
            args, kwargs = self._call.build(given)
            leaves, _ = tree_flatten(self.model(*args, **kwargs))
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found += [given[i] for i in self._seen.changed]
        return (watching.losses[self._seen.loss], *found) if self._is_for_training else tuple(found)
