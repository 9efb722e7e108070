"""Our own operators: what a graph may hold beyond PyTorch's. Each has an eager form here, which is its definition;
the cpu backend has native code for it (compiler/kernels/)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten

# Matrix products of float32, whose code the cpu backend chooses by shape: loops, our own kernels, or BLAS.


@torch.library.custom_op("tilework::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


@product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@torch.library.custom_op("tilework::batch_product", mutates_args=())
def batch_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


@batch_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


# A weight after a step of plain SGD whose gradient is a product; keep = 1 - lr decay.


@torch.library.custom_op("tilework::updated_by_product", mutates_args=())
def updated_by_product(weight: Tensor, a: Tensor, b: Tensor, lr: Tensor, keep: Tensor) -> Tensor:
    return weight * keep - torch.mm(a, b) * lr


@updated_by_product.register_fake
def _(weight: Tensor, a: Tensor, b: Tensor, lr: Tensor, keep: Tensor) -> Tensor:
    return torch.empty_like(weight)


@torch.library.custom_op("tilework::update_by_product", mutates_args=("weight",))
def update_by_product(weight: Tensor, a: Tensor, b: Tensor, lr: Tensor, keep: Tensor) -> None:
    """The same in place: what the native code does."""
    weight.copy_(updated_by_product(weight, a, b, lr, keep))


# Values that native code must not compute twice, or not later than here.


@torch.library.custom_op("tilework::once", mutates_args=())
def once(x: Tensor) -> Tensor:
    """x, written to memory: whoever uses it sees the same bits. Two loops may round the same formula differently."""
    return x.clone()


@once.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tilework::kept", mutates_args=())
def kept(x: Tensor) -> Tensor:
    """A copy of x as it is now, whatever becomes of x."""
    return x.clone()


@kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tilework::store", mutates_args=("target",))
def store(target: Tensor, value: Tensor) -> None:
    """target = value, after all of the value has been computed."""
    target.copy_(value)


# What the forward pass keeps for the backward pass, where it does not keep everything.


@torch.library.custom_op("tilework::recompute_from", mutates_args=())
def recompute_from(x: Tensor) -> Tensor:
    """x. In a compiled step that has such values, the backward pass keeps those alone and computes again what lies between them:
    less memory, more time, the same numbers."""
    return x.clone()


@recompute_from.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _recompute_from_backward(ctx, grad):  # type: ignore[no-untyped-def]
    return grad


recompute_from.register_autograd(_recompute_from_backward)


@torch.library.custom_op("tilework::after", mutates_args=())
def after(x: Tensor, other: Tensor) -> Tensor:
    """x, when `other` is there and not before: what is computed from it is not what was computed from x."""
    return x.clone()


@after.register_fake
def _(x: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(x)


# What replicas have in common (synchronised batch normalization): every replica's sum of all of theirs, element by element.


@torch.library.custom_op("tilework::over_replicas", mutates_args=())
def over_replicas(x: Tensor) -> Tensor:
    """x, where there is one replica. A device that has joined others adds theirs."""
    return x.clone()


@over_replicas.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _over_replicas_backward(ctx, grad):  # type: ignore[no-untyped-def]
    """Every replica's result depends on this one's x."""
    return torch.ops.tilework.over_replicas(grad)


over_replicas.register_autograd(_over_replicas_backward)


SYNCHRONISES = "tilework.over_replicas.default"  # as graphs call it


# An operator of the program's table of calls (compiler/calls.py), and its further results. They only stand in for it while native
# code is generated.


@torch.library.custom_op("tilework::called", mutates_args=())
def called(
    inputs: Sequence[Tensor], index: int, output: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    raise RuntimeError("stands for another operator")


@called.register_fake
def _(
    inputs: Sequence[Tensor], index: int, output: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)


@torch.library.custom_op("tilework::called_result", mutates_args=())
def called_result(
    first: Tensor, index: int, output: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    raise RuntimeError("stands for another operator")


@called_result.register_fake
def _(first: Tensor, index: int, output: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)


# Maximum pooling with windows that do not overlap. x [n, c, h, w]; kernel, stride and padding are pairs.


def is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _format(x: Tensor) -> torch.memory_format:
    """Pooling keeps the layout of its input."""
    return torch.channels_last if is_channels_last(x) else torch.contiguous_format


def pool_shape(x: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> list[int]:
    return [*x[:2], *((x[2 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2))]


@torch.library.custom_op("tilework::max_pool", mutates_args=())
def max_pool(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    return aten.max_pool2d_with_indices(x, kernel, stride, padding)[0].contiguous(memory_format=_format(x))


@max_pool.register_fake
def _(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    shape = pool_shape(x.shape, kernel, stride, padding)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_format(x))


@torch.library.custom_op("tilework::max_pool_grad", mutates_args=())
def max_pool_grad(
    grad: Tensor, x: Tensor, pooled: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    where = aten.max_pool2d_with_indices(x, kernel, stride, padding)[1]
    found = aten.max_pool2d_with_indices_backward(grad, x, kernel, stride, padding, [1, 1], False, where)
    return found.contiguous(memory_format=_format(x))


@max_pool_grad.register_fake
def _(grad: Tensor, x: Tensor, pooled: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=_format(x))


# Convolutions that are too small for a library call to pay: see plan/convolutions.py for when they are used.
# x [n, c, h, w], weight [o, c / groups, kh, kw]; stride, padding and dilation are pairs.


def conv_shape(
    x: Sequence[int], weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    sides = ((x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1 for i in range(2))
    return [x[0], weight[0], *sides]


@torch.library.custom_op("tilework::small_conv", mutates_args=())
def small_conv(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    return aten.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups).contiguous()


@small_conv.register_fake
def _(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> Tensor:
    return x.new_empty(conv_shape(x.shape, weight.shape, stride, padding, dilation))


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


# Connectionist temporal classification. torch's operator keeps intermediate results whose size depends on the lengths; this one
# makes the gradient at once: loss of each sequence, and its derivative by log_probs (T, B, C).


@torch.library.custom_op("tilework::ctc", mutates_args=())
def ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    given = (targets, input_lengths, target_lengths)
    losses, alpha = aten._ctc_loss(log_probs, *given, blank, zero_infinity)
    grad = aten._ctc_loss_backward(torch.ones_like(losses), log_probs, *given, losses, alpha, blank, zero_infinity)
    return torch.where(losses.isinf(), 0, losses) if zero_infinity else losses, grad


@ctc.register_fake
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _keep_ctc(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _ctc_backward(ctx, grad_losses, _):  # type: ignore[no-untyped-def]
    return ctx.saved_tensors[0] * grad_losses[None, :, None], None, None, None, None, None


ctc.register_autograd(_ctc_backward, setup_context=_keep_ctc)
