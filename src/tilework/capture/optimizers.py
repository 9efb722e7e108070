"""Update rules: the optimizers' arithmetic as pure functions of tensors, with every hyperparameter a run-time input.

A rule gets a parameter, its gradient, its state and its hyperparameters (0-dim float64 tensors), and returns the new
parameter and state. The formulas and their order of operations are those of torch.optim with foreach=False.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import UserError
from ..optim import LAMB
from ..step import Step

Tensors = dict[str, Tensor]
Update = Callable[[Tensor, Tensor, Tensors, Tensors, Tensor], tuple[Tensor, Tensors]]


@dataclass(frozen=True)
class Rule:
    """How one parameter group is updated."""

    kind: str  # "sgd", "adam" ...
    hyper: dict[str, float]  # run-time inputs and their defaults
    state: tuple[str, ...]  # names of the state tensors; each has the parameter's shape and starts at zero
    update: Update


def _decayed(g: Tensor, p: Tensor, h: Tensors) -> Tensor:
    """g + weight_decay p; g alone without decay, as in torch: an infinite parameter is not to become NaN."""
    decay = h["weight_decay"]
    return g + torch.where(decay != 0, p * decay, 0.0)


def _sgd(group: dict[str, Any], keep_momentum: bool) -> Rule:
    dampened = group["dampening"] != 0
    with_buffer = group["momentum"] != 0 or keep_momentum
    nesterov, sign = group["nesterov"], -1.0 if group["maximize"] else 1.0
    hyper = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
    if with_buffer:
        hyper["momentum"] = group["momentum"]
    if dampened:
        hyper["dampening"] = group["dampening"]

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        g = g if sign == 1.0 else -g
        if not with_buffer:  # p - lr (g + wd p)
            return p * h["keep"] - g * h["lr"], {}
        g = _decayed(g, p, h)
        # torch starts the buffer at the first gradient, without dampening
        fresh = g if not dampened else g * torch.where(t == 1, 1.0, 1.0 - h["dampening"]).to(g.dtype)
        buffer = s["momentum_buffer"] * h["momentum"] + fresh
        g = g + buffer * h["momentum"] if nesterov else buffer
        return p - g * h["lr"], {"momentum_buffer": buffer}

    return Rule("sgd", hyper, ("momentum_buffer",) if with_buffer else (), update)


def _adam(group: dict[str, Any], decoupled: bool) -> Rule:
    sign, amsgrad = -1.0 if group["maximize"] else 1.0, group["amsgrad"]
    hyper = {
        "lr": group["lr"],
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        g = g if sign == 1.0 else -g
        if decoupled:
            p = p * h["keep"]
        else:
            g = _decayed(g, p, h)
        m = s["exp_avg"] + (g - s["exp_avg"]) * h["1-beta1"]
        v = s["exp_avg_sq"] * h["beta2"] + (g * g) * h["1-beta2"]
        new = {"exp_avg": m, "exp_avg_sq": v}
        if amsgrad:
            new["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], v)
        denominator = new.get("max_exp_avg_sq", v).sqrt() / h["sqrt_correction2"] + h["eps"]
        return p - (m / denominator) * h["step_size"], new

    state = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
    return Rule("adamw" if decoupled else "adam", hyper, state, update)


def _rmsprop(group: dict[str, Any], keep_momentum: bool) -> Rule:
    with_buffer = group["momentum"] != 0 or keep_momentum
    centered, sign = group["centered"], -1.0 if group["maximize"] else 1.0
    hyper = {"lr": group["lr"], "alpha": group["alpha"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    if with_buffer:
        hyper["momentum"] = group["momentum"]

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        g = _decayed(g if sign == 1.0 else -g, p, h)
        square = s["square_avg"] * h["alpha"] + (g * g) * h["1-alpha"]
        new = {"square_avg": square}
        if centered:
            new["grad_avg"] = s["grad_avg"] + (g - s["grad_avg"]) * h["1-alpha"]
            square = square - new["grad_avg"] * new["grad_avg"]
        step = g / (square.sqrt() + h["eps"])
        if with_buffer:
            step = new["momentum_buffer"] = s["momentum_buffer"] * h["momentum"] + step
        return p - step * h["lr"], new

    state = ("square_avg", *(["grad_avg"] if centered else []), *(["momentum_buffer"] if with_buffer else []))
    return Rule("rmsprop", hyper, state, update)


def _lamb(group: dict[str, Any]) -> Rule:
    hyper = {
        "lr": group["lr"],
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        m = s["exp_avg"] + (g - s["exp_avg"]) * h["1-beta1"]
        v = s["exp_avg_sq"] * h["beta2"] + (g * g) * h["1-beta2"]
        direction = (m / h["correction1"]) / (v.sqrt() / h["sqrt_correction2"] + h["eps"])
        direction = _decayed(direction, p, h)
        p_norm, d_norm = p.square().sum().sqrt(), direction.square().sum().sqrt()
        trust = torch.where((p_norm > 0) & (d_norm > 0), p_norm / d_norm, torch.ones_like(p_norm))
        return p - direction * (trust * h["lr"]), {"exp_avg": m, "exp_avg_sq": v}

    return Rule("lamb", hyper, ("exp_avg", "exp_avg_sq"), update)


def derived(h: Tensors, t: Tensor) -> Tensors:
    """The scalars that rules need beyond the hyperparameters, in float64: 1 - 0.999 in float32 is wrong in its 5th digit."""
    h = dict(h)
    h["keep"] = 1.0 - h["lr"] * h["weight_decay"]
    for name in ("beta1", "beta2", "alpha"):
        if name in h:
            h[f"1-{name}"] = 1.0 - h[name]
    if "beta1" in h:
        h["correction1"] = 1.0 - h["beta1"] ** t
        h["sqrt_correction2"] = torch.sqrt(1.0 - h["beta2"] ** t)
        h["step_size"] = h["lr"] / h["correction1"]
    return h


def packed(h: Tensors) -> Tensors:
    """The scalars in float32. Where some had to be computed they are put into one small tensor first: the compiler then
    computes them once a step, instead of again in every loop over a parameter's elements."""
    h = {k: v.to(torch.float32) for k, v in h.items()}
    if not any("1-" in k for k in h):
        return h
    together = torch.stack(list(h.values()))
    return {k: together[i] for i, k in enumerate(h)}


_RULES: dict[type, Callable[[dict[str, Any], bool], Rule]] = {
    torch.optim.SGD: _sgd,
    torch.optim.AdamW: lambda group, _: _adam(group, decoupled=True),
    torch.optim.Adam: lambda group, _: _adam(group, decoupled=bool(group.get("decoupled_weight_decay", False))),
    torch.optim.RMSprop: _rmsprop,
    LAMB: lambda group, _: _lamb(group),
}


def rule_for(optimizer: torch.optim.Optimizer, group: dict[str, Any], keep_momentum: bool) -> Rule:
    for kind, rule in _RULES.items():  # AdamW before Adam, whose subclass it is
        if isinstance(optimizer, kind):
            _check_step(optimizer, kind)
            return rule(group, keep_momentum)
    raise UserError(
        "optimizer-unknown",
        "this optimizer has no update rule in Tilework",
        found=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        expected="torch.optim.SGD, Adam, AdamW or RMSprop, or tilework.optim.LAMB",
        fix="use one of these; or compile without an optimizer, read the gradients, and update on the host",
    )


def _check_step(optimizer: torch.optim.Optimizer, kind: type) -> None:
    """UserError where optimizer.step() does something else than that of the torch class whose rule we have."""
    problems = []
    if inspect.unwrap(type(optimizer).step) is not inspect.unwrap(kind.step):  # type: ignore[attr-defined]
        problems.append(f"{type(optimizer).__name__} has a step() of its own")
    own = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):  # a scheduler only counts the calls
        problems.append("step was replaced on the object")
    hooks = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]  # type: ignore[attr-defined]
    if any([*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]):
        problems.append("it has step hooks")
    if any(p._post_accumulate_grad_hooks for g in optimizer.param_groups for p in g["params"]):
        problems.append("its parameters have post_accumulate_grad hooks")
    if problems:
        raise UserError(
            "optimizer-changed",
            f"the optimizer does more than torch.optim.{kind.__name__}, whose update rule would be compiled",
            found="; ".join(problems),
            expected=f"a plain {kind.__name__} without hooks",
            fix="put what a hook does to gradients into the model (tensor.register_hook), and the rest on the host; "
            "or compile without an optimizer, read the gradients, and update on the host",
        )


@dataclass(frozen=True)
class Group:
    """One parameter group of one optimizer: hyperparameters are named opt<i>.g<j>.<name>."""

    prefix: str
    optimizer: str  # "opt0"
    rule: Rule
    params: tuple[str, ...]


def groups_of(step: Step, trainable: dict[str, Tensor], keep_momentum: bool) -> list[Group]:
    """Every group with the names of those of its parameters that get a gradient (torch skips the others too)."""
    names = {id(p): name for name, p in trainable.items()}
    found: list[Group] = []
    taken: set[str] = set()
    for i, optimizer in enumerate(step.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            params = tuple(names[id(p)] for p in group["params"] if id(p) in names and p.requires_grad)
            twice = sorted(taken & set(params))
            if twice:
                raise UserError(
                    "optimizer-overlap",
                    "a parameter belongs to two parameter groups",
                    found=", ".join(twice),
                    expected="each parameter in one group of one optimizer",
                )
            taken |= set(params)
            group = {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items()}
            found.append(Group(f"opt{i}.g{j}", f"opt{i}", rule_for(optimizer, group, keep_momentum), params))
    return found


def clip(grads: Tensors, norm: Tensor | None, value: Tensor | None) -> Tensors:
    """Gradient clipping as torch.nn.utils.clip_grad_value_ and clip_grad_norm_ do it, in that order."""
    if value is not None:
        grads = {k: torch.minimum(torch.maximum(g, (-value).to(g.dtype)), value.to(g.dtype)) for k, g in grads.items()}
    if norm is not None and grads:
        total = torch.stack([g.float().square().sum() for g in grads.values()]).sum().sqrt()
        scale = torch.clamp(norm / (total + 1e-6), max=1.0)
        grads = {k: g * scale.to(g.dtype) for k, g in grads.items()}
    return grads
