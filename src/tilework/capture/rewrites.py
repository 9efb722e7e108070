"""Functions of PyTorch, written with operators that can be compiled: some look at values although their result does not depend
on that, some are one operator without native code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._decomp.decompositions
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..process import alone
from . import packed, synchronised
from .masked import Masked, selected


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # the number of classes would be read from the data
        return F.one_hot(x, num_classes)
    classes = torch.arange(num_classes, dtype=x.dtype, device=x.device)
    return (x.unsqueeze(-1) == classes).to(torch.int64)


_RESIZED = {"linear": "_upsample_linear_vec", "bilinear": "_upsample_linear_vec", "trilinear": "_upsample_linear_vec",
            "bicubic": "upsample_bicubic2d_vec"}  # fmt: skip


def _interpolate(  # type: ignore[no-untyped-def]
    input, size=None, scale_factor=None, mode="nearest", align_corners=None, recompute_scale_factor=None, antialias=False
):
    """With plain operators, which have native code both ways; torch's own resizing operators have none."""
    resize = getattr(torch._decomp.decompositions, _RESIZED.get(mode, ""), None)
    if resize is None or antialias or recompute_scale_factor or not input.is_floating_point():
        return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    places = input.dim() - 2
    size = [size] * places if isinstance(size, int) else size
    scale = [float(scale_factor)] * places if isinstance(scale_factor, (int, float)) else scale_factor
    return resize(input, size, bool(align_corners), scale)


def _ctc_loss(  # type: ignore[no-untyped-def]
    log_probs, targets, input_lengths, target_lengths, blank=0, reduction="mean", zero_infinity=False
):
    """torch's own keeps intermediate results whose size depends on the lengths."""
    if log_probs.dim() != 3:
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    ours, theirs = (torch.as_tensor(n, dtype=torch.int64) for n in (input_lengths, target_lengths))
    each, _ = torch.ops.tilework.ctc(log_probs, targets, ours, theirs, blank, zero_infinity)
    if reduction == "mean":
        return (each / theirs.clamp(min=1).to(each.dtype)).mean()
    return each.sum() if reduction == "sum" else each


def _grouped_mm(x, weight, offs=None, bias=None, out_dtype=None):  # type: ignore[no-untyped-def]
    """Rows of x (S, in) that are sorted by expert, each times its expert's weight (experts, in, out); offs: where each expert's
    rows end. Every expert sees every row here, and those that are not its own count nothing."""
    if offs is None or x.dim() != 2 or weight.dim() != 3 or bias is not None:
        return F.grouped_mm(x, weight, offs=offs, bias=bias, out_dtype=out_dtype)
    rows, experts = torch.arange(x.shape[0]), torch.arange(weight.shape[0])
    own = (rows[None, :] >= offs[:, None]).sum(0)[None, :] == experts[:, None]
    return torch.where(own[..., None], torch.matmul(x, weight), 0).sum(0).to(out_dtype or x.dtype)


_BY_NAME = {"transformers.grouped_mm_fallback": _grouped_mm}  # operators that libraries add to torch's
_REWRITES: dict[Any, Any] = {
    F.ctc_loss: _ctc_loss,
    F.one_hot: _one_hot,
    torch._C._nn.one_hot: _one_hot,
    F.interpolate: _interpolate,
    F.batch_norm: synchronised.batch_norm,
    torch.batch_norm: synchronised.torch_batch_norm,
    packed.PACK: packed.pack,
    packed.PAD: packed.pad,
}
for _home, _name in ((F, "grouped_mm"), (torch, "_grouped_mm")):  # torch 2.11 may lack one
    if hasattr(_home, _name):
        _REWRITES[getattr(_home, _name)] = _grouped_mm


class Rewrites(TorchFunctionMode):
    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.masks = masks

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self.masks and func is Tensor.__getitem__:
            found = selected(*args)
            if found is not NotImplemented:
                return found
        if func is Tensor.__setitem__ and isinstance(args[2], Masked):
            return args[2].put_into(*args[:2])
        if func in packed.RECURRENT and packed.is_packed(args):
            return packed.recurrent(func, *args)
        return (_REWRITES.get(func) or _BY_NAME.get(str(func)) or func)(*args, **(kwargs or {}))


_capturing: set[int] = set()  # threads
_Reentrant = torch.utils.checkpoint.CheckpointFunction


class _IsCompiling:
    """torch's flag for "is this being compiled?", which is the process's: yes in threads that capture, and no for others."""

    before = torch.compiler._is_compiling_flag

    def __bool__(self) -> bool:
        return threading.get_ident() in _capturing or self.before

    def __or__(self, other: Any) -> Any:  # it stands where a bool is expected
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    __ror__, __rand__ = __or__, __and__


_IS_COMPILING = _IsCompiling()


class _NotReentrant:
    """Checkpoints of the reentrant kind run a backward pass of their own, which no gradient of a trace goes through. The other
    kind computes the same."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        if threading.get_ident() not in _capturing:
            return _Reentrant.apply(function, preserve, *args)
        if not any(isinstance(a, Tensor) and a.requires_grad for a in args):  # then it leaves the parameters inside alone
            with torch.no_grad():
                return function(*args)
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


@contextmanager
def captured(*, masks: bool) -> Iterator[None]:
    """Around the user's model and loss while they are captured. Code that asks whether it is being compiled hears yes, as from
    torch.export: libraries leave out what looks at values then. `masks`: x[mask] keeps the shape of x (masked.py)."""
    own = threading.get_ident()
    _capturing.add(own)
    torch.compiler._is_compiling_flag = True if alone() else _IS_COMPILING  # type: ignore[assignment]
    torch.utils.checkpoint.CheckpointFunction = _NotReentrant  # type: ignore[misc,assignment]
    try:
        with Rewrites(masks):
            yield
    finally:
        _capturing.discard(own)
        if not _capturing:
            torch.compiler._is_compiling_flag = _IS_COMPILING.before
            torch.utils.checkpoint.CheckpointFunction = _Reentrant  # type: ignore[misc]
