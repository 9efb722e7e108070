"""samba.optim: torch's optimizers. Their updates happen on the device; on the host they hold hyperparameters and state."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def _without_the_compiler() -> Iterator[None]:
    """torch imports its whole compiler, more than a second, when the first optimizer is made, only to exempt one function from
    being compiled. Here it is not, as long as nobody else has imported it."""
    function: Any = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules or hasattr(function, _EXEMPT):
        yield
        return
    setattr(function, _EXEMPT, function)
    try:
        yield
    finally:
        delattr(function, _EXEMPT)


_EXEMPT = "__dynamo_disable"


class SGD(torch.optim.SGD):
    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0, weight_decay: float = 0, **rest: Any
    ) -> None:
        with _without_the_compiler():
            super().__init__(_listed(params), lr=lr, momentum=momentum, weight_decay=weight_decay, **rest)


class _Clipped:
    """max_grad_norm: gradients are clipped by their global norm before the update (the GRADNORM section)."""

    def __init__(self, params: Iterable[Any], *args: Any, max_grad_norm: float | None = None, **rest: Any) -> None:
        with _without_the_compiler():
            super().__init__(_listed(params), *args, **rest)  # type: ignore[call-arg]
        self.max_grad_norm = max_grad_norm


class AdamW(_Clipped, torch.optim.AdamW):
    pass


class Adam(_Clipped, torch.optim.Adam):
    pass


def _listed(params: Iterable[Any]) -> list[Any]:
    """torch refuses sets, because their order is not certain; an OrderedSet's is."""
    return list(params)
