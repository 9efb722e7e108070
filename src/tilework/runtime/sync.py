"""sync: explicit copies between the host's model and optimizers and a session's buffers. Nothing else moves them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..artifact.manifest import Group, Manifest
from ..errors import UserError, did_you_mean
from ..hosts import steps_made
from ..reach import hidden_parameters

Modules = nn.Module | Mapping[str, Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def several(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def host_tensors(model: Modules, loss: nn.Module | None = None) -> dict[str, Tensor]:
    """Buffer name -> the host's own tensor. Accepts a module (and a loss module), or a plain dict of named tensors."""
    if isinstance(model, nn.Module):
        found: dict[str, Tensor] = {f"param/{k}": p for k, p in model.named_parameters()}
        found |= {f"param/{k}": p for k, p in hidden_parameters(model).items()}
        found |= {f"buffer/{k}": b for k, b in model.named_buffers()}
        if loss is not None:
            found |= {f"param/loss.{k}": p for k, p in loss.named_parameters()}
            found |= {f"param/loss.{k}": p for k, p in hidden_parameters(loss).items()}
            found |= {f"buffer/loss.{k}": b for k, b in loss.named_buffers()}
        return found
    return dict(model)


def by_buffer(manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the buffers they belong to, from names as the model's state_dict or a file has them. Tied weights may come under
    any of their names."""
    found: dict[str, Tensor] = {}
    for name, t in tensors.items():
        if name.startswith(("param/", "buffer/", "state/")):
            found[name] = t
            continue
        own = manifest.aliases.get(name, name)
        buffer = f"buffer/{own}" if f"buffer/{own}" in manifest.buffers else f"param/{own}"
        if own == name or buffer not in found:
            found[buffer] = t
    return found


def check_types(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], what: str) -> None:
    """UserError that lists every tensor which has no buffer, or another shape or kind of numbers than its buffer. A file of 16
    bits may be loaded into float32, and the other way round, as by load_state_dict."""
    problems = []
    for name, t in tensors.items():
        b = buffers.get(name)
        if b is None:
            problems.append(f"{name}: not in the artifact; {did_you_mean(name, buffers)[:120]}")
        elif b.shape != t.shape or (b.dtype != t.dtype and not b.is_floating_point() & t.is_floating_point()):
            problems.append(f"{name}: found {t.dtype} {list(t.shape)}, expected {b.dtype} {list(b.shape)}")
    if problems:
        lines = "\n    ".join(problems[:20])
        raise UserError("weights-mismatch", f"the {what} does not fit the artifact:\n    {lines}",
                        fix="use the model that was compiled, or compile again")  # fmt: skip


def _known(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], transient: Sequence[str] = ()) -> dict[str, Tensor]:
    """The tensors that have a buffer. UserError unless there is one for every parameter and buffer of the artifact, `transient`
    ones apart."""
    wanted = {k for k in buffers if k.startswith(("param/", "buffer/"))} - {f"buffer/{k}" for k in transient}
    known = {k: t for k, t in tensors.items() if k in buffers}
    missing = sorted(wanted - set(known))
    if missing:
        raise UserError("weights-mismatch", "the model lacks tensors that the artifact has",
                        found=", ".join(m.split("/", 1)[1] for m in missing[:10]),
                        fix="use the model that was compiled, or compile again")  # fmt: skip
    check_types(known, buffers, "model")
    return known


def to_device(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], transient: Sequence[str] = ()) -> None:
    with torch.no_grad():
        for name, t in _known(tensors, buffers, transient).items():
            buffers[name].copy_(t)


def to_host(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Copies parameters and buffers into the host's own tensors, in place: whoever holds them sees the new values."""
    with torch.no_grad():
        for name, t in _known(tensors, buffers).items():
            t.data.copy_(buffers[name])


def step_counter(group: Group, names: Container[str]) -> str:
    """Where the steps of a group are counted. Up to format 1.0 there was one counter for all groups of an optimizer."""
    own = f"state/{group.prefix}/step"
    return own if own in names else f"state/{group.optimizer}/step"


def initial_state(manifest: Manifest) -> dict[str, float]:
    """Optimizer state that does not start at zero, by buffer."""
    return {f"state/{name}/{key}": value for g in manifest.groups for key, value in g.initial.items() for name in g.params}


def by_group(manifest: Manifest, tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint with a counter for each group, also where it was written with one for each optimizer."""
    found = dict(tensors)
    for group in manifest.groups:
        counter, old = step_counter(group, buffers), f"state/{group.optimizer}/step"
        if old in tensors and old not in buffers:
            found.pop(old, None)
            found.setdefault(counter, tensors[old])
    return found


def _groups(
    manifest: Manifest, optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[Group, torch.optim.Optimizer, dict[str, Any], list[tuple[str, Tensor]]]]:
    """Each group of the artifact beside the host's: (group, optimizer, torch's group, [(parameter name, parameter)])."""
    names = {id(t): k.removeprefix("param/") for k, t in tensors.items() if k.startswith("param/")}
    for group in manifest.groups:
        i, j = int(group.optimizer.removeprefix("opt")), int(group.prefix.split(".g")[1])
        if i >= len(optimizers) or j >= len(optimizers[i].param_groups):
            raise UserError("optimizer-mismatch", f"the artifact has optimizer group {group.prefix}, and the host has not",
                            fix="give the optimizers in the order in which they were compiled")  # fmt: skip
        kinds = [kind.__name__.lower() for kind in type(optimizers[i]).__mro__]
        if group.rule not in kinds and not (group.rule == "adamw" and "adam" in kinds):
            raise UserError("optimizer-mismatch", f"group {group.prefix} was compiled for another kind of optimizer",
                            found=type(optimizers[i]).__name__, expected=group.rule)  # fmt: skip
        host = optimizers[i].param_groups[j]
        params = [(names[id(p)], p) for p in host["params"] if names.get(id(p)) in group.params]
        yield group, optimizers[i], host, params


def optimizers_to_device(
    manifest: Manifest,
    optimizers: Sequence[torch.optim.Optimizer],
    tensors: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> None:
    groups = list(_groups(manifest, optimizers, tensors))
    # Before anything is changed: counts that differ are an error.
    steps = [_steps(group, optimizer, params, manifest, buffers) for group, optimizer, _, params in groups]
    for (group, optimizer, _, params), made in zip(groups, steps, strict=True):
        for name, p in params:
            state = optimizer.state.get(p, {})
            for key in group.state:
                target = buffers.get(f"state/{name}/{key}")
                value = state.get(key)
                if target is not None:
                    target.copy_(value) if value is not None else target.fill_(group.initial.get(key, 0))
        if step_counter(group, buffers) in buffers:
            buffers[step_counter(group, buffers)].fill_(made)


def _steps(
    group: Group,
    optimizer: torch.optim.Optimizer,
    params: Sequence[tuple[str, Tensor]],
    manifest: Manifest,
    buffers: Mapping[str, Tensor],
) -> int:
    """How many steps the host's optimizer has made with a group. Parameters without a gradient make none, there and here."""
    updated = [(n, p) for n, p in params if not group.state or any(f"state/{n}/{key}" in buffers for key in group.state)]
    states = {name: optimizer.state.get(p, {}) for name, p in updated}
    return steps_made(states, group.prefix, group.rule, f"{group.prefix}.dampening" in manifest.hyperparameters)


def optimizers_to_host(
    manifest: Manifest,
    optimizers: Sequence[torch.optim.Optimizer],
    tensors: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> None:
    """Fills torch's optimizer state as if the steps had been made there, so that host training can go on."""
    for group, optimizer, _, params in _groups(manifest, optimizers, tensors):
        steps = int(buffers[step_counter(group, buffers)])
        for name, p in params:
            known = [key for key in group.state if f"state/{name}/{key}" in buffers]
            if steps == 0 or not known:
                continue
            state = optimizer.state[p]
            for key in known:
                state[key] = buffers[f"state/{name}/{key}"].clone()
            if group.rule != "sgd":
                state["step"] = torch.tensor(float(steps))


def hyper_of(manifest: Manifest, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    """The hyperparameters as the host's optimizers hold them now: what an LR scheduler changes."""
    found: dict[str, float] = {}
    for group in manifest.groups:
        i, j = int(group.optimizer.removeprefix("opt")), int(group.prefix.split(".g")[1])
        host = optimizers[i].param_groups[j]
        values = {k: v for k, v in host.items() if k not in ("params", "betas")}
        if "betas" in host:
            values["beta1"], values["beta2"] = host["betas"]
        if values.get("momentum") and f"{group.prefix}.momentum" not in manifest.hyperparameters and "momentum" in host:
            raise UserError("hyper-unknown", f"the host's optimizer has momentum by now, and group {group.prefix} was compiled "
                            "without room for it", found=f"momentum={values['momentum']}",
                            fix="compile with keep_momentum=True, or with an optimizer that starts with momentum")  # fmt: skip
        for name in manifest.hyperparameters:
            if name.startswith(f"{group.prefix}."):
                key = name.removeprefix(f"{group.prefix}.")
                if key in values:
                    found[name] = float(values[key])
    return found
