"""The user's optimizers: which parameters each group updates, and by which rule (rules.py)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ..errors import UserError
from ..step import Step
from .rules import RULES, Rule


def rule_for(optimizer: torch.optim.Optimizer, group: dict[str, Any], keep_momentum: bool) -> Rule:
    for kind, rule in RULES.items():  # AdamW before Adam, whose subclass it is
        if isinstance(optimizer, kind):
            _check_step(optimizer, kind)
            return rule(group, keep_momentum)
    raise UserError(
        "optimizer-unknown",
        "this optimizer has no update rule in Tilework",
        found=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        expected=", ".join(dict.fromkeys(kind.__name__ for kind in RULES)) + " (of torch.optim, and those of tilework.optim)",
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
    counter: str  # whose steps are counted together: the prefix, or the part of the group that is left out together
    ran: str = ""  # the buffer that says whether they have a gradient in this step; empty: always


def groups_of(step: Step, trainable: dict[str, Tensor], keep_momentum: bool, ran: dict[str, str]) -> list[Group]:
    """Every group with the names of those of its parameters that get a gradient (torch skips the others too).
    `ran`: the buffers of parameters that some steps leave without one. torch counts their steps apart: so do groups here."""
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
            prefix, rule = f"opt{i}.g{j}", rule_for(optimizer, group, keep_momentum)
            for n, buffer in enumerate(("", *sorted({ran[k] for k in params if k in ran}))):
                together = tuple(k for k in params if ran.get(k, "") == buffer)
                found.append(Group(prefix, f"opt{i}", rule, together, f"{prefix}.part{n}" if buffer else prefix, buffer))
    return found


def clip(grads: dict[str, Tensor], norm: Tensor | None, value: Tensor | None) -> dict[str, Tensor]:
    """Gradient clipping as torch.nn.utils.clip_grad_value_ and clip_grad_norm_ do it, in that order."""
    if value is not None:
        grads = {k: torch.minimum(torch.maximum(g, (-value).to(g.dtype)), value.to(g.dtype)) for k, g in grads.items()}
    if norm is not None and grads:
        scale = torch.clamp(norm / (global_norm(grads) + 1e-6), max=1.0)
        grads = {k: g * scale.to(g.dtype) for k, g in grads.items()}
    return grads


def global_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """The L2 norm of all gradients together."""
    return torch.stack([g.float().square().sum() for g in grads.values()]).sum().sqrt()
