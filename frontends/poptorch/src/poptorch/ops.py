"""Operators of the interface, with what torch has. Those that only place or schedule something return what they are given."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tilework

from .enums import MatMulSerializationMode, OverlapMode
from .errors import ArgumentError, Error, WrongValue
from .losses import watching

_custom: dict[tuple[str, str], Callable[..., Any]] = {}


def isRunningOnIpu() -> bool:
    """True while a wrapped model's forward is traced."""
    return watching() is not None


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """False: programs then use what works without a chip."""
    return False


def ipuHardwareVersion() -> int:
    return 2


def recomputationCheckpoint(*tensors: Any) -> Any:
    """These values are kept for the backward pass, and what lies between them is computed again there."""
    given = tensors[0] if len(tensors) == 1 else tensors
    leaves = given if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(t, Tensor) for t in leaves):
        raise WrongValue("poptorch-argument", "poptorch.recomputationCheckpoint takes tensors",
                         found=", ".join(type(t).__name__ for t in leaves))  # fmt: skip
    if not isRunningOnIpu():
        return given
    marked = [tilework.recompute_from(t) if t.is_floating_point() else t for t in leaves]
    return type(given)(marked) if isinstance(given, (list, tuple)) else marked[0]


def nop(tensor: Tensor) -> Tensor:
    return tensor.clone()


def ipu_print_tensor(tensor: Tensor, title: str = "", *args: Any, **kwargs: Any) -> Tensor:
    """The tensor, unprinted: nothing is printed inside native code. Return it from forward to see it."""
    return tensor


def name_scope(name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class NameScope:
    """Names in a graph's picture. It has no effect here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> NameScope:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Attribute(contextlib.AbstractContextManager[None]):
    """Hints for the original's back end. They have no effect here."""

    def __init__(self, **attributes: Any) -> None:
        self.attributes = attributes

    def __exit__(self, *_: object) -> None:
        pass


def serializedMatMul(lhs: Tensor, rhs: Tensor, mode: Any, factor: int = 0, keep_precision: bool = False) -> Tensor:
    """lhs @ rhs. How it would be cut is checked."""
    if not isinstance(mode, MatMulSerializationMode):
        raise ArgumentError(
            "poptorch-argument", "serializedMatMul: the mode", found=repr(mode), expected="poptorch.MatMulSerializationMode"
        )
    if mode != MatMulSerializationMode.Disabled and factor:
        size = {MatMulSerializationMode.InputChannels: lhs.shape[-2], MatMulSerializationMode.ReducingDim: lhs.shape[-1],
                MatMulSerializationMode.OutputChannels: rhs.shape[-1]}[mode]  # fmt: skip
        if size % factor:
            raise ArgumentError(
                "poptorch-argument", f"Invalid serialization factor {factor} for {mode.name} of size {size}: it must divide it"
            )
    return torch.matmul(lhs, rhs)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    return tensor


setAvailableMemory = set_available_memory


def set_overlap_for_input(value: Any, mode: OverlapMode) -> Any:
    return value


def set_overlap_for_output(value: Any, mode: OverlapMode) -> Any:
    return value


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int = 1) -> Tensor:
    """`size` elements along `dim`, from a position that is a tensor, every `step`-th."""
    _whole(start)
    index = start.reshape(()).long() + torch.arange(0, size, step)
    return tensor.index_select(dim, index)


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """The tensor with `src` in place of what dynamic_slice would give."""
    _whole(start)
    if src.shape[dim] != size:
        raise WrongValue(
            "poptorch-argument", "dynamic_update: the size is not that of the source", found=f"{src.shape[dim]} and {size}"
        )
    return input.index_copy(dim, start.reshape(()).long() + torch.arange(size), src.to(input.dtype))


def _whole(start: Any) -> None:
    if not isinstance(start, Tensor) or start.is_floating_point():
        raise WrongValue("poptorch-argument", "the start is a tensor of whole numbers", found=repr(start))


def for_loop(count: int, body: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """body(*inputs) `count` times, each time on what it returned. The count is fixed, so the loop is written out."""
    if not isinstance(inputs, list):
        raise WrongValue(
            "poptorch-loop", "poptorch.for_loop expects input tensors as a list of tensors", found=type(inputs).__name__
        )
    if not all(isinstance(t, Tensor) for t in inputs):
        raise WrongValue(
            "poptorch-loop", "poptorch.for_loop expects a list of tensors", found=", ".join(type(t).__name__ for t in inputs)
        )
    values: list[Tensor] = [t.clone() for t in inputs]
    for _ in range(count):
        result = body(*values)
        new = list(result) if isinstance(result, (list, tuple)) else [result]
        if [t.shape for t in new] != [t.shape for t in values]:
            raise WrongValue(
                "poptorch-loop",
                "the body of poptorch.for_loop must return as many tensors of the same shapes as it takes",
                found=str([tuple(t.shape) for t in new]),
                expected=str([tuple(t.shape) for t in values]),
            )
        values = new
    _inference_only(values, "for_loop")
    return values


def cond(condition: Tensor, then_body: Callable[..., Any], then_inputs: Sequence[Tensor], else_body: Callable[..., Any],
         else_inputs: Sequence[Tensor]) -> list[Tensor]:  # fmt: skip
    """One of two results, by a tensor. Both are computed."""
    found = [r if isinstance(r, (list, tuple)) else [r] for r in (then_body(*then_inputs), else_body(*else_inputs))]
    if [t.shape for t in found[0]] != [t.shape for t in found[1]]:
        raise WrongValue("poptorch-loop", "both bodies of poptorch.cond must return tensors of the same shapes")
    chosen = [torch.where(condition.reshape(()).bool(), a, b) for a, b in zip(*found, strict=True)]
    _inference_only(chosen, "cond")
    return chosen


def _inference_only(values: Sequence[Tensor], what: str) -> None:
    now = watching()
    if now is not None and now.training and any(t.requires_grad for t in values):
        raise Error(
            "poptorch-loop", f"poptorch.{what} is only supported in inference models", fix=f"without {what}, write it in Python"
        )


def custom_op(inputs: Sequence[Tensor], name: str, domain: str, domain_version: int, example_outputs: Sequence[Tensor],
              attributes: dict[str, Any] | None = None) -> list[Tensor]:  # fmt: skip
    """An operator that register_custom_op has given a Python function; those written in C++ for the chip are refused."""
    _check_attributes(attributes or {})
    function = _custom.get((domain, name))
    if function is None:
        raise Error("poptorch-custom-op", f"custom_op: {domain}.{name} is an operator of the chip, and there is no Python "
                                          f"function for it",
                    fix=f"poptorch.register_custom_op({name!r}, {domain!r}, function), with torch operators inside")  # fmt: skip
    result = function(*inputs, **(attributes or {}))
    return list(result) if isinstance(result, (list, tuple)) else [result]


def register_custom_op(name: str, domain: str, function: Callable[..., Any]) -> None:
    """function(*inputs, **attributes) -> a tensor or several: what custom_op computes here. Not part of PopTorch."""
    _custom[domain, name] = function


def _check_attributes(attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise WrongValue("poptorch-custom-op", "the names of attributes are texts", found=repr(key))
        values = value if isinstance(value, (list, tuple)) else [value]
        kinds = {type(v) for v in values}
        if len(kinds) != 1 or not kinds <= {float, int, str}:
            raise WrongValue(
                "poptorch-custom-op", f"attribute {key!r}", found=repr(value), expected="float, int or str, or a list of one kind"
            )
        if any(isinstance(t, str) and not t.isascii() for t in (key, *values)):
            raise WrongValue("poptorch-custom-op", f"attribute {key!r} has characters that are not ASCII")


class CPU:
    """An operator that would run on the host. Here everything does, so it is called as part of the model."""

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self.layer, self.ID = layer_to_call, ID

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.layer(*inputs, **kwargs)


class MultiConv(contextlib.AbstractContextManager["MultiConv"]):
    """Convolutions that would be planned together. Their plans are recorded; they have no effect here."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def __exit__(self, *_: object) -> None:
        pass

    def _kept(self, name: str, value: Any) -> MultiConv:
        self.settings[name] = value
        return self

    def availableMemoryProportions(self, value: Any) -> MultiConv:
        return self._kept("available_memory_proportions", value)

    def partialsTypes(self, value: Any) -> MultiConv:
        kinds = value if isinstance(value, (list, tuple)) else [value]
        if not all(k in (torch.half, torch.float) for k in kinds):
            raise WrongValue("poptorch-argument", "MultiConv: partials are torch.half or torch.float", found=repr(value))
        return self._kept("partials_types", value)

    def planType(self, value: Any) -> MultiConv:
        return self._kept("plan_type", value)

    def perConvReservedTiles(self, value: int) -> MultiConv:
        return self._kept("per_conv_reserved_tiles", value)

    def cycleBackOff(self, value: float) -> MultiConv:
        return self._kept("cycle_back_off", value)

    def enableConvDithering(self, value: Any) -> MultiConv:
        return self._kept("enable_conv_dithering", value)


def fps(src: Tensor, ptr: Sequence[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Farthest points of each cloud: positions of points, each as far as possible from those before it."""
    if random_start:
        raise Error(
            "poptorch-refused", "fps(random_start=True) is not here", fix="random_start=False begins with the first point"
        )
    found = []
    for first, last in itertools.pairwise(ptr):
        points = src[first:last]
        chosen = torch.zeros(1, dtype=torch.long)
        nearest = (points - points[0]).square().sum(-1)
        for _ in range(int(ratio * (last - first) + 0.999999) - 1):
            new = nearest.argmax().reshape(1)
            chosen = torch.cat([chosen, new])
            nearest = torch.minimum(nearest, (points - points.index_select(0, new)).square().sum(-1))
        found.append(chosen + first)
    return torch.cat(found)


def nearest(x: Tensor, y: Tensor, batch_x: Any = None, batch_y: Any = None) -> Tensor:
    """For each point of x the position of the nearest in y."""
    distance = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)
    if batch_x is not None and batch_y is not None:
        apart = torch.as_tensor(batch_x).unsqueeze(1) != torch.as_tensor(batch_y).unsqueeze(0)
        distance = distance.masked_fill(apart, float("inf"))
    return distance.argmin(1)


def ctc_beam_search_decoder(*args: Any, **kwargs: Any) -> Any:
    raise Error(
        "poptorch-refused",
        "ctc_beam_search_decoder: torch has no such decoder to compile",
        fix="return the probabilities and decode on the host (torchaudio.models.decoder)",
    )


class CTCBeamSearchDecoder(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ctc_beam_search_decoder()
