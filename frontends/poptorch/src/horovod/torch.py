"""init, rank, size, broadcast_parameters, broadcast_object, allreduce, allgather: what PopTorch programs ask of horovod.torch."""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilework.errors import UserError
from tilework.parallel import launched, start


class ReduceOp(enum.Enum):
    Average = "average"
    Sum = "sum"


Average, Sum = ReduceOp.Average, ReduceOp.Sum
_started = False


def init(*args: Any, **kwargs: Any) -> None:
    global _started
    start()
    _started = True


def shutdown() -> None:
    """Nothing: ranks leave together when they end."""


def is_initialized() -> bool:
    return _started


def _group() -> Any:
    if not _started:
        raise UserError("horovod-init", "horovod.torch has not been initialized", fix="call hvd.init() first")
    return start()


def rank() -> int:
    return int(_group().rank)


def size() -> int:
    return int(_group().size)


def local_rank() -> int:
    return launched().local_rank


def local_size() -> int:
    return max(1, launched().local_size)


def allreduce(tensor: Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None) -> Tensor:
    """The mean over all ranks, or the sum; in every rank."""
    flat = tensor.detach().to(torch.float64).reshape(-1).contiguous().clone()
    group = _group()
    group.all_reduce(flat)
    summed = op == Sum or average is False
    return (flat if summed else flat / group.size).reshape(tensor.shape).to(tensor.dtype)


def allreduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, *args, **kwargs))


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """All ranks' rows, by rank."""
    parts = _group().tell(tensor.detach().tolist())
    return torch.cat([torch.tensor(p, dtype=tensor.dtype).reshape(-1, *tensor.shape[1:]) for p in parts])


def broadcast(tensor: Tensor, root_rank: int = 0, name: str | None = None) -> Tensor:
    flat = tensor.detach().contiguous().clone().reshape(-1)
    _group().from_rank(flat, root_rank)
    return flat.reshape(tensor.shape)


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """In place, in every rank, as they are in the root."""
    named = params.items() if isinstance(params, Mapping) else params
    for _, tensor in sorted(named, key=lambda item: item[0]):
        if isinstance(tensor, Tensor):
            with torch.no_grad():
                tensor.data.copy_(broadcast(tensor, root_rank))


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Anything that JSON can hold, and bytes."""
    packed = {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else {"value": value}
    group = _group()
    try:
        text = json.dumps(packed) if group.rank == root_rank else ""
    except TypeError as e:
        raise UserError("horovod-object", "this object cannot be sent to other ranks", found=str(e),
                        expected="numbers, texts, lists and dicts of them, or bytes") from e  # fmt: skip
    found = json.loads(group.tell(text)[root_rank])
    return base64.b64decode(found["bytes"]) if "bytes" in found else found["value"]
