"""What the engine compiles: the program's module, called as the program calls it, with its loss in front of what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import Error
from .losses import Watching, final_loss, require_unchanged

_COERCED = {torch.float64: torch.float32, torch.bfloat16: torch.float32}
NAMES = {torch.int64: "Long", torch.int32: "Int", torch.float64: "Double", torch.float32: "Float", torch.bfloat16: "BFloat16"}


class Call:
    """The form of one call: which leaves of its arguments are tensors, and what the others are."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        leaves, self.spec = tree_flatten((tuple(args), dict(kwargs)))
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.is_plain = not kwargs and all(isinstance(a, Tensor) for a in args)

    def tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """Those of another call, which must have the same form."""
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.spec or [isinstance(leaf, Tensor) for leaf in leaves] != self.is_tensor:
            raise Error("poptorch-inputs", "The arguments have another structure than when the model was compiled",
                        found=str(spec), expected=str(self.spec), fix="call destroy() to compile again")  # fmt: skip
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        for found, expected in zip(others, self.others, strict=True):
            if found is not expected and found != expected:
                raise Error("poptorch-inputs", "An argument that is not a tensor has another value than when the model was "
                                               "compiled",
                            found=repr(found), expected=repr(expected), fix="call destroy() to compile again")  # fmt: skip
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def build(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, others = iter(tensors), iter(self.others)
        leaves = [next(given) if t else next(others) for t in self.is_tensor]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs


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
    inputs = [t.clone() for t in _widened([t.detach() for t in tensors])]
    versions = [t._version for t in inputs]
    state = torch.get_rng_state()
    held = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    values = {id(b): (b, b.detach().clone()) for b in model.buffers()}
    try:
        with torch.enable_grad() if training else torch.no_grad(), Watching(found, training=training) as watching:
            args, kwargs = call.build(inputs)
            result = model(*args, **kwargs)
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
