"""poptorch.DataLoader: torch's, with batches for a whole call; each process of several gets its own part of the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, Sampler, TensorDataset, default_collate

from .accessor import AsynchronousDataAccessor
from .enums import DataLoaderMode
from .errors import ArgumentError, Error
from .options import Options, options_or_error


class _Loader(TorchLoader[Any]):
    """torch's. Tensors in memory are indexed a batch at a time, instead of row by row and put together again."""

    def __iter__(self) -> Any:
        whole = type(self.dataset) is TensorDataset and self.collate_fn is default_collate and not self.num_workers
        if not whole or self.batch_sampler is None or self.pin_memory:
            return super().__iter__()
        tensors = self.dataset.tensors  # type: ignore[attr-defined]
        return ([t[rows] for t in tensors] for rows in self.batch_sampler)


class DataLoader(_Loader):
    def __init__(
        self,
        options: Options,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        options = options_or_error(options)
        if not isinstance(mode, DataLoaderMode):
            raise ArgumentError(
                "poptorch-loader", "the mode of a DataLoader", found=repr(mode), expected="poptorch.DataLoaderMode"
            )
        if async_options and mode == DataLoaderMode.Sync:
            raise ArgumentError("poptorch-loader", "async_options are for the modes Async and AsyncRebatched", found=repr(mode))
        options._freeze()
        steps = options.device_iterations * options.Training.gradient_accumulation * options.replication_factor
        shuffle = bool(shuffle)
        self._terminated = False
        self._accessor: AsynchronousDataAccessor | None = None
        self._options, self._mode = options, mode
        if batch_sampler is not None:
            if batch_size not in (1, None) or shuffle:
                raise ArgumentError("poptorch-loader", "batch_sampler is exclusive with batch_size and shuffle",
                                    fix="the sampler says which rows make a batch")  # fmt: skip
            if mode == DataLoaderMode.AsyncRebatched:
                raise ArgumentError("poptorch-loader", "batch_sampler and AsyncRebatched exclude each other")
            if options.Distributed.numProcesses > 1 and auto_distributed_partitioning:
                raise _not_divided("batch_sampler", "batches")
            size = getattr(batch_sampler, "batch_size", None)
            self._combined = None if size is None else size * steps
            kwargs["batch_sampler"] = _Joined(batch_sampler, steps, drop_last)
        else:
            self._combined = None if batch_size is None else _positive(batch_size) * steps
            self._add_rows(dataset, shuffle, drop_last, auto_distributed_partitioning, rebatched_worker_size, kwargs)
        workers: dict[str, Any] = (
            {} if num_workers == 0 and persistent_workers is None else {"persistent_workers": persistent_workers is not False}
        )
        super().__init__(dataset, num_workers=num_workers, **workers, **kwargs)
        if mode != DataLoaderMode.Sync:
            rebatched = {"rebatched_size": self._combined, "rebatched_drop_last": drop_last}
            more = rebatched if mode == DataLoaderMode.AsyncRebatched else {}
            # A loader of its own: the thread that loads from it keeps this one neither alive nor busy.
            inner: TorchLoader[Any] = _Loader(dataset, num_workers=num_workers, **workers, **kwargs)
            self._accessor = AsynchronousDataAccessor(inner, **{**more, **(async_options or {})})

    def _add_rows(
        self, dataset: Any, shuffle: bool, drop_last: bool, divided: bool, worker_size: int | None, kwargs: Any
    ) -> None:
        """torch's arguments for which rows come in which order, and how many at a time."""
        options, distributed = self._options, self._options.Distributed
        rebatched = self._mode == DataLoaderMode.AsyncRebatched
        if self._combined is None:
            if rebatched:
                raise ArgumentError("poptorch-loader", "AsyncRebatched needs a batch_size")
            kwargs["batch_size"] = None
        else:
            kwargs["batch_size"] = (worker_size or 1) if rebatched else self._combined
            kwargs["drop_last"] = drop_last and not rebatched
        iterable = isinstance(dataset, IterableDataset)
        if distributed.numProcesses > 1 and divided:
            if iterable:
                raise ArgumentError("poptorch-loader", "an IterableDataset cannot be divided among processes",
                                    fix="auto_distributed_partitioning=False, and divide it in the data set")  # fmt: skip
            if kwargs.get("sampler") is not None:
                raise _not_divided("sampler", "rows")
            if shuffle and options.random_seed is None:
                raise ArgumentError("poptorch-loader", "shuffling among several processes needs a random seed",
                                    fix="the same options.randomSeed(...) in every process")  # fmt: skip
            kwargs["sampler"] = Share(len(dataset), distributed.processId, distributed.numProcesses, self._combined or 1, shuffle,
                                      options.random_seed or 0, drop_last)  # fmt: skip
        elif not iterable:
            kwargs["shuffle"] = shuffle

    @property
    def combinedBatchSize(self) -> int | None:
        """Rows of one call: batch_size for every iteration, micro-batch and replica."""
        return self._combined

    @property
    def options(self) -> Options:
        return self._options

    def __len__(self) -> int:
        if self._mode == DataLoaderMode.AsyncRebatched:
            assert self._combined is not None
            rows = len(self.sampler) if not isinstance(self.dataset, IterableDataset) else len(self.dataset)  # type: ignore[arg-type]
            return (
                rows // self._combined
                if self._accessor is None or self._accessor.drops_last
                else math.ceil(rows / self._combined)
            )
        return super().__len__()

    def __iter__(self) -> Any:
        if self._terminated and self._accessor is not None:
            raise Error("poptorch-loader", "the loader was terminated", fix="make another one")
        return super().__iter__() if self._accessor is None else iter(self._accessor)

    def terminate(self) -> None:
        """Ends what loads ahead. It has no effect in the mode Sync."""
        self._terminated = True
        if self._accessor is not None:
            self._accessor.terminate()


class _Joined(Sampler[list[int]]):
    """Several batches of a sampler as one."""

    def __init__(self, sampler: Any, count: int, drop_last: bool) -> None:
        self.sampler, self.count, self.drop_last = sampler, count, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        rows, held = list[int](), 0
        for batch in self.sampler:
            rows, held = [*rows, *batch], held + 1
            if held == self.count:
                yield rows
                rows, held = [], 0
        if rows and not self.drop_last:
            yield rows

    def __len__(self) -> int:
        return len(self.sampler) // self.count if self.drop_last else math.ceil(len(self.sampler) / self.count)


class Share(Sampler[int]):
    """One process's rows, in another order each epoch if they are shuffled.

    drop_last: as many as every other's, a whole number of batches. Where they are shuffled, what is left over comes first in the
    next epoch's order, so that no row is never seen. Otherwise every row is somebody's: the first processes may have one more."""

    def __init__(self, rows: int, process: int, processes: int, batch: int, shuffle: bool, seed: int, drop_last: bool) -> None:
        self.rows, self.shuffle, self.seed, self.epoch = rows, shuffle, seed, 0
        own, more = divmod(rows, processes)
        if drop_last:
            own, more = own // batch * batch or own, 0
        self.first = process * own + min(process, more)
        self.own = own + (process < more)
        self.used = own * processes + more
        self.left: list[int] = []

    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] = range(self.rows)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            shuffled = torch.randperm(self.rows, generator=generator).tolist()
            waiting = set(self.left)
            order = [*self.left, *(i for i in shuffled if i not in waiting)]
            self.left = list(order[self.used :])
            kept = order[: self.used]
            mixed = torch.randperm(len(kept), generator=generator).tolist()
            order = [kept[i] for i in mixed]
        self.epoch += 1
        return iter(order[self.first : self.first + self.own])

    def __len__(self) -> int:
        return self.own


def _not_divided(name: str, what: str) -> ArgumentError:
    return ArgumentError("poptorch-loader", f"a {name} cannot be divided among processes",
                         found=f"{name}=... in one of several processes: each would take all of its {what}",
                         fix=f"auto_distributed_partitioning=False, and a {name} of this process's {what} alone")  # fmt: skip


def _positive(size: Any) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ArgumentError("poptorch-loader", "the batch size", found=repr(size), expected="a whole number, 1 or more; or None")
    return size
