"""Functions of PyTorch that look at values although their result does not depend on that: written so that they need not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:  # the number of classes would be read from the data
        return F.one_hot(x, num_classes)
    classes = torch.arange(num_classes, dtype=x.dtype, device=x.device)
    return (x.unsqueeze(-1) == classes).to(torch.int64)


_REWRITES: dict[Any, Any] = {F.one_hot: _one_hot, torch._C._nn.one_hot: _one_hot}


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
