"""Our own operators: what a graph may hold beyond PyTorch's. Each has an eager form here, which is its definition;
the cpu backend has native code for it (compiler/kernels.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten

# Convolutions that are too small for a library call to pay: see plan/passes.py for when they are used.
# x [n, c, h, w], weight [o, c / groups, kh, kw]; stride, padding and dilation are pairs.


@torch.library.custom_op("tilework::small_conv", mutates_args=())
def small_conv(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    return aten.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups).contiguous()


@small_conv.register_fake
def _(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    like = aten.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups)
    return x.new_empty(like.shape)


@torch.library.custom_op("tilework::small_conv_input_grad", mutates_args=())
def small_conv_input_grad(
    grad: Tensor,
    weight: Tensor,
    input_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    x = grad.new_empty(tuple(input_shape))
    return aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
    )[0].contiguous()  # fmt: skip


@small_conv_input_grad.register_fake
def _(
    grad: Tensor,
    weight: Tensor,
    input_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    return grad.new_empty(tuple(input_shape))


@torch.library.custom_op("tilework::small_conv_weight_grad", mutates_args=())
def small_conv_weight_grad(
    grad: Tensor,
    x: Tensor,
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    weight = grad.new_empty(tuple(weight_shape))
    return aten.convolution_backward(
        grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
    )[1].contiguous()  # fmt: skip


@small_conv_weight_grad.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    return grad.new_empty(tuple(weight_shape))
