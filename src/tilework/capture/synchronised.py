"""Batch normalization with the statistics of all replicas: the rows of a step count as one batch, wherever they are.

It is written with one operator of our own, the sum over replicas. Alone, a replica is all of them, and the numbers are those of
torch's own batch normalization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError

_owned: ContextVar[frozenset[int] | None] = ContextVar("_owned", default=frozenset())  # ids of tensors; None: of all modules


@contextmanager
def synchronised(modules: Sequence[tuple[str, nn.Module]], *, everywhere: bool) -> Iterator[None]:
    """Around a capture. `everywhere`: all batch normalization; otherwise that of nn.SyncBatchNorm alone."""
    found = {f"{prefix}{name}": m for prefix, root in modules for name, m in root.named_modules()}
    own = {name: m for name, m in found.items() if isinstance(m, nn.SyncBatchNorm)}
    tensors = {name: [t for t in (m.weight, m.running_mean) if t is not None] for name, m in own.items()}
    bare = [name for name, held in tensors.items() if not held]
    if bare and not everywhere:  # its calls could not be told from those of others
        raise UserError("sync-batch-norm", "an nn.SyncBatchNorm has neither weights nor running statistics",
                        found=", ".join(bare), fix="compile with sync_batch_norm=True (for all of the model)")  # fmt: skip
    token = _owned.set(None if everywhere else frozenset(id(t) for held in tensors.values() for t in held))
    try:
        yield
    finally:
        _owned.reset(token)


def batch_norm(  # type: ignore[no-untyped-def]
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
):
    """F.batch_norm, of all replicas where that is wanted."""
    if not training or not _wanted(weight, running_mean):
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    F._verify_batch_size(input.size())  # type: ignore[attr-defined]
    return _of_all_replicas(input, running_mean, running_var, weight, bias, momentum, eps)


def torch_batch_norm(  # type: ignore[no-untyped-def]
    input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
):
    """torch.batch_norm: the same with its arguments in another order, and fewer checks."""
    if not training or not _wanted(weight, running_mean):
        return torch.batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return _of_all_replicas(input, running_mean, running_var, weight, bias, momentum, eps)


def _wanted(*tensors: Any) -> bool:
    owned = _owned.get()
    return owned is None or any(id(t) in owned for t in tensors)


def _of_all_replicas(  # type: ignore[no-untyped-def]
    input: Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, momentum, eps
) -> Tensor:
    total = torch.ops.tilework.over_replicas
    x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    channels = input.shape[1]
    others = [d for d in range(x.dim()) if d != 1]
    shape = [1, channels, *([1] * (x.dim() - 2))]
    # The mean first and then the squares, each over all replicas: squares of what is far from zero would cancel.
    count = torch.full((1,), input.numel() // channels, dtype=x.dtype)
    sums = total(torch.cat([x.sum(others), count]))
    mean, count = sums[:channels] / sums[channels:].detach(), sums[channels:].detach()
    centred = x - mean.view(shape)
    variance = total((centred * centred).sum(others)) / count
    y = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.copy_(running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum)
        if running_var is not None:
            unbiased = variance * (count / (count - 1))
            running_var.copy_(running_var * (1 - momentum) + unbiased.to(running_var.dtype) * momentum)
    return y.to(input.dtype)
