"""sambaflow.samba: tensors, models, the session, optimizers and utilities, under the names that programs use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import directives as directives
from . import distributed as distributed
from . import env as env
from . import nn as nn
from . import optim as optim
from .conversion import from_named_dict as from_named_dict
from .conversion import from_torch as from_torch
from .conversion import from_torch_model_ as from_torch_model_
from .conversion import rand as rand
from .conversion import randint as randint
from .conversion import randn as randn
from .conversion import randn_like as randn_like
from .lazy_param import lazy_param as lazy_param
from .sambasession import SambaSession as SambaSession
from .sambasession import session as session
from .sambatensor import SambaParameter as SambaParameter
from .sambatensor import SambaTensor as SambaTensor
from .sambatensor import from_torch_tensor as from_torch_tensor
from .sambatensor import to_torch as to_torch

from . import utils as utils  # isort: skip  (it needs the session)

distributed.accept_mpi()
from_torch_ = from_torch_model_
to_torch_tensor = to_torch


def addmm(bias: Tensor, x: Tensor, weight: Tensor, is_transposed: bool = False) -> Tensor:
    """x @ weight + bias; with is_transposed the weight is (out, in). x may have any number of dimensions."""
    return torch.matmul(x, weight.transpose(-1, -2) if is_transposed else weight) + bias


def triu_fill(tensor: Tensor, value: float, diagonal: int = 1) -> Tensor:
    """The tensor with everything above the diagonal set to a value: a causal mask."""
    above = torch.ones(tensor.shape[-2:], dtype=torch.bool, device=tensor.device).triu(diagonal)
    return tensor.masked_fill(above, value)


def groupby(*_: Any, **__: Any) -> Any:
    from .refusals import refused

    raise refused("samba.groupby")


@contextmanager
def patched_torch() -> Iterator[None]:
    """Around a reference on the host, where torch is torch already."""
    yield


def is_internal() -> bool:
    return False


def __getattr__(name: str) -> Any:
    """Mirrors of torch's functions: samba.cat, samba.sigmoid, samba.matmul, ..."""
    if not name.startswith("_") and callable(found := getattr(torch, name, None)):
        return found
    raise AttributeError(f"module 'sambaflow.samba' has no attribute {name!r}")
