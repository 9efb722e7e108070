"""How fast the ranks that were started can reduce: every way, by size. `tilework measure --collectives` prints it."""

from __future__ import annotations

import ctypes
import math
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .algorithms import ALGORITHMS
from .exchange import Exchange
from .group import Group

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes
_ROUNDS, _SECONDS = 5, 0.3  # of each row: at least so many, and about so long


def sweep(group: Group, library: ctypes.CDLL | None, sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """One row for each way and size: the median time of an all-reduce of float32, in seconds. `library`: exchange.cpp, for the
    way through shared memory."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        flat = _flat(size)
        ways: dict[str, Callable[[], object]] = {"gloo": lambda t=flat: dist.all_reduce(t)}  # type: ignore[misc]
        for algorithm in ALGORITHMS:
            if algorithm == "ring" or (group.is_even and len(group.nodes) > 1 and len(group.local_ranks) > 1):
                ways[algorithm] = lambda t=flat, a=algorithm: group.all_reduce(t, a)  # type: ignore[misc]
        exchange: Exchange | None = None
        if library is not None and group.is_even:
            shared = _flat(size)
            exchange = Exchange(library, group, [shared], mean=True, algorithm="hierarchical", ready_after=None)
            ways["device"] = exchange.reduce
        for name, once in ways.items():
            rows.append(
                {"way": name, "bytes": size, "seconds": _timed(group, once), "ranks": group.size, "nodes": len(group.nodes)}
            )
        if exchange is not None:
            exchange.close()
    return rows


def _flat(size: int) -> Tensor:
    """Of whole pages: shared memory may take its place."""
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.float32)


def _timed(group: Group, once: Callable[[], object]) -> float:
    """The median; ranks begin each round together, and make as many."""
    once()
    begin = time.perf_counter()
    once()
    count = max(1, int(group.tell(_SECONDS / _ROUNDS / max(1e-6, time.perf_counter() - begin))[0]))
    times = []
    for _ in range(_ROUNDS):
        group.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            once()
        times.append((time.perf_counter() - begin) / count)
    return max(group.tell(statistics.median(times)))


def fitted(rows: Sequence[dict[str, Any]], way: str) -> tuple[float, float] | None:
    """(seconds to begin, seconds a byte) of one way, by least squares on relative errors; None where it was not measured."""
    found = [(r["bytes"], r["seconds"]) for r in rows if r["way"] == way]
    if len(found) < 2:
        return None
    # Minimise sum ((a + b x - y) / y)^2.
    s11 = sum(1 / y**2 for _, y in found)
    s12 = sum(x / y**2 for x, y in found)
    s22 = sum(x * x / y**2 for x, y in found)
    t1, t2 = sum(1 / y for _, y in found), sum(x / y for x, y in found)
    det = s11 * s22 - s12 * s12
    if det <= 0 or not math.isfinite(det):
        return None
    a, b = (t1 * s22 - t2 * s12) / det, (t2 * s11 - t1 * s12) / det
    return max(a, 1e-7), max(b, 1e-13)
