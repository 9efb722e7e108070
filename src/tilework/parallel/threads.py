"""Replicas inside one process: one session and one thread each, on cores of their own.

with tilework.parallel.Replicas("lenet.pef", 2) as replicas:
    result = replicas.run(x, y)          # the joined batch: each replica gets its share

With group=tilework.parallel.start() they are as many in each of several processes (spread.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..errors import UserError
from .group import TIMEOUT, Group, own_share

if TYPE_CHECKING:
    from ..runtime.session import Session


class _Room:
    """Where the threads of one process meet."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier, self.values, self.timeout = threading.Barrier(size), [None] * size, timeout
        self.turn, self.turned = 0, threading.Condition()  # of the threads that speak to other processes


class ThreadGroup(Group):
    """One thread's view of the group: what Group says of processes, of threads of this one."""

    def __init__(self, room: _Room, rank: int) -> None:
        size = len(room.values)
        self.rank = self.local_rank = rank
        self.size, self.timeout, self.launcher, self.steps, self.doing = size, room.timeout, "threads", 0, ""
        self.nodes, self.node, self.local_ranks = [list(range(size))], 0, list(range(size))
        self.pids, self.hosts = [os.getpid()] * size, ["this process"] * size
        self.failed = self.stopped = self._closed = False
        self.room = room

    def tell(self, value: Any) -> list[Any]:
        room = self.room
        room.values[self.rank] = value
        self._meet()
        found = list(room.values)
        self._meet()
        return found

    def _meet(self) -> None:
        try:
            self.room.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise self.lost(self.doing or "start", "another replica of this process failed") from None

    def from_rank(self, flat: Tensor, rank: int, what: str = "broadcast") -> None:
        found = self.tell(flat if self.rank == rank else None)[rank]
        if self.rank != rank:
            flat.copy_(found)
        self._meet()

    def all_reduce(self, flat: Tensor, algorithm: Any = "ring") -> None:
        total = torch.stack(self.tell(flat.clone())).sum(0)
        flat.copy_(total)
        self._meet()

    def barrier(self) -> None:
        self._meet()

    def _silent(self, note: str) -> list[int]:
        return []

    def first_failure(self) -> int | None:
        return None

    def fail(self) -> None:
        self.room.barrier.abort()

    def take_cores(self) -> None:
        """A thread's threads run where it does."""
        share = own_share(sorted(os.sched_getaffinity(0)), self.rank, self.size)
        os.sched_setaffinity(0, share)
        torch.set_num_threads(len(share))

    def close(self) -> None:
        self._closed = True


class Replicas:
    """Several sessions of one artifact, whose gradients are averaged in every step. The artifact is compiled for replicas."""

    def __init__(
        self,
        path: str | Path,
        count: int,
        *,
        group: Group | None = None,
        average: bool = True,
        reduce: Literal["device", "host"] = "device",
        algorithm: Literal["auto", "ring", "hierarchical"] = "auto",
        seed: int = 0,
        timeout: float = TIMEOUT,
        **settings: Any,
    ) -> None:
        """group      processes that have `count` replicas each: together they are one run. Every process makes its Replicas.
        average, reduce, algorithm   as Session.join takes them.
        settings   as tilework.load takes them."""
        if count < 1:
            raise UserError("ranks-launched", "the number of replicas", found=str(count), expected="1 or more")
        from ..runtime.session import load
        from .spread import SpreadGroup

        if group is not None and group.size > 1:
            counts = group.tell(count)
            if len(set(counts)) > 1:
                raise UserError("ranks-launched", "the processes have different numbers of replicas",
                                found=", ".join(map(str, counts)), expected="as many in each")  # fmt: skip
            timeout = group.timeout
            group.take_cores()
        self._room = _Room(count, timeout)
        self._workers = [ThreadPoolExecutor(1, thread_name_prefix=f"replica-{i}") for i in range(count)]

        def made(rank: int) -> Session:
            threads = ThreadGroup(self._room, rank)
            threads.take_cores()
            session = load(path, seed=seed, num_threads=torch.get_num_threads(), **settings)
            spread = SpreadGroup(threads, group) if group is not None and group.size > 1 else threads
            session.join(spread, average=average, reduce=reduce, algorithm=algorithm)
            return session

        self.sessions: list[Session] = self._each(made)

    def _each(self, act: Any) -> list[Any]:
        """In every replica's own thread, all at once. The first error is raised; the others then do not wait."""

        def guarded(rank: int) -> Any:
            try:
                return act(rank)
            except BaseException:
                self._room.barrier.abort()
                for session in getattr(self, "sessions", ()):
                    exchange = getattr(session._device, "exchange", None)
                    if exchange is not None:
                        exchange.give_up()
                raise

        waiting: list[Future[Any]] = [w.submit(guarded, i) for i, w in enumerate(self._workers)]
        errors = [e for f in waiting if (e := f.exception()) is not None]
        if errors:
            raise min(errors, key=lambda e: type(e).__name__ == "RanksError")
        return [f.result() for f in waiting]

    def run(self, *inputs: Tensor, num_steps: int = 1, **settings: Any) -> list[Any]:
        """One call of each replica of this process, on its share of the batch: the first rows of each step are the first
        replica's. Returns each replica's result."""
        count = len(self.sessions)
        dim = self.sessions[0].manifest.signature.batch_dim or 0
        shares = [_shares(t, count, num_steps, dim) for t in inputs]
        return self._each(lambda rank: self.sessions[rank].run(*(s[rank] for s in shares), num_steps=num_steps, **settings))

    def each(self, act: Callable[[Session, int], Any]) -> list[Any]:
        """act(session, rank) in every replica's own thread, all at once; what they return, by rank."""
        return self._each(lambda rank: act(self.sessions[rank], rank))

    def to_device(self, *args: Any, **kwargs: Any) -> None:
        self._each(lambda rank: self.sessions[rank].to_device(*args, **kwargs))

    def to_host(self, *args: Any, **kwargs: Any) -> None:
        """Parameters are the same in all replicas; buffers (running statistics) are the first one's."""
        self.sessions[0].to_host(*args, **kwargs)

    def close(self) -> None:
        for session in getattr(self, "sessions", ()):
            session.close()
        for worker in self._workers:
            worker.shutdown()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shares(tensor: Tensor, count: int, num_steps: int, dim: int) -> Sequence[Tensor]:
    """Of a batch of several steps, each replica's rows of every step, one after the other."""
    rows = tensor.shape[dim]
    if rows % (count * num_steps):
        raise UserError("input-mismatch", "the batch cannot be divided among the replicas", found=f"{rows} rows",
                        expected=f"a multiple of {count} replicas times {num_steps} steps")  # fmt: skip
    steps = tensor.chunk(num_steps, dim)
    parts = [s.chunk(count, dim) for s in steps]
    return [torch.cat([p[i] for p in parts], dim) for i in range(count)]
