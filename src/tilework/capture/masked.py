"""x[mask] without a shape that depends on values: the whole of x, and which rows of it count.

Losses over selected tokens and experts that see only their tokens are written this way. As long as each row is worked on by
itself and the rows come together in a sum or a mean, or go back to where they were (y[mask] = ...), the numbers are the same with
weights. Anything else raises NotMasked, and the place is refused as one whose shape depends on values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class NotMasked(Exception):
    """The rows of a masked tensor were used together in a way that needs their number."""


_SAME = {  # each element by itself
    "abs", "add", "div", "exp", "floor_divide", "log", "log1p", "log2", "mul", "neg", "pow", "relu", "rsqrt", "rsub", "sigmoid",
    "sqrt", "square", "sub", "tanh", "true_divide", "clamp", "clip", "clamp_min", "clamp_max", "clone", "contiguous", "detach",
    "double", "float", "half", "bfloat16", "int", "long", "bool", "to", "type_as", "eq", "ne", "lt", "le",
    "gt", "ge", "logical_and", "logical_or", "logical_not", "isfinite", "isnan", "maximum", "minimum", "where", "sin", "cos",
    "erf", "expm1", "reciprocal", "sign", "lerp", "masked_fill", "gelu", "silu", "elu", "leaky_relu", "softplus", "logsigmoid",
    "hardswish", "softsign", "selu", "celu", "mish", "tanhshrink",
}  # fmt: skip
_SIGNS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "eq", "ne", "lt", "le",
          "gt", "ge", "and", "or", "invert")  # fmt: skip
_SAME |= {f"__{sign}__" for sign in _SIGNS} | {"__div__", "__rdiv__"}
_ROWS = {"linear", "layer_norm", "rms_norm", "embedding"}  # each row by itself, along its last dimensions
_ALONG = {"softmax", "log_softmax", "sum", "mean", "amax", "amin", "argmax", "argmin", "logsumexp", "cumsum", "unsqueeze",
          "squeeze", "prod", "std", "var"}  # fmt: skip
_LOSSES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
           "kl_div", "soft_margin_loss"}  # fmt: skip


class Masked:
    """full: mask.shape + rest. Rows that do not count hold ones (zeros where they are whole numbers), which harm no function."""

    def __init__(self, values: Tensor, mask: Tensor) -> None:
        if mask.dim() > values.dim() or values.shape[: mask.dim()] != mask.shape or not mask.dim():
            raise NotMasked
        self.mask, self._version = mask, mask._version
        filler = torch.ones_like(values) if values.is_floating_point() else torch.zeros_like(values)
        self.full = torch.where(self._over(values), values, filler)

    def _over(self, values: Tensor) -> Tensor:
        if self.mask._version != self._version:  # changed in place since the rows were selected
            raise NotMasked
        return self.mask.reshape(*self.mask.shape, *[1] * (values.dim() - self.mask.dim()))

    @property
    def _rest(self) -> int:
        return self.full.dim() - self.mask.dim()

    def dim(self) -> int:
        return 1 + self._rest

    @property
    def dtype(self) -> torch.dtype:
        return self.full.dtype

    @property
    def device(self) -> torch.device:
        return self.full.device

    def size(self, dim: int) -> int:
        if dim % self.dim() == 0:
            raise NotMasked
        return self.full.shape[self._dim(dim)]

    def _dim(self, dim: int) -> int:
        """Of `full`, for a dimension of the selected rows that is not the rows' own."""
        if not -self.dim() <= dim < self.dim() or dim % self.dim() == 0:
            raise NotMasked
        return dim % self.dim() + self.mask.dim() - 1

    def total(self) -> Tensor:
        return torch.where(self._over(self.full), self.full, 0).sum()

    def average(self) -> Tensor:
        inner = self.full.numel() // self.mask.numel()
        return self.total() / (self.mask.sum() * inner)

    def put_into(self, target: Tensor, mask: Tensor) -> None:
        if mask is not self.mask or mask._version != self._version or target.shape != self.full.shape:
            raise NotMasked
        target.copy_(torch.where(self._over(self.full), self.full.to(target.dtype), target))

    def __getitem__(self, index: Any) -> Masked:
        index = index if isinstance(index, tuple) else (index,)
        if index[0] != slice(None) or not all(i is None or isinstance(i, (int, slice)) for i in index):
            raise NotMasked
        whole = (slice(None),) * (self.mask.dim() - 1)
        return Masked(self.full[(*whole, *index)], self.mask)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _apply(getattr(func, "__name__", ""), func, args, kwargs or {})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name, None)
        if not callable(method):
            raise NotMasked
        return lambda *args, **kwargs: _apply(name, method, (self, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    return lambda *args: _apply(name, getattr(Tensor, name), args, {})


for _name in [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "pow",
    "rpow",
    "neg",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and",
    "or",
    "invert",
]:
    setattr(Masked, f"__{_name}__", _operator(f"__{_name}__"))
Masked.__hash__ = object.__hash__  # type: ignore[method-assign]


def _refuse(*_: Any) -> Any:
    raise NotMasked


for _name in ("len", "iter", "bool", "int", "float", "index", "setitem"):
    setattr(Masked, f"__{_name}__", _refuse)


def _apply(name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    masked = [a for a in (*args, *kwargs.values()) if isinstance(a, Masked)]
    one = masked[0]
    if any(m.mask is not one.mask for m in masked) or (name.endswith("_") and not name.endswith("__")):
        raise NotMasked
    others = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]

    def whole(value: Any) -> Any:
        return value.full if isinstance(value, Masked) else value

    full, named = [whole(a) for a in args], {k: whole(v) for k, v in kwargs.items()}
    if name in _SAME and all(t.dim() <= min(m._rest for m in masked) for t in others):
        return Masked(func(*full, **named), one.mask)
    if name == "normalize" and isinstance(args[0], Masked) and len(args) == 1:
        return Masked(func(one.full, **{**kwargs, "dim": one._dim(kwargs.get("dim", 1))}), one.mask)
    changes_table = name == "embedding" and (kwargs.get("max_norm") is not None or any(a is not None for a in args[3:4]))
    if name in _ROWS and isinstance(args[0], Masked) and len(masked) == 1 and not changes_table:
        return Masked(func(*full, **named), one.mask)
    if name in _ALONG and len(masked) == 1 and isinstance(args[0], Masked):
        return _along(name, func, one, args[1:], kwargs)
    old = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
    if name in ("cross_entropy", "nll_loss") and len(args) == len(masked) == 2 and not old:
        return _classes(func, masked[0], masked[1], args[2:], kwargs)
    if name in _LOSSES and not others and len(args) == 2 and not old:
        reduction = kwargs.get("reduction", "mean")
        each = Masked(func(*full, **{**named, "reduction": "none"}), one.mask)
        if reduction not in ("mean", "sum", "none"):
            raise NotMasked
        return each if reduction == "none" else each.average() if reduction == "mean" else each.total()
    raise NotMasked


def _along(name: str, func: Callable[..., Any], one: Masked, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Functions with a dimension: any but that of the rows; sums and means over everything."""
    dim = kwargs.get("dim", args[0] if args else None)
    if dim is None and name in ("sum", "mean") and set(kwargs) <= {"dim"}:
        return one.total() if name == "sum" else one.average()
    dims = [dim] if isinstance(dim, int) else dim
    if not dims or not all(isinstance(d, int) for d in dims) or (name == "unsqueeze" and dims[0] >= 0):
        raise NotMasked
    if name != "unsqueeze":
        dim = one._dim(dim) if isinstance(dim, int) else [one._dim(d) for d in dims]
    rest = {k: v for k, v in kwargs.items() if k != "dim"}
    return Masked(func(one.full, dim, *args[1:], **rest), one.mask)


def _classes(func: Callable[..., Any], scores: Masked, target: Masked, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Rows that do not count get the class that the loss ignores."""
    if args or scores._rest != 1 or target._rest != 0 or target.full.is_floating_point():
        raise NotMasked
    if kwargs.get("reduction", "mean") == "none":
        raise NotMasked
    ignored = kwargs.get("ignore_index", -100)
    rows = torch.where(target.mask, target.full, ignored).flatten()
    return func(scores.full.flatten(0, -2), rows, **kwargs)


def selected(x: Any, index: Any) -> Any:
    """x[index] where index is a mask of x's first dimensions, perhaps with more behind it; NotImplemented for anything else."""
    first, *more = index if isinstance(index, tuple) and index else (index,)
    if not isinstance(x, Tensor) or not isinstance(first, Tensor) or first.dtype != torch.bool or not first.dim():
        return NotImplemented
    if any(isinstance(i, Tensor) for i in more):
        return NotImplemented
    found = Masked(x, first)
    return found[(slice(None), *more)] if more else found
