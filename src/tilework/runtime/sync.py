"""sync: explicit copies between the host's model and optimizers and a session's buffers. Nothing else moves them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..artifact.graph import DTYPES
from ..artifact.manifest import Group, Manifest
from ..artifact.names import WEIGHTS, Buffer, Kind, is_kind
from ..errors import UserError, did_you_mean
from ..hosts import steps_made
from ..reach import hidden_parameters
from .devices import Memory

Modules = nn.Module | Mapping[str, Tensor]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def several(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def host_tensors(model: Modules, loss: nn.Module | None = None) -> dict[str, Tensor]:
    """Buffer name -> the host's own tensor. Accepts a module (and a loss module), or a plain dict of named tensors."""
    if isinstance(model, nn.Module):
        found: dict[str, Tensor] = {}
        for prefix, root in (("", model), ("loss.", loss)):
            if root is not None:
                params = {**dict(root.named_parameters()), **hidden_parameters(root)}
                found |= {Kind.PARAM.of(prefix + k): p for k, p in params.items()}
                found |= {Kind.BUFFER.of(prefix + k): b for k, b in root.named_buffers()}
        return found
    return dict(model)


def by_buffer(manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the buffers they belong to, from names as the model's state_dict or a file has them. Tied weights may come under
    any of their names."""
    found: dict[str, Tensor] = {}
    for name, t in tensors.items():
        if is_kind(name, *WEIGHTS) and "/" in name:
            found[name] = t
            continue
        own = manifest.aliases.get(name, name)
        buffer = Kind.BUFFER.of(own)
        buffer = buffer if buffer in manifest.buffers else Kind.PARAM.of(own)
        if own == name or buffer not in found:
            found[buffer] = t
    return found


class Buffers:
    """A session's buffers by name, with the manifest's types, in the device's memory. Names of buffers that this artifact has no
    use for may be filled: nothing happens."""

    def __init__(self, manifest: Manifest, memory: Memory) -> None:
        self.manifest, self._memory = manifest, memory
        self.read, self.write, self.synchronize = memory.read, memory.write, memory.synchronize
        self.buckets = memory.buckets

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.buffers

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.buffers)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.manifest.buffers[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.manifest.buffers[name].dtype]

    def fill(self, name: str, value: float) -> None:
        if name in self:
            self._memory.fill(name, value)

    def read_all(self, *kinds: Kind) -> dict[str, Tensor]:
        return {name: self.read(name) for name in self if is_kind(name, *kinds)}

    def check_types(self, tensors: Mapping[str, Tensor], what: str, among: Sequence[str] | None = None) -> None:
        """UserError that lists every tensor which has no buffer, or another shape or kind of numbers than its buffer. A file of
        16 bits may be loaded into float32, and the other way round, as by load_state_dict."""
        known = self.manifest.buffers if among is None else among
        problems = []
        for name, t in tensors.items():
            if name not in known:
                problems.append(f"{name}: not in the artifact; {did_you_mean(name, known)[:120]}")
                continue
            shape, dtype = self.shape(name), self.dtype(name)
            if shape != t.shape or (dtype != t.dtype and not (dtype.is_floating_point and t.is_floating_point())):
                problems.append(f"{name}: found {t.dtype} {list(t.shape)}, expected {dtype} {list(shape)}")
        if problems:
            lines = "\n    ".join(problems[:20])
            raise UserError("weights-mismatch", f"the {what} does not fit the artifact:\n    {lines}",
                            fix="use the model that was compiled, or compile again")  # fmt: skip

    def _known(self, tensors: Mapping[str, Tensor], transient: Sequence[str] = ()) -> dict[str, Tensor]:
        """The tensors that have a buffer. UserError unless there is one for every parameter and buffer of the artifact,
        `transient` ones apart."""
        left_out = {Kind.BUFFER.of(k) for k in transient}
        known = {k: t for k, t in tensors.items() if k in self}
        missing = sorted(b for b in self if is_kind(b, Kind.PARAM, Kind.BUFFER) and b not in known and b not in left_out)
        if missing:
            raise UserError("weights-mismatch", "the model lacks tensors that the artifact has",
                            found=", ".join(Buffer(m).name for m in missing[:10]),
                            fix="use the model that was compiled, or compile again")  # fmt: skip
        self.check_types(known, "model")
        return known

    def take(self, tensors: Mapping[str, Tensor], transient: Sequence[str] = ()) -> None:
        for name, t in self._known(tensors, transient).items():
            self.write(name, t.detach())

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies parameters and buffers into the host's own tensors, in place: whoever holds them sees the new values."""
        with torch.no_grad():
            for name, t in self._known(tensors).items():
                t.data.copy_(self.read(name))


def step_counter(group: Group) -> str:
    """Where the steps of a group are counted."""
    return Kind.STATE.of(f"{group.counter or group.prefix}/step")


def initial_state(manifest: Manifest) -> dict[str, float]:
    """Optimizer state that does not start at zero, by buffer."""
    return {
        Kind.STATE.of(f"{name}/{key}"): value for g in manifest.groups for key, value in g.initial.items() for name in g.params
    }


def by_group(manifest: Manifest, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint with a counter for each group, also where it was written with one for each optimizer."""
    found = dict(tensors)
    for group in manifest.groups:
        old = Kind.STATE.of(f"{group.optimizer}/step")
        if old in tensors:
            found.pop(old, None)
            found.setdefault(step_counter(group), tensors[old])
    return found


def _groups(
    manifest: Manifest, optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[Group, torch.optim.Optimizer, dict[str, Any], list[tuple[str, Tensor]]]]:
    """Each group of the artifact beside the host's: (group, optimizer, torch's group, [(parameter name, parameter)])."""
    names = {id(t): Buffer(k).name for k, t in tensors.items() if is_kind(k, Kind.PARAM)}
    for group in manifest.groups:
        i, j = int(group.optimizer.removeprefix("opt")), int(group.prefix.split(".g")[1])
        if i >= len(optimizers) or j >= len(optimizers[i].param_groups):
            raise UserError("optimizer-mismatch", f"the artifact has optimizer group {group.prefix}, but the host does not",
                            fix="give the optimizers in the order in which they were compiled")  # fmt: skip
        kinds = [kind.__name__.lower() for kind in type(optimizers[i]).__mro__]
        if group.rule not in kinds and not (group.rule == "adamw" and "adam" in kinds):
            raise UserError("optimizer-mismatch", f"group {group.prefix} was compiled for another kind of optimizer",
                            found=type(optimizers[i]).__name__, expected=group.rule)  # fmt: skip
        host = optimizers[i].param_groups[j]
        params = [(names[id(p)], p) for p in host["params"] if names.get(id(p)) in group.params]
        yield group, optimizers[i], host, params


def optimizers_to_device(memory: Buffers, optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    groups = list(_groups(memory.manifest, optimizers, tensors))
    # Before anything is changed: counts that differ are an error.
    steps = [_steps(group, optimizer, params, memory) for group, optimizer, _, params in groups]
    for (group, optimizer, _, params), made in zip(groups, steps, strict=True):
        for name, p in params:
            state = optimizer.state.get(p, {})
            for key in group.state:
                target, value = Kind.STATE.of(f"{name}/{key}"), state.get(key)
                if value is None:
                    memory.fill(target, group.initial.get(key, 0))
                elif target in memory:
                    memory.write(target, torch.as_tensor(value))
        memory.fill(step_counter(group), made)


def _steps(group: Group, optimizer: torch.optim.Optimizer, params: Sequence[tuple[str, Tensor]], memory: Buffers) -> int:
    """How many steps the host's optimizer has made with a group. Parameters without a gradient make none, there and here."""
    updated = [(n, p) for n, p in params if not group.state or _kept(group, n, memory)]
    states = {name: optimizer.state.get(p, {}) for name, p in updated}
    return steps_made(states, group.prefix, group.rule, f"{group.prefix}.dampening" in memory.manifest.hyperparameters)


def _kept(group: Group, parameter: str, memory: Buffers) -> dict[str, str]:
    """The parts of a parameter's state that the session keeps."""
    found = {key: Kind.STATE.of(f"{parameter}/{key}") for key in group.state}
    return {key: buffer for key, buffer in found.items() if buffer in memory}


def optimizers_to_host(memory: Buffers, optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Fills torch's optimizer state as if the steps had been made there, so that host training can go on."""
    for group, optimizer, _, params in _groups(memory.manifest, optimizers, tensors):
        steps = int(memory.read(step_counter(group)))
        for name, p in params:
            known = _kept(group, name, memory)
            if steps == 0 or not known:
                continue
            state = optimizer.state[p]
            for key, buffer in known.items():
                state[key] = memory.read(buffer)
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
            raise UserError("hyper-unknown", f"the host's optimizer now has momentum, but group {group.prefix} was compiled "
                            "without room for it", found=f"momentum={values['momentum']}",
                            fix="compile with keep_momentum=True, or with an optimizer that starts with momentum")  # fmt: skip
        for name in manifest.hyperparameters:
            if name.startswith(f"{group.prefix}."):
                key = name.removeprefix(f"{group.prefix}.")
                if key in values:
                    found[name] = float(values[key])
    return found
