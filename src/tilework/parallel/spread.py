"""Ranks that are threads of several processes: threads meet within their process, and the first of each meets the others.

group = tilework.parallel.start()                                            # the processes
with tilework.parallel.Replicas("lenet.pef", 2, group=group) as replicas:    # two replicas in each
    result = replicas.run(x, y)                                              # this process's share of the batch
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from .group import Group
from .threads import ThreadGroup


class SpreadGroup(Group):
    """One thread's view of all threads of all processes. Each process has as many; its ranks follow those of the process before
    it."""

    def __init__(self, threads: ThreadGroup, processes: Group) -> None:
        self.threads, self.processes = threads, processes
        each = threads.size
        self.rank, self.size = self._ranks(processes.rank)[threads.rank], each * processes.size
        self.timeout, self.launcher, self.steps, self.doing = processes.timeout, processes.launcher, 0, ""
        self.pids = [pid for pid in processes.pids for _ in range(each)]
        self.hosts = [host for host in processes.hosts for _ in range(each)]
        self.nodes = [[rank for p in node for rank in self._ranks(p)] for node in processes.nodes]
        self.node, self.local_ranks = processes.node, self.nodes[processes.node]
        self.local_rank = self.local_ranks.index(self.rank)
        self.failed = self.stopped = self._closed = False

    def _ranks(self, process: int) -> range:
        return range(process * self.threads.size, (process + 1) * self.threads.size)

    @property
    def _speaks(self) -> bool:
        """Whether this thread is the one that speaks to other processes."""
        return self.threads.rank == 0

    # ---- together ----

    def tell(self, value: Any) -> list[Any]:
        own = self.threads.tell(value)
        found = [v for values in self.processes.tell(own) for v in values] if self._speaks else None
        return list(self.threads.tell(found)[0])

    def all_reduce(self, flat: Tensor, algorithm: Any = "ring") -> None:
        self.threads.all_reduce(flat)
        if self._speaks:
            self.processes.all_reduce(flat, algorithm)
        self.threads.from_rank(flat, 0)

    def from_rank(self, flat: Tensor, rank: int, what: str = "broadcast") -> None:
        home, thread = divmod(rank, self.threads.size)
        if self.processes.rank == home:
            self.threads.from_rank(flat, thread, what)
        if self._speaks:
            self.processes.from_rank(flat, home, what)
        self.threads.from_rank(flat, 0, what)

    def sum_over(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """Over all ranks, or over the same thread of some processes."""
        if len(ranks) == self.size:
            self.all_reduce(flat)
            return
        with self._turn():
            self.processes.sum_over(flat, [rank // self.threads.size for rank in ranks])

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The threads of a process speak one after the other, in the same order everywhere."""
        room, end = self.threads.room, time.monotonic() + self.timeout
        with room.turned:
            while room.turn != self.threads.rank:
                room.turned.wait(0.05)
                if room.barrier.broken or time.monotonic() > end:
                    raise self.lost("reduce (between the machines)", "another replica of this process failed")
        yield
        with room.turned:
            room.turn = (room.turn + 1) % self.threads.size
            room.turned.notify_all()

    def barrier(self) -> None:
        self.threads.barrier()
        if self._speaks:
            self.processes.barrier()
        self.threads.barrier()

    def take_cores(self) -> None:
        self.threads.take_cores()

    # ---- what went wrong ----

    def _silent(self, note: str) -> list[int]:
        return [self._ranks(p)[0] for p in self.processes._silent(note)]

    def first_failure(self) -> int | None:
        found = self.processes.first_failure()
        return None if found is None else self._ranks(found)[0]

    def fail(self) -> None:
        self.threads.fail()

    def close(self) -> None:
        self._closed = True
