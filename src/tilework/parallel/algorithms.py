"""All-reduce and all-gather, built on torch.distributed's send and receive.

Every function takes the ranks that take part, in an order that is the same for all of them, and works in place. Each element is
summed along one chain of ranks and then handed on, so all ranks end with the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Algorithm = Literal["ring", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "hierarchical")


def slices(flat: Tensor, count: int) -> list[Tensor]:
    """`count` parts of a flat tensor, as even as can be; some may be empty."""
    size = flat.numel()
    return [flat[size * i // count : size * (i + 1) // count] for i in range(count)]


def reduce_scatter(flat: Tensor, ranks: Sequence[int], me: int) -> Tensor:
    """Afterwards this rank's slice, which is returned, is the sum of everybody's; the other slices are spoilt."""
    at, count, parts = ranks.index(me), len(ranks), slices(flat, len(ranks))
    right, left = ranks[(at + 1) % count], ranks[(at - 1) % count]
    room = torch.empty(max(p.numel() for p in parts), dtype=flat.dtype)
    for step in range(count - 1):
        sent, taken = parts[(at - step - 1) % count], parts[(at - step - 2) % count]
        received = room[: taken.numel()]
        _exchange(sent, right, received, left)
        taken.add_(received)
    return parts[at]


def all_gather(flat: Tensor, ranks: Sequence[int], me: int) -> None:
    """Each rank has its own slice; afterwards all have all of them."""
    at, count, parts = ranks.index(me), len(ranks), slices(flat, len(ranks))
    right, left = ranks[(at + 1) % count], ranks[(at - 1) % count]
    for step in range(count - 1):
        _exchange(parts[(at - step) % count], right, parts[(at - step - 1) % count], left)


def _exchange(sent: Tensor, right: int, received: Tensor, left: int) -> None:
    waiting: list[Any] = []
    if sent.numel():
        waiting.append(dist.isend(sent, right))
    if received.numel():
        waiting.append(dist.irecv(received, left))
    for each in waiting:
        each.wait()


def ring(flat: Tensor, ranks: Sequence[int], me: int) -> None:
    """Reduces in two rounds along one ring: each rank sends and receives 2 (n - 1) / n of the data."""
    if len(ranks) > 1:
        reduce_scatter(flat, ranks, me)
        all_gather(flat, ranks, me)


def hierarchical(flat: Tensor, nodes: Sequence[Sequence[int]], me: int) -> None:
    """Within each machine, then between machines, then within each again: only 1/n of the data of a machine's n ranks crosses the
    network at a time, by n connections. Every machine has as many ranks as the others."""
    own = next(ranks for ranks in nodes if me in ranks)
    part = reduce_scatter(flat, own, me) if len(own) > 1 else flat
    ring(part, [ranks[own.index(me)] for ranks in nodes], me)
    if len(own) > 1:
        all_gather(flat, own, me)
