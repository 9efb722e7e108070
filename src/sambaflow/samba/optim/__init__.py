"""samba.optim: torch's optimizers. Their updates happen on the device; on the host they hold hyperparameters and state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class SGD(torch.optim.SGD):
    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0, weight_decay: float = 0, **rest: Any
    ) -> None:
        super().__init__(_listed(params), lr=lr, momentum=momentum, weight_decay=weight_decay, **rest)


class AdamW(torch.optim.AdamW):
    """max_grad_norm: gradients are clipped by their global norm before the update (the GRADNORM section)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(_listed(params), lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, **rest)
        self.max_grad_norm = max_grad_norm


class Adam(torch.optim.Adam):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        max_grad_norm: float | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(_listed(params), lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, **rest)
        self.max_grad_norm = max_grad_norm


def _listed(params: Iterable[Any]) -> list[Any]:
    """torch refuses sets, because their order is not certain; an OrderedSet's is."""
    return list(params)
