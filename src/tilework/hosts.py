"""The host's own objects: which model and optimizers of this process belong to an artifact, and what torch's state says.

A session looks here for changes since the compile. Weak references only: being known here keeps nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import UserError


@dataclass(frozen=True)
class Host:
    model: nn.Module
    loss: nn.Module | None
    optimizers: list[torch.optim.Optimizer]


@dataclass(frozen=True)
class _Known:
    model: weakref.ref[nn.Module]
    loss: weakref.ref[nn.Module] | None
    optimizers: list[weakref.ref[torch.optim.Optimizer]]


_KNOWN: dict[str, _Known] = {}  # by the artifact's digest


def remember(digest: str, model: Any, optimizers: Sequence[torch.optim.Optimizer] | None = None, loss: Any = None) -> None:
    """The latest model counts; its optimizers and its loss stay known until others are named. Of a model that is only a dict of
    tensors there is nothing to know."""
    for old in [d for d, known in _KNOWN.items() if known.model() is None]:
        del _KNOWN[old]
    if not isinstance(model, nn.Module):
        return
    before = _KNOWN.get(digest)
    if before is None or before.model() is not model:
        before = _Known(weakref.ref(model), None, [])
    _KNOWN[digest] = _Known(
        before.model,
        weakref.ref(loss) if isinstance(loss, nn.Module) else before.loss,
        before.optimizers if optimizers is None else [weakref.ref(o) for o in optimizers],
    )


def host_of(digest: str) -> Host | None:
    """None where nobody in this process compiled or synced it, or the model is gone."""
    known = _KNOWN.get(digest)
    model = known.model() if known is not None else None
    if known is None or model is None:
        return None
    loss = known.loss() if known.loss is not None else None
    return Host(model, loss, [o for ref in known.optimizers if (o := ref()) is not None])


def steps_made(states: Mapping[str, Mapping[str, Any]], group: str, rule: str, dampened: bool) -> int:
    """How many steps an optimizer has made with one group, from torch's state of each parameter.

    torch's SGD keeps no count. Only dampening asks for one: the first step is not dampened, and a momentum buffer says that
    it is over."""
    if rule == "sgd":
        counts = {name: int(state.get("momentum_buffer") is not None) for name, state in states.items()}
        if not dampened:
            return max(counts.values(), default=0)
    else:
        counts = {name: int(state.get("step", 0)) for name, state in states.items()}
    if len(set(counts.values())) > 1:
        examples = {count: name for name, count in counts.items()}
        raise UserError(
            "optimizer-steps", f"the parameters of optimizer group {group} have seen different numbers of steps",
            found=", ".join(f"{count} ({name})" for count, name in sorted(examples.items())[:8]),
            expected="one number for the whole group",
            fix="give them groups of their own (add_param_group), or start from a fresh optimizer",
        )  # fmt: skip
    return next(iter(counts.values()), 0)
