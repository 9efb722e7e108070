"""Update rules: the optimizers' arithmetic as pure functions of tensors, with every hyperparameter a run-time input.

A rule gets a parameter, its gradient, its state and its hyperparameters (0-dim float64 tensors), and returns the new
parameter and state. The formulas and their order of operations are those of torch.optim with foreach=False.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..optim import LAMB, NARROW
from ..optim import Adam as WideAdam
from ..optim import AdamW as AdamWithoutCorrection
from ..optim import RMSprop as RMSpropVariant

Tensors = dict[str, Tensor]
Update = Callable[[Tensor, Tensor, Tensors, Tensors, Tensor], tuple[Tensor, Tensors]]


@dataclass(frozen=True)
class Rule:
    """How one parameter group is updated."""

    kind: str  # "sgd", "adam" ...
    hyper: dict[str, float]  # run-time inputs and their defaults
    state: tuple[str, ...]  # names of the state tensors; each has the parameter's shape and starts at zero
    update: Update
    numbers: dict[str, float] = field(default_factory=dict)  # state that is one number a parameter, and what it starts at
    derive: Callable[[Tensors, Tensor], Tensors] = lambda h, t: {}  # more scalars, once a group, in float64
    is_wide: bool = False  # state of parameters of 16 bits is float32

    def state_like(self, p: Tensor) -> Tensor:
        """What state of a parameter looks like: dense, whatever the parameter's layout."""
        return (p.float() if self.is_wide and p.dtype in NARROW else p).contiguous()


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


def _adams(p: Tensor, g: Tensor, s: Tensors, h: Tensors, decoupled: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What Adam and its kin begin with: weight decay, then both moments. (p, g, exp_avg, exp_avg_sq)"""
    if decoupled:
        p = p * h["keep"]
    else:
        g = _decayed(g, p, h)
    m = s["exp_avg"] + (g - s["exp_avg"]) * h["1-beta1"]
    return p, g, m, s["exp_avg_sq"] * h["beta2"] + (g * g) * h["1-beta2"]


def _adam(group: dict[str, Any], decoupled: bool) -> Rule:
    sign, amsgrad = -1.0 if group["maximize"] else 1.0, group["amsgrad"]
    corrected = group.get("bias_correction", True)
    hyper = {
        "lr": group["lr"],
        "beta1": group["betas"][0],
        "beta2": group["betas"][1],
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        p, g, m, v = _adams(p, g if sign == 1.0 else -g, s, h, decoupled)
        new = {"exp_avg": m, "exp_avg_sq": v}
        if amsgrad:
            new["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], v)
        root = new.get("max_exp_avg_sq", v).sqrt()
        if not corrected:
            return p - (m / (root + h["eps"])) * h["lr"], new
        return p - (m / (root / h["sqrt_correction2"] + h["eps"])) * h["step_size"], new

    state = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
    rule = Rule("adamw" if decoupled else "adam", hyper, state, update)
    return _widened(rule) if group.get("wide_state") else rule


def _widened(rule: Rule) -> Rule:
    """The same arithmetic in float32, where the parameter has 16 bits."""

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        return rule.update(p.float(), g.float(), s, h, t) if p.dtype in NARROW else rule.update(p, g, s, h, t)

    return replace(rule, update=update, is_wide=True)


def _rmsprop(group: dict[str, Any], keep_momentum: bool) -> Rule:
    with_buffer = group["momentum"] != 0 or keep_momentum
    centered, sign = group["centered"], -1.0 if group["maximize"] else 1.0
    variant = group.get("use_tf_variant", False)  # of TensorFlow (optim.py)
    hyper = {"lr": group["lr"], "alpha": group["alpha"], "eps": group["eps"], "weight_decay": group["weight_decay"]}
    if with_buffer:
        hyper["momentum"] = group["momentum"]

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        g = _decayed(g if sign == 1.0 else -g, p, h)
        before = torch.where(t == 1, 1.0, s["square_avg"]) if variant else s["square_avg"]
        square = before * h["alpha"] + (g * g) * h["1-alpha"]
        new = {"square_avg": square}
        if centered:
            new["grad_avg"] = s["grad_avg"] + (g - s["grad_avg"]) * h["1-alpha"]
            square = square - new["grad_avg"] * new["grad_avg"]
        step = g * h["lr"] / (square + h["eps"]).sqrt() if variant else g / (square.sqrt() + h["eps"])
        if with_buffer:
            step = new["momentum_buffer"] = s["momentum_buffer"] * h["momentum"] + step
        return p - (step if variant else step * h["lr"]), new

    state = ("square_avg", *(["grad_avg"] if centered else []), *(["momentum_buffer"] if with_buffer else []))
    rule = Rule("rmsprop", hyper, state, update)
    return _widened(rule) if group.get("wide_state") else rule


def _lamb(group: dict[str, Any]) -> Rule:
    corrected, most = group.get("bias_correction", True), group.get("max_weight_norm")
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
        if corrected:
            direction = (m / h["correction1"]) / (v.sqrt() / h["sqrt_correction2"] + h["eps"])
        else:
            direction = m / (v.sqrt() + h["eps"])
        direction = _decayed(direction, p, h)
        p_norm, d_norm = p.square().sum().sqrt(), direction.square().sum().sqrt()
        if most is not None:
            p_norm = p_norm.clamp(max=most)
        trust = torch.where((p_norm > 0) & (d_norm > 0), p_norm / d_norm, torch.ones_like(p_norm))
        return p - direction * (trust * h["lr"]), {"exp_avg": m, "exp_avg_sq": v}

    rule = Rule("lamb", hyper, ("exp_avg", "exp_avg_sq"), update)
    return _widened(rule) if group.get("wide_state") else rule


def _moments(group: dict[str, Any], *more: str) -> dict[str, float]:
    """The hyperparameters that Adam's kin have."""
    found = {"lr": group["lr"], "beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"]}
    return {**found, "weight_decay": group["weight_decay"], **{name: group[name] for name in more}}


def _signed(group: dict[str, Any], g: Tensor) -> Tensor:
    return -g if group.get("maximize") else g


def _adagrad(group: dict[str, Any]) -> Rule:
    if group["initial_accumulator_value"] != 0:
        raise UserError("optimizer-option", "Adagrad with an initial accumulator value has no update rule in Tilework",
                        found=f"initial_accumulator_value={group['initial_accumulator_value']}", expected="0")  # fmt: skip
    hyper = {name: group[name] for name in ("lr", "lr_decay", "eps", "weight_decay")}

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        g = _decayed(_signed(group, g), p, h)
        total = s["sum"] + g * g
        return p - g / (total.sqrt() + h["eps"]) * h["decayed_lr"], {"sum": total}

    def derive(h: Tensors, t: Tensor) -> Tensors:
        return {"decayed_lr": h["lr"] / (1 + (t - 1) * h["lr_decay"])}

    return Rule("adagrad", hyper, ("sum",), update, derive=derive)


def _adamax(group: dict[str, Any]) -> Rule:
    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        g = _decayed(_signed(group, g), p, h)
        m = s["exp_avg"] + (g - s["exp_avg"]) * h["1-beta1"]
        largest = torch.maximum(s["exp_inf"] * h["beta2"], g.abs() + h["eps"])
        return p - m / largest * h["step_size"], {"exp_avg": m, "exp_inf": largest}

    return Rule("adamax", _moments(group), ("exp_avg", "exp_inf"), update)


def _adadelta(group: dict[str, Any]) -> Rule:
    hyper = {name: group[name] for name in ("lr", "rho", "eps", "weight_decay")}

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        g = _decayed(_signed(group, g), p, h)
        square = s["square_avg"] * h["rho"] + (g * g) * h["1-rho"]
        delta = (s["acc_delta"] + h["eps"]).sqrt() / (square + h["eps"]).sqrt() * g
        return p - delta * h["lr"], {"square_avg": square, "acc_delta": s["acc_delta"] * h["rho"] + (delta * delta) * h["1-rho"]}

    return Rule("adadelta", hyper, ("square_avg", "acc_delta"), update)


def _nadam(group: dict[str, Any]) -> Rule:
    decoupled = bool(group["decoupled_weight_decay"])

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        p, g, m, v = _adams(p, _signed(group, g), s, h, decoupled)
        product = s["mu_product"] * h["mu"]
        denominator = v.sqrt() / h["sqrt_correction2"] + h["eps"]
        now, ahead = h["lr"] * (1.0 - h["mu"]) / (1.0 - product), h["lr"] * h["mu_next"] / (1.0 - product * h["mu_next"])
        return p - g / denominator * now - m / denominator * ahead, {"exp_avg": m, "exp_avg_sq": v, "mu_product": product}

    def derive(h: Tensors, t: Tensor) -> Tensors:
        mu, ahead = (h["beta1"] * (1.0 - 0.5 * 0.96 ** (n * h["momentum_decay"])) for n in (t, t + 1))
        return {"mu": mu, "mu_next": ahead}

    return Rule("nadam", _moments(group, "momentum_decay"), ("exp_avg", "exp_avg_sq"), update, {"mu_product": 1.0}, derive)


def _radam(group: dict[str, Any]) -> Rule:
    decoupled = bool(group["decoupled_weight_decay"])

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        p, g, m, v = _adams(p, _signed(group, g), s, h, decoupled)
        adapted = torch.where(h["rectified"] > 0, h["rectified"] / (v.sqrt() + h["eps"]), 1.0)
        return p - m * adapted * h["step_size"], {"exp_avg": m, "exp_avg_sq": v}

    def derive(h: Tensors, t: Tensor) -> Tensors:
        most, gone = 2 / h["1-beta2"] - 1, h["beta2"] ** t
        rho = most - 2 * t * gone / (1 - gone)
        rect = ((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)).clamp(min=0.0).sqrt()
        return {"rectified": torch.where(rho > 5.0, rect * h["sqrt_correction2"], 0.0)}  # 0: not yet

    return Rule("radam", _moments(group), ("exp_avg", "exp_avg_sq"), update, derive=derive)


def _muon(group: dict[str, Any]) -> Rule:
    (a, b, c), steps = group["ns_coefficients"], int(group["ns_steps"])
    hyper = {name: group[name] for name in ("lr", "weight_decay", "momentum", "eps")}

    def update(p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
        buffer = s["momentum_buffer"] + (g - s["momentum_buffer"]) * h["1-momentum"]
        x = (g + (buffer - g) * h["momentum"] if group["nesterov"] else buffer).bfloat16()
        tall = p.shape[0] > p.shape[1]
        x = x.T if tall else x
        x = x / x.norm().clamp(min=float(group["eps"]))
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        rows, columns = p.shape
        ratio = {"match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}.get(
            group["adjust_lr_fn"], math.sqrt(max(1, rows / columns)))  # fmt: skip
        return p * h["keep"] - (x.T if tall else x) * (h["lr"] * ratio), {"momentum_buffer": buffer}

    return Rule("muon", hyper, ("momentum_buffer",), update)


def updated_by(rule: Rule, p: Tensor, g: Tensor, s: Tensors, h: Tensors, t: Tensor) -> tuple[Tensor, Tensors]:
    """A rule's update; of a complex parameter, real and imaginary parts by themselves, as in torch."""
    if not p.is_complex():
        return rule.update(p, g, s, h, t)
    parts = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in s.items()}
    new, state = rule.update(torch.view_as_real(p), torch.view_as_real(g.resolve_conj()), parts, h, t)
    return torch.view_as_complex(new), {k: torch.view_as_complex(v) if s[k].is_complex() else v for k, v in state.items()}


def derived(h: Tensors, t: Tensor) -> Tensors:
    """The scalars that rules need beyond the hyperparameters, in float64: 1 - 0.999 in float32 is wrong in its 5th digit."""
    h = dict(h)
    h["keep"] = 1.0 - h["lr"] * h["weight_decay"]
    for name in ("beta1", "beta2", "alpha", "rho", "momentum"):
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


RULES: dict[type, Callable[[dict[str, Any], bool], Rule]] = {
    torch.optim.SGD: _sgd,
    AdamWithoutCorrection: lambda group, _: _adam(group, decoupled=True),
    RMSpropVariant: _rmsprop,
    WideAdam: lambda group, _: _adam(group, decoupled=False),
    torch.optim.AdamW: lambda group, _: _adam(group, decoupled=True),
    torch.optim.Adam: lambda group, _: _adam(group, decoupled=bool(group.get("decoupled_weight_decay", False))),
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: lambda group, _: _adagrad(group),
    torch.optim.Adamax: lambda group, _: _adamax(group),
    torch.optim.Adadelta: lambda group, _: _adadelta(group),
    torch.optim.NAdam: lambda group, _: _nadam(group),
    torch.optim.RAdam: lambda group, _: _radam(group),
    LAMB: lambda group, _: _lamb(group),
}
if hasattr(torch.optim, "Muon"):
    RULES[torch.optim.Muon] = lambda group, _: _muon(group)
