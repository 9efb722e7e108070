"""A program's launch plan, read from the artifact and made ready: every kernel and every call of torch's library in its order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...artifact.graph import DTYPES, MEMORY_FORMATS
from ...errors import UserError
from ...gpu import Kernel, Module
from ..devices.reference import allowed_operators

_DTYPES = {**DTYPES, "uint64": torch.uint64}  # random state of fused attention


def read_plan(text: bytes, path: Any) -> dict[str, Any]:
    try:
        plan = json.loads(text)
        assert isinstance(plan, dict) and isinstance(plan["steps"], list)
    except (ValueError, KeyError, AssertionError) as e:
        raise UserError("artifact-manifest", f"{path}: a launch plan is damaged", fix="compile again") from e
    return plan


class Plan:
    """Where it reads and writes is fixed; run() launches it all on the current stream."""

    def __init__(
        self, plan: Mapping[str, Any], buffers: Mapping[str, Tensor], temporary: Tensor, modules: Callable[[str], Module]
    ) -> None:
        self.buffers, self.temporary = buffers, temporary
        self.results: dict[str, Tensor] = {}
        self.num_calls = sum("call" in s for s in plan["steps"])
        last = _last_uses(plan["steps"])
        self.steps: list[Callable[[], None]] = []
        for at, step in enumerate(plan["steps"]):
            over = [name for name, use in last.items() if use == at]
            self.steps.append(self._kernel(step, modules) if "kernel" in step else self._call(step, over))

    def run(self) -> None:
        for step in self.steps:
            step()
        self.results.clear()

    def _kernel(self, step: Mapping[str, Any], modules: Callable[[str], Module]) -> Callable[[], None]:
        function = modules(step["member"]).function(step["kernel"], step["shared"])
        args = [(kind, value) for kind, value in step["args"]]
        if any(isinstance(v, dict) and "result" in v["tensor"] for _, v in args):  # it lies somewhere else each time

            def launch() -> None:
                made = [(k, self._address(v["tensor"]) if isinstance(v, dict) else v) for k, v in args]
                Kernel(function, step["grid"], step["threads"], step["shared"], made, name=step["kernel"]).launch()

            return launch
        fixed = [(k, self._address(v["tensor"]) if isinstance(v, dict) else v) for k, v in args]
        return Kernel(function, step["grid"], step["threads"], step["shared"], fixed, name=step["kernel"]).launch

    def _call(self, step: Mapping[str, Any], over: list[str]) -> Callable[[], None]:
        operator = _operator(step["call"])
        expected: list[tuple[str, list[int], list[int]] | None] = step["results"]
        moving = "result" in json.dumps([step["args"], step["kwargs"]])
        fixed = None if moving else (self._value(step["args"]), {k: self._value(v) for k, v in step["kwargs"].items()})

        def call() -> None:
            args, kwargs = fixed or (self._value(step["args"]), {k: self._value(v) for k, v in step["kwargs"].items()})
            made = operator(*args, **kwargs)
            for wanted, value in zip(expected, made if isinstance(made, (tuple, list)) else [made], strict=True):
                if wanted is not None:
                    self.results[wanted[0]] = _lying(value, *wanted[1:])
            for name in over:
                self.results.pop(name, None)

        return call

    # ---- tensors ----

    def _address(self, view: Mapping[str, Any]) -> int:
        size = _DTYPES[view["dtype"]].itemsize
        if "temporary" in view:
            base = self.temporary.data_ptr() + view["temporary"]
        else:
            base = self._owner(view).untyped_storage().data_ptr()
            if "buffer" in view:
                base += self._owner(view).storage_offset() * size
        return base + view["offset"] * size

    def _owner(self, view: Mapping[str, Any]) -> Tensor:
        return self.buffers[view["buffer"]] if "buffer" in view else self.results[str(view["result"])]

    def _tensor(self, view: Mapping[str, Any]) -> Tensor:
        dtype, shape, stride, offset = _DTYPES[view["dtype"]], view["shape"], view["stride"], view["offset"]
        if "temporary" in view:
            found = self.temporary[view["temporary"] :]
            found = found[: len(found) // dtype.itemsize * dtype.itemsize].view(dtype)
            return found.as_strided(shape, stride, found.storage_offset() + offset)
        owner = self._owner(view)
        if owner.dtype == torch.uint64:
            return owner
        begin = owner.storage_offset() if "buffer" in view else 0
        if dtype != owner.dtype:  # complex numbers as pairs of real ones, or the other way round
            first = begin * owner.itemsize // dtype.itemsize + offset
            return torch.empty(0, dtype=dtype, device=owner.device).set_(owner.untyped_storage(), first, shape, stride)
        return owner.as_strided(shape, stride, begin + offset)

    def _value(self, v: Any) -> Any:
        if isinstance(v, list):
            return [self._value(x) for x in v]
        if not isinstance(v, dict):
            return v
        kind, inner = next(iter(v.items()))
        if kind == "tensor":
            return self._tensor(inner)
        if kind == "dtype":
            return _DTYPES[inner]
        if kind == "device":
            return self.temporary.device
        if kind == "memory_format":
            return MEMORY_FORMATS[inner]
        if kind == "float":
            return float(inner)
        if kind == "layout":
            return torch.strided
        raise UserError("artifact-manifest", f"a launch plan has an argument of an unknown kind: {kind}", fix="compile again")


def _lying(value: Tensor, shape: list[int], stride: list[int]) -> Tensor:
    """As the kernels that follow read it. Libraries may lay out a result otherwise than they did where the code was made."""
    if list(value.stride()) == stride or value.numel() == 0 or value.dtype == torch.uint64:
        return value
    if all(n == 1 or a == b for n, a, b in zip(shape, value.stride(), stride, strict=True)):
        return value
    return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _last_uses(steps: list[Mapping[str, Any]]) -> dict[str, int]:
    """Result -> the last step that touches it."""
    found: dict[str, int] = {}

    def look(value: Any, at: int) -> None:
        if isinstance(value, dict):
            if "result" in value:
                found[str(value["result"])] = at
            for v in value.values():
                look(v, at)
        elif isinstance(value, list):
            for v in value:
                look(v, at)

    for at, step in enumerate(steps):
        for result in step.get("results", ()):
            if result is not None:
                found[result[0]] = at
        look([step["args"], step.get("kwargs", {})], at)
    # A kernel does not let go of anything: the next call does.
    calls = [at for at, step in enumerate(steps) if "call" in step]
    return {name: next((c for c in calls if c >= at), len(steps)) for name, at in found.items()}


def _operator(name: str) -> Any:
    """A plan in an artifact is data from outside: an operator that is not known to compute tensors from tensors is refused. Those
    that write into an argument of theirs are the known ones with out=, or with the underscore."""
    parts = name.split(".")
    plain = parts[1].rstrip("_") if len(parts) == 3 else ""
    if len(parts) == 3 and {f"{parts[0]}.{parts[1]}", f"{parts[0]}.{plain}"} & (allowed_operators() | _WRITING):
        found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1], None), parts[2], None)
        if isinstance(found, torch._ops.OpOverload):
            return found
    raise UserError("graph-operator", f"the launch plan names an operator that cannot be called: {name[:80]!r}",
                    expected="one that computes tensors from tensors and does nothing else", fix="report this")  # fmt: skip


_WRITING = frozenset({"aten.zero_", "aten.fill_", "aten.copy_", "aten.copy", "aten.fill"})
