"""Optimizers that torch.optim does not have, as ordinary torch optimizers: they run in eager PyTorch and can be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

NARROW = (torch.float16, torch.bfloat16)


class _Moments:
    """For Adam and AdamW: what torch's do not have."""

    param_groups: list[dict[str, Any]]
    _decoupled: bool

    def _take(self: Any, bias_correction: bool, wide_state: bool) -> None:
        for group in (self.defaults, *self.param_groups):
            group.setdefault("bias_correction", bias_correction)
            group.setdefault("wide_state", wide_state)

    def _is_plain(self) -> bool:
        return all(group.get("bias_correction", True) and not group.get("wide_state") for group in self.param_groups)

    def _stepped(self: Any) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p, grad, state in _with_moments(self, group):
                kind = state["exp_avg"].dtype
                value, grad = p.to(kind), (-grad if group["maximize"] else grad).to(kind)
                if self._decoupled:
                    value = value * (1 - group["lr"] * group["weight_decay"])
                elif group["weight_decay"]:
                    grad = grad + group["weight_decay"] * value
                _moments(grad, state, beta1, beta2)
                t = state["step"].item()
                one, two = (1 - beta1**t, 1 - beta2**t) if group.get("bias_correction", True) else (1.0, 1.0)
                square = state["exp_avg_sq"]
                if group["amsgrad"]:
                    square = torch.maximum(state.setdefault("max_exp_avg_sq", torch.zeros_like(square)), square)
                    state["max_exp_avg_sq"] = square
                p.copy_(value - group["lr"] / one * state["exp_avg"] / (square.sqrt() / two**0.5 + group["eps"]))


class AdamW(_Moments, torch.optim.AdamW):
    """torch's AdamW. bias_correction=False uses the moments as they are: what BERT was trained with. wide_state=True keeps the
    moments of parameters of 16 bits in float32, and rounds once a step: in float16 the usual eps is zero."""

    _decoupled = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *args: Any, bias_correction: bool = True,
                 wide_state: bool = False, **kwargs: Any) -> None:  # fmt: skip
        super().__init__(params, lr, *args, **kwargs)
        self._take(bias_correction, wide_state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self._is_plain():
            return super().step(closure)
        loss = _closed(closure)
        self._stepped()
        return loss


class Adam(_Moments, torch.optim.Adam):
    """torch's Adam, with the wide_state of AdamW."""

    _decoupled = False

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *args: Any, wide_state: bool = False, **kwargs: Any) -> None:
        super().__init__(params, lr, *args, **kwargs)
        self._take(True, wide_state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self._is_plain():
            return super().step(closure)
        loss = _closed(closure)
        self._stepped()
        return loss


class RMSprop(torch.optim.RMSprop):
    """torch's RMSprop, with the wide_state of AdamW. use_tf_variant=True is that of TensorFlow: the average of squares begins at
    one, eps is under the root, and the learning rate is part of the momentum buffer."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, *args: Any, use_tf_variant: bool = False,
                 wide_state: bool = False, **kwargs: Any) -> None:  # fmt: skip
        super().__init__(params, lr, *args, **kwargs)
        for group in (self.defaults, *self.param_groups):
            group.setdefault("use_tf_variant", use_tf_variant)
            group.setdefault("wide_state", wide_state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if not any(group.get("use_tf_variant") or group.get("wide_state") for group in self.param_groups):
            return super().step(closure)
        loss = _closed(closure)
        for group in self.param_groups:
            variant = group.get("use_tf_variant")
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, kind = self.state[p], _kind(group, p)
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["square_avg"] = torch.full_like(p, 1.0 if variant else 0.0, dtype=kind)
                    if group["momentum"]:
                        state["momentum_buffer"] = torch.zeros_like(p, dtype=kind)
                    if group["centered"]:
                        state["grad_avg"] = torch.zeros_like(p, dtype=kind)
                state["step"] += 1
                value, grad = p.to(kind), (-p.grad if group["maximize"] else p.grad).to(kind)
                grad = grad + group["weight_decay"] * value
                square = state["square_avg"].lerp_(grad * grad, 1 - group["alpha"])
                if group["centered"]:
                    square = square - state["grad_avg"].lerp_(grad, 1 - group["alpha"]).square()
                step = group["lr"] * grad / (square + group["eps"]).sqrt() if variant else grad / (square.sqrt() + group["eps"])
                if group["momentum"]:
                    step = state["momentum_buffer"].mul_(group["momentum"]).add_(step)
                p.copy_(value - (step if variant else group["lr"] * step))
        return loss


class LAMB(torch.optim.Optimizer):
    """Layer-wise adaptive moments (You et al., 2020): Adam's direction, scaled for each parameter by |p| / |update|. |p| counts
    at most as max_weight_norm, where that is given. wide_state is that of AdamW."""

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
        wide_state: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        more = {"bias_correction": bias_correction, "max_weight_norm": max_weight_norm, "wide_state": wide_state}
        super().__init__(params, {**defaults, **more})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = _closed(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p, grad, state in _with_moments(self, group):
                kind = state["exp_avg"].dtype
                value = p.to(kind)
                _moments(grad.to(kind), state, beta1, beta2)
                t = state["step"].item()
                one, two = (1 - beta1**t, 1 - beta2**t) if group.get("bias_correction", True) else (1.0, 1.0)
                direction = (state["exp_avg"] / one) / ((state["exp_avg_sq"] / two).sqrt() + group["eps"])
                direction.add_(value, alpha=group["weight_decay"])
                p_norm, d_norm = value.norm(), direction.norm()
                if group.get("max_weight_norm") is not None:
                    p_norm = p_norm.clamp(max=group["max_weight_norm"])
                trust = torch.where((p_norm > 0) & (d_norm > 0), p_norm / d_norm, 1.0)
                p.copy_(value - group["lr"] * trust * direction)
        return loss


def _kind(group: dict[str, Any], p: torch.Tensor) -> torch.dtype:
    """Of a parameter's state."""
    return torch.float32 if group.get("wide_state") and p.dtype in NARROW else p.dtype


def _closed(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _with_moments(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """The parameters that have a gradient, with it and with their state, whose steps are counted."""
    for p in group["params"]:
        if p.grad is None:
            continue
        state = optimizer.state[p]
        if not state:
            kind = _kind(group, p)
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, dtype=kind)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=kind)
        state["step"] += 1
        yield p, p.grad, state


def _moments(grad: torch.Tensor, state: dict[str, Any], beta1: float, beta2: float) -> None:
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
