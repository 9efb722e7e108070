"""A feed: batches in an order that depends only on the seed, the epoch and the number of the batch.

So a run that is stopped anywhere goes on with exactly the batch that would have come next, whatever the number of worker
processes, and however many batches are taken at a time. With several ranks each batch is cut into their shares: rank r of n
takes every n-th batch; the same records are seen in the same order by any number of ranks that divides the batches.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import UserError
from ..runtime.loader import Chunk, ahead
from .source import BadRecord, Record, Source

Transform = Callable[[Record, torch.Generator], Record]


@dataclass(frozen=True)
class Position:
    """The next batch: `batch` counts this rank's own within the epoch."""

    epoch: int = 0
    batch: int = 0


class Feed:
    """
    source      records (tilework.data)
    batch_size  rows of one step of one rank
    shuffle     a new order in each epoch, from the seed; otherwise the source's own
    transform   changes the records of a batch, with a generator of its own: the numbers depend on the seed and the batch alone
    num_workers processes that read ahead; 0: a thread of this one
    bad_records "stop": an error that names the record; "skip": it is reported, and the next one that can be read takes its place
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        ranks: int = 1,
        num_workers: int = 0,
        transform: Transform | None = None,
        bad_records: str = "stop",
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        if bad_records not in ("stop", "skip"):
            raise UserError("data-option", "bad records", found=repr(bad_records), expected="stop or skip")
        if num_workers < 0:
            raise UserError("data-option", "processes that read", found=str(num_workers), expected="0 or more")
        self.source, self.batch_size, self.shuffle, self.seed = source, batch_size, shuffle, seed
        self.rank, self.ranks, self.num_workers, self.report = rank, ranks, num_workers, report
        self._reader = _Reader(source, batch_size, seed, transform, bad_records)
        self.num_batches = len(source) // (batch_size * ranks)  # of each rank, in an epoch: what is left over is left out
        if not self.num_batches:
            all_rows = f"{batch_size} rows" + (f" on each of {ranks} ranks" if ranks > 1 else "")
            raise UserError("data-empty", "the data contain no complete batch", found=f"{len(source)} records", expected=all_rows,
                            fix="compile for a smaller batch, or use more data")  # fmt: skip
        self._told: set[int] = set()

    def describe(self) -> dict[str, Any]:
        """What the order depends on. A run that is resumed compares it."""
        return {"records": len(self.source), "batch_size": self.batch_size, "ranks": self.ranks, "seed": self.seed,
                "shuffle": self.shuffle}  # fmt: skip

    def order(self, epoch: int) -> np.ndarray:
        """Numbers of the records of an epoch, for all ranks."""
        if not self.shuffle:
            return np.arange(len(self.source))
        return np.random.default_rng((self.seed & 0xFFFF_FFFF_FFFF_FFFF, epoch)).permutation(len(self.source))

    def records(self, position: Position, count: int) -> np.ndarray:
        """Numbers of the records in so many batches from there: [count, batch_size]."""
        order, at = self.order(position.epoch), np.arange(position.batch, position.batch + count) * self.ranks + self.rank
        return order[: len(order) // self.batch_size * self.batch_size].reshape(-1, self.batch_size)[at]

    def first(self, count: int) -> Record:
        """The first records in the source's own order, as they are, without the transform."""
        return self._reader.rows(np.arange(count), [])

    def chunks(self, position: Position, sizes: Iterable[int]) -> Generator[Chunk, None, None]:
        """From the position to the end of its epoch, as many batches at a time as `sizes` says; the last may be fewer."""
        order = self.order(position.epoch)
        tasks = self._tasks(order, position, iter(sizes))
        if self.num_workers:
            yield from self._by_workers(tasks)
        else:
            yield from ahead((self._chunk(self._reader(task)) for task in tasks), 2)

    def _tasks(self, order: np.ndarray, position: Position, sizes: Iterator[int]) -> Iterator[_Task]:
        at, rows, ranks = position.batch, self.batch_size, self.ranks
        while at < self.num_batches:
            if (size := next(sizes, None)) is None:
                return
            count = min(size, self.num_batches - at)
            own = [order[(b * ranks + self.rank) * rows : (b * ranks + self.rank + 1) * rows] for b in range(at, at + count)]
            yield _Task(position.epoch, [b * ranks + self.rank for b in range(at, at + count)], np.concatenate(own))
            at += count

    def _chunk(self, read: tuple[Record, int, list[str]]) -> Chunk:
        tensors, count, problems = read
        for problem in problems:
            if hash(problem) not in self._told:
                self._told.add(hash(problem))
                self.report(f"{problem}; skipped, the record after it takes its place")
        return Chunk(tensors, count)

    def _by_workers(self, tasks: Iterator[_Task]) -> Iterator[Chunk]:
        ending = multiprocessing.Event()
        loader = DataLoader(_Tasks(self._reader), batch_size=None, sampler=_Once(tasks), num_workers=self.num_workers,
                            persistent_workers=False, prefetch_factor=2, worker_init_fn=_Stays(ending))  # fmt: skip
        state = torch.get_rng_state()  # the loader draws a seed for its workers: nobody else's numbers change by that
        found = iter(loader)
        torch.set_rng_state(state)
        try:
            for read in found:
                if isinstance(read, _Failed):
                    raise UserError(read.id, read.summary, found=read.found, expected=read.expected, fix=read.fix)
                yield self._chunk(read)
        finally:
            ending.set()
            shutdown = getattr(found, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()


@dataclass(frozen=True)
class _Task:
    epoch: int
    batches: list[int]  # their numbers in the epoch, among those of all ranks
    records: np.ndarray


class _Reader:
    """Reads the records of several batches at once: in this process or in a worker."""

    def __init__(self, source: Source, batch_size: int, seed: int, transform: Transform | None, bad_records: str) -> None:
        self.source, self.batch_size, self.seed, self.transform = source, batch_size, seed, transform
        self.skips = bad_records == "skip"
        self._bad: set[int] = set()

    def __call__(self, task: _Task) -> tuple[Record, int, list[str]]:
        problems: list[str] = []
        tensors = self.rows(task.records, problems)
        if self.transform is not None:
            parts = []
            for i, batch in enumerate(task.batches):
                words = np.random.SeedSequence((self.seed & 0xFFFF_FFFF_FFFF_FFFF, task.epoch, batch)).generate_state(2)
                generator = torch.Generator().manual_seed(int(words[0]) << 31 ^ int(words[1]))
                rows = slice(i * self.batch_size, (i + 1) * self.batch_size)
                parts.append(self.transform(tuple(t[rows] for t in tensors), generator))
            tensors = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        return tensors, len(task.batches), problems

    def rows(self, numbers: np.ndarray, problems: list[str]) -> Record:
        numbers = numbers.copy()
        for _ in range(len(self.source)):
            try:
                return self.source.rows(numbers)
            except BadRecord as e:
                if not self.skips:
                    raise _stopped(e) from e
                self._bad.add(e.number)
                problems.append(str(e))
                other = e.number
                while other in self._bad:
                    other = (other + 1) % len(self.source)
                    if other == e.number:
                        raise UserError("data-record", "no record can be read", found=str(e)) from e
                numbers[numbers == e.number] = other
        raise UserError("data-record", "no record can be read", found=problems[-1])


def _stopped(bad: BadRecord) -> UserError:
    return UserError("data-record", f"record {bad.number} cannot be read", found=f"{bad.place}: {bad.why}",
                     fix="repair or remove it, or skip such records (--bad-records skip)")  # fmt: skip


class _Tasks(Dataset):
    """What a worker process is given: tasks to read."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader

    def __getitem__(self, task: Any) -> Any:
        try:
            return self.reader(task)
        except UserError as e:
            return _Failed(e.id, e.summary, e.found, e.expected, e.fix)


class _Stays:
    """A worker goes on where the signal that ends a job reaches it too: what is read is needed until the training has saved."""

    def __init__(self, ending: Event) -> None:
        self.ending = ending

    def __call__(self, _: int) -> None:
        def heard(number: int, _: object) -> None:
            if self.ending.is_set():
                os._exit(128 + number)

        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, heard)


@dataclass(frozen=True)
class _Failed:
    """An error on its way between processes, where exceptions lose their parts."""

    id: str
    summary: str
    found: str
    expected: str
    fix: str


class _Once:
    """A sampler over an iterator."""

    def __init__(self, tasks: Iterator[_Task]) -> None:
        self.tasks, self._lock = tasks, threading.Lock()

    def __iter__(self) -> Iterator[_Task]:
        return self.tasks
