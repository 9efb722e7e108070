"""What programs may do here and plain torch refuses: operands of different floating types meet in a product or a loss, and any
integers are indices and class labels. It holds inside a converted model's forward, and wherever a SambaTensor takes part."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tilework.errors import not_the_users

not_the_users.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)

# By name, because one function has several: F.linear is torch._C._nn.linear, x @ y is Tensor.__matmul__.
_PRODUCTS = {"linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
             "convolution", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner", "addmm", "addmv",
             "addbmm", "baddbmm", "addr", "einsum", "tensordot", "chain_matmul", "multi_dot", "kl_div",
             "scaled_dot_product_attention", "multi_head_attention_forward"}  # fmt: skip
_ALONG = dict.fromkeys(
    ("gather", "index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "scatter",
     "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    ((2, "index"),),
)  # fmt: skip
_LABELS = dict.fromkeys(("cross_entropy", "nll_loss", "nll_loss_nd", "multi_margin_loss"), ((1, "target"),))
# name of a function -> its arguments that are indices: position, keyword
_INDICES: dict[str, tuple[tuple[int, str], ...]] = {
    **_ALONG,
    **_LABELS,
    "embedding": ((0, "input"), (1, "indices")),  # F.embedding(input, weight), torch.embedding(weight, indices)
    "embedding_bag": ((0, "input"), (2, "offsets")),
    "one_hot": ((0, "tensor"),),
    "take": ((1, "index"),),
    "take_along_dim": ((1, "indices"),),
    "repeat_interleave": ((1, "repeats"),),
}
_SUBSCRIPTS = ("__getitem__", "__setitem__", "index_put", "index_put_")
_READY = (torch.int64, torch.bool)
_of_thread = threading.local()  # capturing: plain tensors are wanted; modes: those that are active


def taken(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function, called with what it takes."""
    name = getattr(func, "__name__", "")
    if name in _INDICES:
        args, kwargs = _with_indices(func, name, args, kwargs)
    elif name in _SUBSCRIPTS and len(args) > 1:
        # uint8 stays what it is for torch, a mask
        small = functools.partial(_long_where, (torch.int8, torch.int16))
        args = (args[0], tree_map_only(Tensor, small, args[1]), *args[2:])
    if name in _PRODUCTS or "cross_entropy" in name or name.endswith("_loss"):
        args, kwargs = _widened(args, kwargs)
    return func(*args, **kwargs)


def _long_where(dtypes: tuple[torch.dtype, ...], t: Tensor) -> Tensor:
    return t.long() if t.dtype in dtypes else t


def _with_indices(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = list(args)
    for place, key in _INDICES[name]:
        value = given[place] if place < len(given) else kwargs.get(key)
        if not isinstance(value, Tensor) or value.dtype in _READY or not _is_index(func, name, place, value, args):
            continue
        if place < len(given):
            given[place] = value.long()
        else:
            kwargs = {**kwargs, key: value.long()}
    return tuple(given), kwargs


def _is_index(func: Any, name: str, place: int, value: Tensor, args: tuple[Any, ...]) -> bool:
    """Floats too are class numbers and tokens, where they can be nothing else: probabilities have a dimension more."""
    if not value.is_floating_point():
        return not value.is_complex()
    if name == "embedding":
        return func is F.embedding and place == 0
    if name in _LABELS:
        return bool(args) and isinstance(args[0], Tensor) and value.dim() == args[0].dim() - 1
    return True


def _widened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Floating tensors, also those in lists, in the widest type among them."""
    found: set[torch.dtype] = set()
    tree_map_only(Tensor, lambda t: found.add(t.dtype) if t.is_floating_point() else None, (args, kwargs))
    if len(found) < 2:
        return args, kwargs
    widest = functools.reduce(torch.promote_types, found)
    made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
        Tensor, lambda t: t.to(widest) if t.is_floating_point() else t, (args, kwargs)
    )
    return made


class _Lenient(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if capturing():
            args, kwargs = tree_map_only(Tensor, _unwrapped, (args, kwargs or {}))
        return taken(func, args, kwargs or {})


def _unwrapped(t: Tensor) -> Tensor:
    """A SambaTensor that was found nowhere in the model, as a plain tensor: the same one each time, because it is a constant."""
    from .sambatensor import SambaTensor, to_torch

    if type(t) is not SambaTensor:
        return t
    kept: dict[str, Any] = t.__dict__
    if "_plain" not in kept:
        kept["_plain"] = to_torch(t)
    return kept["_plain"]  # type: ignore[no-any-return]


# ---- around a converted model's forward ----


def capturing() -> bool:
    return getattr(_of_thread, "capturing", 0) > 0


@contextmanager
def while_capturing() -> Iterator[None]:
    """In here a converted model takes and gives plain tensors. This thread only. Lenient all the way, since a backward pass may
    run parts of the model again (checkpoints)."""
    _of_thread.capturing = getattr(_of_thread, "capturing", 0) + 1
    try:
        with _Lenient():
            yield
    finally:
        _of_thread.capturing -= 1


def make_lenient(model: nn.Module) -> None:
    """In place, once. With hooks, which are plain functions: a model that was pickled is still lenient when it is back."""
    if before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(before_forward)
        model.register_forward_hook(after_forward, always_call=True)


def before_forward(model: nn.Module, args: Any) -> None:
    mode = _Lenient()
    mode.__enter__()
    _of_thread.modes = [*getattr(_of_thread, "modes", ()), mode]


def after_forward(model: nn.Module, args: Any, output: Any) -> Any:
    """What a converted model returns are SambaTensors, whatever it was given. None: it stays as it is."""
    _of_thread.modes, mode = _of_thread.modes[:-1], _of_thread.modes[-1]
    mode.__exit__(None, None, None)
    return None if capturing() or torch.compiler.is_compiling() else tree_map_only(Tensor, _wrapped, output)


def _wrapped(t: Tensor) -> Tensor:
    from .sambatensor import SambaTensor

    return t.as_subclass(SambaTensor) if type(t) is Tensor else t
