"""Functions of PyTorch, written with operators that can be compiled: some look at values although their result does not depend
on that, some are one operator without native code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._decomp.decompositions
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


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


_REWRITES: dict[Any, Any] = {F.one_hot: _one_hot, torch._C._nn.one_hot: _one_hot, F.interpolate: _interpolate}


class Rewrites(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return _REWRITES.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def captured() -> Iterator[None]:
    """Around the user's model and loss while they are captured. Code that asks whether it is being compiled hears yes, as from
    torch.export: libraries leave out what looks at values then."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        with Rewrites():
            yield
    finally:
        torch.compiler._is_compiling_flag = before
