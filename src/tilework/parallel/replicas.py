"""How the gradients of all replicas become one: in the native step, or on the host by one of the algorithms."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UserError, did_you_mean
from .algorithms import ALGORITHMS, Algorithm
from .group import Group

_ROUNDS = 3  # of each algorithm, to choose one


class HostReducer:
    """By torch.distributed, between the native calls."""

    def __init__(self, group: Group, algorithm: Literal["auto", "ring", "hierarchical"], *, mean: bool) -> None:
        self.group, self.mean, self.asked = group, mean, algorithm
        self.chosen: dict[int, Algorithm] = {}  # bytes of a bucket -> what is used for it

    def reduce(self, buckets: Sequence[Tensor]) -> None:
        for bucket in buckets:
            flat = torch.view_as_real(bucket).view(-1) if bucket.is_complex() else bucket
            if not flat.is_cpu:  # ranks meet on the host
                self._through_the_host(flat)
                continue
            self.group.all_reduce(flat, self.algorithm_for(flat))
            if self.mean and flat.is_floating_point():
                flat.mul_(1.0 / self.group.size)
        self.group.steps += 1

    def _through_the_host(self, there: Tensor) -> None:
        host = there.cpu()
        self.group.all_reduce(host, self.algorithm_for(host))
        if self.mean and host.is_floating_point():
            host.mul_(1.0 / self.group.size)
        there.copy_(host)

    def algorithm_for(self, flat: Tensor) -> Algorithm:
        if self.asked != "auto":
            return self.asked
        group = self.group
        if len(group.nodes) == 1 or len(group.local_ranks) == 1 or not group.is_even:
            return "ring"  # the hierarchical one would do the same, or cannot be used
        size = flat.numel() * flat.element_size()
        if size not in self.chosen:
            self.chosen[size] = faster(group, flat)
        return self.chosen[size]


def faster(group: Group, like: Tensor) -> Algorithm:
    """Measured, by turns, on data of that size; all ranks take rank 0's word."""
    times: dict[Algorithm, list[float]] = {a: [] for a in ALGORITHMS}
    flat = torch.zeros_like(like)
    for _ in range(_ROUNDS):
        for algorithm in ALGORITHMS:
            begin = time.perf_counter()
            group.all_reduce(flat, algorithm)
            times[algorithm].append(time.perf_counter() - begin)
    best = min(ALGORITHMS, key=lambda a: statistics.median(times[a]))
    return next(a for a in ALGORITHMS if a == group.tell(best)[0])


def joined(group: Group, device: Any, reduce: str, algorithm: Any, *, average: bool, overlap: bool | None) -> tuple[Any, bool]:
    """(the reducer, whether the device calls it within the native step)"""
    if reduce not in ("device", "host"):
        raise UserError(
            "ranks-reduce", "where gradients are reduced", found=repr(reduce), fix=did_you_mean(reduce, ("device", "host"))
        )
    if algorithm not in ("auto", *ALGORITHMS):
        raise UserError(
            "ranks-reduce", "no such algorithm", found=repr(algorithm), fix=did_you_mean(algorithm, ("auto", *ALGORITHMS))
        )
    join = getattr(device, "join", None)
    if group.size > 1 and reduce == "device" and join is not None:
        own = "hierarchical" if algorithm != "ring" and group.is_even else "ring"
        exchange = join(group, mean=average, algorithm=own, overlap=len(group.nodes) > 1 if overlap is None else overlap)
        if exchange is not None:
            return exchange, True
    return HostReducer(group, algorithm, mean=average), False
