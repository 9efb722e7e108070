"""Models and tensors into SambaFlow's form: in place, and without losing anybody's hold on a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import oldmodel
from .lenient import make_lenient, while_capturing
from .pickling import register
from .sambatensor import SambaParameter, SambaTensor, from_torch_tensor, to_torch


def from_torch_model_(model: nn.Module, parent_module_prefix: str | None = None) -> nn.Module:
    """Names every module and parameter (`linear__weight` below the lower-cased class name of the root). In place; the model
    stays an ordinary torch model on the host."""
    root = parent_module_prefix or type(model).__name__.lower()
    for path, module in model.named_modules():
        if not hasattr(module, "name"):
            module.name = _joined(root, path)
    for path, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter:
            parameter.__class__ = SambaParameter
        parameter.sn_name = _joined(root, path)  # type: ignore[attr-defined]
    for method in (oldmodel.run, oldmodel.write_host_params):
        if not hasattr(model, method.__name__):
            setattr(model, method.__name__, method)
    make_lenient(model)
    register(model)
    return model


def _joined(root: str, path: str) -> str:
    return "__".join([root, *path.split(".")]) if path else root


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """The model's tensors as torch knows them, while it is captured: parameters, buffers and constants that modules hold as
    attributes. The objects stay the same."""
    converted = list({id(t): t for t in _held(model) if type(t) in _PLAIN}.values())
    kinds = [type(t) for t in converted]
    for t in converted:
        t.__class__ = _PLAIN[type(t)]  # type: ignore[assignment]
    try:
        with while_capturing():
            yield
    finally:
        for t, kind in zip(converted, kinds, strict=True):
            t.__class__ = kind


_PLAIN: dict[type, type] = {SambaParameter: nn.Parameter, SambaTensor: Tensor}


def _held(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    for module in model.modules():
        yield from (t for t in tree_leaves([vars(module), module._buffers]) if isinstance(t, Tensor))


def from_torch(value: Any, name: str | None = None, batch_dim: int | None = None) -> Any:
    """Old name for tensors; walks through dicts, lists and tuples."""
    if isinstance(value, Mapping):
        return {k: from_torch(v, k if name is None else name, batch_dim) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(from_torch(v, name, batch_dim) for v in value)
    return from_torch_tensor(value, name, batch_dim) if isinstance(value, Tensor) else value


def from_named_dict(tensors: Mapping[str, Tensor]) -> dict[str, SambaTensor]:
    return {name: from_torch_tensor(tensor, name) for name, tensor in tensors.items()}


def _named(tensor: Tensor, name: str | None, batch_dim: int | None, named_dims: Any) -> SambaTensor:
    made = from_torch_tensor(tensor, name, batch_dim)
    made.named_dims = named_dims
    return made


def randn(*sizes: Any, name: str | None = None, batch_dim: int | None = None, named_dims: Any = None, **rest: Any) -> SambaTensor:
    return _named(torch.randn(*sizes, **rest), name, batch_dim, named_dims)


def rand(*sizes: Any, name: str | None = None, batch_dim: int | None = None, named_dims: Any = None, **rest: Any) -> SambaTensor:
    return _named(torch.rand(*sizes, **rest), name, batch_dim, named_dims)


def randint(
    *args: Any, name: str | None = None, batch_dim: int | None = None, named_dims: Any = None, **rest: Any
) -> SambaTensor:
    """(high, size) or (low, high, size)."""
    return _named(torch.randint(*args, **rest), name, batch_dim, named_dims)


def randn_like(tensor: Tensor, name: str | None = None, batch_dim: int | None = None, **rest: Any) -> SambaTensor:
    named = tensor if isinstance(tensor, SambaTensor) else None
    return _named(torch.randn_like(to_torch(tensor), **rest), name or (named.sn_name if named is not None else None),
                  batch_dim if batch_dim is not None else (named.batch_dim if named is not None else None), None)  # fmt: skip
