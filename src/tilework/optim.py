"""Optimizers that torch.optim does not have, as ordinary torch optimizers: they run in eager PyTorch and can be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


class AdamW(torch.optim.AdamW):
    """torch's AdamW, where bias_correction=False uses the moments as they are: what BERT was trained with."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *args: Any, bias_correction: bool = True, **kwargs: Any) -> None:
        super().__init__(params, lr, *args, **kwargs)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if all(group.get("bias_correction", True) for group in self.param_groups):
            return super().step(closure)
        loss = _closed(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p, state in _with_moments(self, group):
                p.mul_(1 - group["lr"] * group["weight_decay"])
                _moments(p, state, beta1, beta2)
                t = state["step"].item()
                one, two = (1 - beta1**t, 1 - beta2**t) if group.get("bias_correction", True) else (1.0, 1.0)
                p.sub_(group["lr"] / one * state["exp_avg"] / (state["exp_avg_sq"].sqrt() / two**0.5 + group["eps"]))
        return loss


class RMSprop(torch.optim.RMSprop):
    """torch's RMSprop, where use_tf_variant=True is that of TensorFlow: the average of squares begins at one, eps is under the
    root, and the learning rate is part of the momentum buffer."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, *args: Any, use_tf_variant: bool = False, **kwargs: Any) -> None:
        super().__init__(params, lr, *args, **kwargs)
        self.defaults["use_tf_variant"] = use_tf_variant
        for group in self.param_groups:
            group.setdefault("use_tf_variant", use_tf_variant)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if not any(group.get("use_tf_variant") for group in self.param_groups):
            return super().step(closure)
        loss = _closed(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["square_avg"] = torch.ones_like(p)
                    if group["momentum"]:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    if group["centered"]:
                        state["grad_avg"] = torch.zeros_like(p)
                state["step"] += 1
                grad = (-p.grad if group["maximize"] else p.grad) + group["weight_decay"] * p
                square = state["square_avg"].lerp_(grad * grad, 1 - group["alpha"])
                if group["centered"]:
                    square = square - state["grad_avg"].lerp_(grad, 1 - group["alpha"]).square()
                step = group["lr"] * grad / (square + group["eps"]).sqrt()
                if group["momentum"]:
                    step = state["momentum_buffer"].mul_(group["momentum"]).add_(step)
                p.sub_(step)
        return loss


class LAMB(torch.optim.Optimizer):
    """Layer-wise adaptive moments (You et al., 2020): Adam's direction, scaled for each parameter by |p| / |update|. |p| counts
    at most as max_weight_norm, where that is given."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        max_weight_norm: float | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction, "max_weight_norm": max_weight_norm})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _closed(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p, state in _with_moments(self, group):
                _moments(p, state, beta1, beta2)
                t = state["step"].item()
                one, two = (1 - beta1**t, 1 - beta2**t) if group.get("bias_correction", True) else (1.0, 1.0)
                direction = (state["exp_avg"] / one) / ((state["exp_avg_sq"] / two).sqrt() + group["eps"])
                direction.add_(p, alpha=group["weight_decay"])
                p_norm, d_norm = p.norm(), direction.norm()
                if group.get("max_weight_norm") is not None:
                    p_norm = p_norm.clamp(max=group["max_weight_norm"])
                trust = torch.where((p_norm > 0) & (d_norm > 0), p_norm / d_norm, 1.0)
                p.sub_(group["lr"] * trust * direction)
        return loss


def _closed(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """The parameters that have a gradient, each with its state, whose steps are counted."""
    for p in group["params"]:
        if p.grad is None:
            continue
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        yield p, state


def _moments(p: torch.Tensor, state: dict[str, Any], beta1: float, beta2: float) -> None:
    state["exp_avg"].lerp_(p.grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
