"""Tensors on the device, by identity and by name: what moves between host and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tilework
from tilework.artifact.names import Buffer, Kind, is_kind
from tilework.errors import did_you_mean

from .compiling import METADATA, as_call, leaves
from .running import Runner
from .sambatensor import SambaTensor, to_torch


class DeviceTensors:
    """The part of the session that knows the device's tensors."""

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.model: nn.Module | None = None
        self._inputs: Any = ()
        self._runners: dict[int, Runner] = {}  # id of a model -> what was traced for it
        self._aux: dict[str, Tensor] = {}

    def _traced_runner(self) -> Runner:
        if self.runner is None:
            raise tilework.UserError("sambaflow-order", "nothing is traced yet, so nothing can run",
                                     fix="call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) first")  # fmt: skip
        return self.runner

    def to_cpu(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        """Device to host: parameters, buffers, and optimizer state where optimizers are given."""
        runner = self._runner_of(model)
        runner.core.to_host(runner.model, optimizers)
        runner.in_sync()

    def to_rdu(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        """Host to device."""
        runner = self._runner_of(model)
        runner.core.to_device(runner.model, optimizers)
        runner.in_sync()

    def to_device(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        runner = self._runner_of(model)
        runner.core.to_device(runner.model, optimizers if optimizers is not None else runner.optimizers or None)
        runner.in_sync()

    def _runner_of(self, model: Any) -> Runner:
        """What was traced for a model; the latest where none is named."""
        if not isinstance(model, nn.Module):
            return self._traced_runner()
        found = self._runners.get(id(model))
        if found is None and self._runners:
            raise tilework.UserError("sambaflow-order", f"this {type(model).__name__} is not traced",
                                     found="traced: " + ", ".join(type(r.model).__name__ for r in self._runners.values()),
                                     fix="call samba.utils.trace_graph with it first")  # fmt: skip
        return found or self._traced_runner()

    def _all_runners(self) -> list[Runner]:
        """The latest first."""
        return sorted(self._runners.values(), key=lambda r: r is not self.runner)

    def _find(self, tensor: Any) -> tuple[Runner, str] | None:
        """Where the device has a tensor of the app: a parameter or buffer by identity, anything else by its sn_name."""
        for runner in self._all_runners():
            for kind, named in (("param", runner.model.named_parameters()), ("buffer", runner.model.named_buffers())):
                for path, t in named:
                    if t is tensor and f"{kind}/{path}" in runner.core.memory:
                        return runner, f"{kind}/{path}"
        owner = getattr(tensor, "_owner", None)
        return self._find_named(getattr(tensor, "sn_name", None), [owner] if owner is not None else None)

    def _find_named(self, name: str | None, among: Sequence[Runner] | None = None) -> tuple[Runner, str] | None:
        for runner in among or self._all_runners() if name is not None else ():
            buffers, notes = runner.core.memory, runner.manifest.metadata.get(METADATA, {}).get("inputs", [])
            for path, p in runner.model.named_parameters():
                if getattr(p, "sn_name", None) == name and f"param/{path}" in buffers:
                    return runner, f"param/{path}"
            if name in notes:
                return runner, f"input/{runner.signature.inputs[notes.index(name)].name}"
            for kind in ("param", "buffer", "input", "output", "infer"):
                if f"{kind}/{name}" in buffers:
                    return runner, f"{kind}/{name}"
        return None

    def _value(self, runner: Runner, buffer: str) -> Tensor:
        """A copy of what the device has. Outputs are those of the last run, whatever its batch size was."""
        kind, _, name = buffer.partition("/")
        if kind in ("output", "infer"):
            for output in runner.outputs:
                if output.sn_name == name:
                    return to_torch(output).clone()
        return runner.core.memory.read(buffer)

    def device_gradient(self, tensor: Any) -> Tensor | None:
        found = self._find(tensor)
        if found is None:
            return None
        core, grad = found[0].newest.core, Kind.GRAD.of(Buffer(found[1]).name)
        return core.memory.read(grad) if grad in core.kept_gradients else None

    def device_value(self, tensor: Any) -> Tensor:
        found = self._find(tensor)
        if found is None:
            raise tilework.UserError("sambaflow-name", "the device has no copy of this tensor",
                                     found=str(getattr(tensor, "sn_name", None)),
                                     fix="it must be a parameter, buffer or input of the traced model")  # fmt: skip
        return self._value(*found)

    def set_device_value(self, tensor: Any, value: Tensor) -> None:
        self.device_value(tensor)  # raises where there is none
        found = self._find(tensor)
        assert found is not None
        found[0].core.memory.write(found[1], value)

    def pull(self, tensor: Any) -> None:
        found = self._find(tensor)
        if found is None or is_kind(found[1], Kind.INPUT):
            return
        value, target = self._value(*found), to_torch(tensor).data
        if target.shape == value.shape:
            with torch.no_grad():
                target.copy_(value)

    def push(self, tensor: Any) -> None:
        found = self._find(tensor)
        if found is not None:
            found[0].core.memory.write(found[1], to_torch(tensor).detach())

    def get_tensors(self, output_tensors: Any) -> list[SambaTensor]:
        wanted = output_tensors if isinstance(output_tensors, (list, tuple)) else [output_tensors]
        return [SambaTensor(self.device_value(t), name=t.sn_name) for t in wanted]

    def get_tensors_by_name(self, names: Sequence[str] | str) -> list[SambaTensor]:
        """Device values by sn_name, by the names of inputs and outputs, or by the path of a parameter."""
        self._traced_runner()
        made = []
        for name in [names] if isinstance(names, str) else names:
            found = self._find_named(name)
            if found is None and name in self._aux:
                made.append(SambaTensor(self._aux[name], name=name))
                continue
            if found is None:
                raise self._no_such(name)
            made.append(SambaTensor(self._value(*found), name=name))
        return made

    def _no_such(self, name: str) -> Exception:
        known = did_you_mean(name, list(self.tensor_dict))
        return tilework.UserError("sambaflow-name", f"no tensor {name!r} on the device", expected=known)

    @property
    def tensor_dict(self) -> dict[str, SambaTensor]:
        """Everything on the device by name."""
        runner, model = self._traced_runner(), self.model
        names = {p: getattr(t, "sn_name", None) or p for p, t in model.named_parameters()} if model is not None else {}
        found = {}
        for buffer, tensor in runner.core.memory.read_all(Kind.PARAM, Kind.BUFFER, Kind.INPUT, Kind.OUTPUT).items():
            path = Buffer(buffer).name
            found[names.get(path, path)] = SambaTensor(tensor, name=names.get(path, path))
        return found

    @property
    def buffer_dict(self) -> dict[str, SambaTensor]:
        model = self.model
        return {} if model is None else {k: SambaTensor(b, name=k) for k, b in model.named_buffers()}

    @property
    def output_dict(self) -> dict[str, SambaTensor]:
        return {str(o.sn_name): o for o in getattr(self.model, "output_tensors", ())}

    @property
    def optim_dict(self) -> dict[str, Any]:
        return {f"optim{i}": o for i, o in enumerate(self.runner.optimizers)} if self.runner else {}

    def _traced_tensors(self) -> dict[str, Any]:
        runner = self._traced_runner()
        grads = {Buffer(k).name: t for k, t in runner.core.memory.read_all(Kind.GRAD).items()}
        return {"inputs": leaves(as_call(self._inputs)), "outputs": list(self.output_dict.values()), "grads": grads,
                "params": dict(self.model.named_parameters()) if self.model is not None else {}}  # fmt: skip

    @property
    def ctx(self) -> DeviceTensors:
        return self

    def set_tensors(self, values: Mapping[str, np.ndarray]) -> None:
        self._traced_runner()
        for name, value in values.items():
            found = self._find_named(name)
            if found is None:
                raise self._no_such(name)
            found[0].core.memory.write(found[1], torch.as_tensor(value))
