"""Optimizers that torch.optim does not have, as ordinary torch optimizers: they run in eager PyTorch and can be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class LAMB(torch.optim.Optimizer):
    """Layer-wise adaptive moments (You et al., 2020): Adam's direction, scaled for each parameter by |p| / |update|."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                t = state["step"].item()
                direction = (state["exp_avg"] / (1 - beta1**t)) / ((state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + group["eps"])
                direction.add_(p, alpha=group["weight_decay"])
                p_norm, d_norm = p.norm(), direction.norm()
                trust = torch.where((p_norm > 0) & (d_norm > 0), p_norm / d_norm, 1.0)
                p.sub_(group["lr"] * trust * direction)
        return loss
