"""Tensors on the device, by identity and by name: what moves between host and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tilework
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
        self._aux: dict[str, Tensor] = {}

    def _traced_runner(self) -> Runner:
        if self.runner is None:
            raise tilework.UserError("sambaflow-order", "nothing is traced yet, so nothing can run",
                                     fix="call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) first")  # fmt: skip
        return self.runner

    def to_cpu(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        """Device to host: parameters, buffers, and optimizer state where optimizers are given."""
        self._traced_runner().core.to_host(self._model(model), optimizers)

    def to_rdu(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        """Host to device."""
        self._traced_runner().core.to_device(self._model(model), optimizers)

    def to_device(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        runner = self._traced_runner()
        runner.core.to_device(self._model(model), optimizers if optimizers is not None else runner.optimizers or None)

    def _model(self, model: Any) -> nn.Module:
        found = model if isinstance(model, nn.Module) else self.model
        assert found is not None
        return found

    def _buffer_of(self, tensor: Any) -> str | None:
        """The engine's name for a tensor of the app: a parameter or buffer by identity, anything else by its sn_name."""
        if self.runner is None:
            return None
        buffers = self.runner.core.buffers
        if self.model is not None:
            for kind, named in (("param", self.model.named_parameters()), ("buffer", self.model.named_buffers())):
                for path, t in named:
                    if t is tensor:
                        return f"{kind}/{path}"
        return self._buffer_named(getattr(tensor, "sn_name", None), buffers)

    def _buffer_named(self, name: str | None, buffers: Mapping[str, Tensor]) -> str | None:
        if name is None:
            return None
        if self.model is not None:
            for path, p in self.model.named_parameters():
                if getattr(p, "sn_name", None) == name:
                    return f"param/{path}"
        notes = self.runner.manifest.metadata.get(METADATA, {}).get("inputs", []) if self.runner else []
        if self.runner is not None and name in notes:
            return f"input/{self.runner.manifest.inputs[notes.index(name)].name}"
        return next((b for kind in ("param", "buffer", "input", "output") if (b := f"{kind}/{name}") in buffers), None)

    def device_gradient(self, tensor: Any) -> Tensor | None:
        name = self._buffer_of(tensor)
        if name is None or self.runner is None:
            return None
        grad = f"grad/{name.removeprefix('param/')}"
        if grad not in self.runner.core.buffers or not self.runner.core.has_gradients:
            return None
        return self.runner.core.buffers[grad].clone()

    def device_value(self, tensor: Any) -> Tensor:
        name = self._buffer_of(tensor)
        if name is None or self.runner is None or name not in self.runner.core.buffers:
            raise tilework.UserError("sambaflow-name", "the device has no copy of this tensor",
                                     found=str(getattr(tensor, "sn_name", None)),
                                     fix="it must be a parameter, buffer or input of the traced model")  # fmt: skip
        return self.runner.core.buffers[name].clone()

    def set_device_value(self, tensor: Any, value: Tensor) -> None:
        name = self._buffer_of(tensor)
        self.device_value(tensor)  # raises where there is none
        assert self.runner is not None and name is not None
        self.runner.core.buffers[name].copy_(value)

    def pull(self, tensor: Any) -> None:
        name = self._buffer_of(tensor)
        if name is not None and self.runner is not None and name.startswith(("param/", "buffer/")):
            with torch.no_grad():
                to_torch(tensor).data.copy_(self.runner.core.buffers[name])

    def push(self, tensor: Any) -> None:
        name = self._buffer_of(tensor)
        if name is not None and self.runner is not None and name in self.runner.core.buffers:
            self.runner.core.buffers[name].copy_(to_torch(tensor).detach())

    def get_tensors(self, output_tensors: Any) -> list[SambaTensor]:
        wanted = output_tensors if isinstance(output_tensors, (list, tuple)) else [output_tensors]
        return self.get_tensors_by_name([t.sn_name for t in wanted])

    def get_tensors_by_name(self, names: Sequence[str] | str) -> list[SambaTensor]:
        """Device values by sn_name, by the names of inputs and outputs, or by the path of a parameter."""
        runner, found = self._traced_runner(), []
        for name in [names] if isinstance(names, str) else names:
            buffer = self._buffer_named(name, runner.core.buffers)
            if buffer is None and name in self._aux:
                found.append(SambaTensor(self._aux[name], name=name))
                continue
            if buffer is None:
                known = list(self.tensor_dict)
                raise tilework.UserError(
                    "sambaflow-name", f"no tensor {name!r} on the device", expected=did_you_mean(name, known)
                )
            found.append(SambaTensor(runner.core.buffers[buffer].clone(), name=name))
        return found

    @property
    def tensor_dict(self) -> dict[str, SambaTensor]:
        """Everything on the device by name."""
        runner, model = self._traced_runner(), self.model
        names = {p: getattr(t, "sn_name", None) or p for p, t in model.named_parameters()} if model is not None else {}
        found = {}
        for buffer, tensor in runner.core.buffers.items():
            kind, _, path = buffer.partition("/")
            if kind in ("param", "buffer", "input", "output"):
                found[names.get(path, path)] = SambaTensor(tensor.clone(), name=names.get(path, path))
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
        grads = {k.removeprefix("grad/"): t.clone() for k, t in runner.core.buffers.items() if k.startswith("grad/")}
        return {"inputs": leaves(as_call(self._inputs)), "outputs": list(self.output_dict.values()), "grads": grads,
                "params": dict(self.model.named_parameters()) if self.model is not None else {}}  # fmt: skip

    @property
    def ctx(self) -> DeviceTensors:
        return self

    def set_tensors(self, values: Mapping[str, np.ndarray]) -> None:
        runner = self._traced_runner()
        for name, value in values.items():
            buffer = self._buffer_named(name, runner.core.buffers)
            if buffer is None:
                raise tilework.UserError("sambaflow-name", f"no tensor {name!r} on the device",
                                         expected=did_you_mean(name, list(self.tensor_dict)))  # fmt: skip
            runner.core.buffers[buffer].copy_(torch.as_tensor(value))
