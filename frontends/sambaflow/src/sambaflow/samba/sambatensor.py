"""SambaTensor: a torch tensor in every respect, with a name, a batch dimension, and access to its copy on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .lenient import taken


@dataclass(frozen=True)
class DimInfo:
    """A named dimension."""

    name: str
    size: int | None = None


def _device() -> Any:
    from .sambasession import session

    return session


class _OnDevice:
    """What SambaTensor and SambaParameter share: a name in the graph, and the device's copy by that name."""

    sn_name: str | None = None
    sn_region_name: str | None = None
    batch_dim: int | None = None
    named_dims: Any = None
    sized_dims: Any = None
    host_memory: bool | None = None
    has_data: bool = True
    _own_sn_grad: Tensor | None = None
    _owner: Any = None  # of a traced output: the runner that makes it

    @property
    def name(self) -> str | None:
        return self.sn_name

    @name.setter
    def name(self, value: str | None) -> None:
        self.sn_name = value

    @property
    def sn_grad(self) -> Tensor | None:
        """The device's gradient of a parameter or an input after a run; on an output, what backward starts from."""
        if self._own_sn_grad is not None:
            return self._own_sn_grad
        found: Tensor | None = _device().device_gradient(self)
        return found

    @sn_grad.setter
    def sn_grad(self, value: Tensor | None) -> None:
        self._own_sn_grad = None if value is None else to_torch(value).detach()

    @property
    def sn_data(self) -> Tensor:
        """The device's value."""
        found: Tensor = _device().device_value(self)
        return found

    @sn_data.setter
    def sn_data(self, value: Tensor) -> None:
        _device().set_device_value(self, to_torch(value))

    def cpu(self, *_: Any, **__: Any) -> Any:
        """Device to host, for this tensor. A tensor that the device does not hold stays as it is."""
        _device().pull(self)
        return self

    def rdu(self) -> Any:
        """Host to device, for this tensor."""
        _device().push(self)
        return self

    def torch(self) -> Tensor:
        return to_torch(self)  # type: ignore[arg-type]

    torch_tensor = torch


# Conversions of a named tensor give a tensor with that name: samba.randn(...).bfloat16().float() is the same input.
_SAME_TENSOR = {
    getattr(Tensor, name)
    for name in ("bfloat16", "float", "half", "double", "int", "short", "long", "bool", "char", "byte", "to", "type", "clone",
                 "detach", "contiguous", "requires_grad_", "pin_memory", "cpu", "detach_")
}  # fmt: skip
_UNWRAPPED = torch.overrides.get_default_nowrap_functions()


class SambaTensor(_OnDevice, Tensor):
    @staticmethod
    def __new__(
        cls: type,
        torch_tensor: Tensor | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
        batch_dim: int | None = None,
        named_dims: Any = None,
        sized_dims: Any = None,
        materializer: Callable[..., Any] | None = None,
        is_complex: bool | None = None,
        region_name: str | None = None,
    ) -> SambaTensor:
        empty = torch_tensor is None
        if torch_tensor is None:
            if shape is None:
                raise ValueError("SambaTensor: give a torch tensor, or a shape (and a dtype)")
            torch_tensor = torch.zeros(tuple(shape), dtype=dtype or torch.float32)
        elif dtype is not None:
            torch_tensor = torch_tensor.to(dtype)
        made = _share(to_torch(torch_tensor))
        made.sn_name, made.batch_dim, made.named_dims, made.sized_dims = name, batch_dim, named_dims, sized_dims
        made.sn_region_name = region_name
        if empty:
            made.has_data = False
            if materializer is not None:
                fill(made, materializer)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in __new__."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = taken(func, args, kwargs or {})
        if func in _UNWRAPPED:
            return result
        if type(result) is Tensor:
            result = result.as_subclass(SambaTensor)
            if func in _SAME_TENSOR and isinstance(args[0], _OnDevice):
                _take_names(args[0], result)
        elif isinstance(result, (tuple, list)) and any(type(r) is Tensor for r in result):
            wrapped = [r.as_subclass(SambaTensor) if type(r) is Tensor else r for r in result]
            result = type(result)(wrapped) if type(result) in (tuple, list) else result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {k: v for k, v in self.__dict__.items() if not k.startswith("_")}
        return _rebuilt, (to_torch(self).detach().clone(), self.requires_grad, state)

    def __deepcopy__(self, memo: dict[int, Any]) -> SambaTensor:
        rebuild, arguments = self.__reduce_ex__(2)
        memo[id(self)] = made = rebuild(*arguments)
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SambaTensor({to_torch(self)!r}, name={self.sn_name!r})"


class SambaParameter(_OnDevice, nn.Parameter):
    """A parameter of a converted model. It is the very object that it was before: optimizers keep hold of it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type,
        data: Tensor | None = None,
        requires_grad: bool = True,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        materializer: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> SambaParameter:
        empty = data is None
        if data is None:
            data = torch.zeros(tuple(shape or ()), dtype=dtype or torch.float32)
        made = nn.Parameter(to_torch(data).detach(), requires_grad)
        made.__class__ = SambaParameter
        assert isinstance(made, SambaParameter)
        made.sn_name = name
        if empty and materializer is not None:
            fill(made, materializer)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in __new__."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {k: v for k, v in self.__dict__.items() if not k.startswith("_")}
        return _rebuilt_parameter, (self.data, self.requires_grad, state)


def _share(tensor: Tensor) -> SambaTensor:
    """A SambaTensor over the same memory. A leaf stays a leaf; the result of an operation keeps its history."""
    if tensor.is_leaf:
        made = tensor.detach().as_subclass(SambaTensor)
        if tensor.requires_grad:
            made.requires_grad_()
        return made
    return tensor.as_subclass(SambaTensor)


def _take_names(source: _OnDevice, target: _OnDevice) -> None:
    target.sn_name, target.sn_region_name, target.batch_dim = source.sn_name, source.sn_region_name, source.batch_dim
    target.named_dims, target.sized_dims, target.host_memory = source.named_dims, source.sized_dims, source.host_memory


def _rebuilt(data: Tensor, requires_grad: bool, state: dict[str, Any]) -> SambaTensor:
    made = _share(data.requires_grad_(requires_grad) if data.is_floating_point() else data)
    made.__dict__.update(state)
    return made


def _rebuilt_parameter(data: Tensor, requires_grad: bool, state: dict[str, Any]) -> SambaParameter:
    made = SambaParameter(data, requires_grad)
    made.__dict__.update(state)
    return made


def fill(tensor: Tensor, materializer: Callable[..., Any]) -> None:
    """Runs a materializer: a function that fills the tensor in place, or returns its values."""
    with torch.no_grad():
        made = materializer(tensor)
        if isinstance(made, Tensor) and made is not tensor:
            tensor.copy_(made)
    tensor.has_data = True  # type: ignore[attr-defined]


def to_torch(tensor: Any) -> Tensor:
    """The plain torch tensor: same memory, same autograd history. Plain tensors are returned as they are."""
    if type(tensor) is SambaTensor:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.as_subclass(Tensor)
    if isinstance(tensor, Tensor):
        return tensor
    return torch.as_tensor(tensor)


def from_torch_tensor(
    tensor: Tensor, name: str | None = None, batch_dim: int | None = None, named_dims: Any = None, sized_dims: Any = None
) -> SambaTensor:
    """A SambaTensor that shares the tensor's memory."""
    made = _share(to_torch(tensor))
    made.sn_name, made.batch_dim = name, batch_dim
    if named_dims is not None or sized_dims is not None:
        made.named_dims, made.sized_dims = named_dims, sized_dims
    return made
