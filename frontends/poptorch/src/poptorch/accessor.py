"""AsynchronousDataAccessor: batches are loaded ahead by a thread, while the device computes without Python's lock."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .enums import SharingStrategy
from .errors import ArgumentError

_LOOK = 0.1  # seconds between looks at whether somebody still wants the data
_END = object()


class AsynchronousDataAccessor:
    """Iterates over a data set or a loader. Its batches are not reused: a program may keep them.

    buffer_size        batches that are loaded before they are asked for
    load_indefinitely  the next epoch is loaded ahead as well
    early_preload      begin now, and not at the first iter()
    rebatched_size     rows of what it yields, put together from smaller batches
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
        rebatched_drop_last: bool = True,
    ) -> None:
        if not isinstance(buffer_size, int) or buffer_size < 1:
            raise ArgumentError("poptorch-loader", "buffer_size", found=repr(buffer_size), expected="a whole number, 1 or more")
        if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
            raise ArgumentError(
                "poptorch-loader", "AsynchronousDataAccessor takes a data set or a loader", found=type(dataset).__name__
            )
        self.dataset, self.buffer_size, self.indefinitely = dataset, buffer_size, load_indefinitely
        self.size, self.drops_last = rebatched_size, rebatched_drop_last
        self._ready: _Epoch | None = None  # not yet asked for
        self._current: _Epoch | None = None
        if early_preload:
            self._ready = self._start()

    def __len__(self) -> int:
        count = len(self.dataset)
        if self.size is None:
            return count
        rows = count * (getattr(self.dataset, "batch_size", None) or 1)
        return rows // self.size if self.drops_last else math.ceil(rows / self.size)

    def _start(self) -> _Epoch:
        epoch = _Epoch(self._batches(), self.buffer_size)
        weakref.finalize(self, epoch.stop)
        return epoch

    def _batches(self) -> Iterable[Any]:
        items = _items(self.dataset)
        return items if self.size is None else rebatched(items, self.size, self.drops_last)

    def __iter__(self) -> Iterator[Any]:
        if self._current is not None:  # somebody has left a loop early
            self._current.stop()
        epoch = self._current = self._ready or self._start()
        self._ready = None
        return self._yielded(epoch)

    def _yielded(self, epoch: _Epoch) -> Iterator[Any]:
        try:
            while (batch := epoch.next()) is not _END:
                yield batch
            if self.indefinitely and self._current is epoch:
                self._ready = self._start()
        finally:
            epoch.stop()

    def terminate(self) -> None:
        """Ends the threads. Iterating again starts new ones."""
        for epoch in (self._current, self._ready):
            if epoch is not None:
                epoch.stop()
        self._current = self._ready = None

    stop = terminate

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.terminate()


class _Epoch:
    """One pass over the data, in a thread."""

    def __init__(self, batches: Iterable[Any], size: int) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(size)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_load, args=(batches, self._queue, self._stopped), daemon=True, name="poptorch-loader"
        )
        self._thread.start()

    def next(self) -> Any:
        """The next batch, or _END. What the data set raises is raised here; Ctrl-C is noticed while waiting."""
        while True:
            try:
                item = self._queue.get(timeout=_LOOK)
            except queue.Empty:
                if self._stopped.is_set():
                    return _END
                continue
            if isinstance(item, _Failed):
                raise item.error
            return item

    def stop(self) -> None:
        self._stopped.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _load(batches: Iterable[Any], ready: queue.Queue[Any], stopped: threading.Event) -> None:
    """In the thread; it holds neither the accessor nor the epoch, so that both can go."""

    def put(item: Any) -> bool:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=_LOOK)
                return True
        return False

    try:
        for batch in batches:
            if not put(batch):
                return
        put(_END)
    except BaseException as e:
        put(_Failed(e))


def _items(dataset: Any) -> Iterator[Any]:
    if hasattr(dataset, "__iter__"):
        yield from dataset
    else:
        for i in range(len(dataset)):
            yield dataset[i]


def rebatched(batches: Iterable[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """Batches of `size` rows out of smaller ones, in their order."""
    held: list[list[torch.Tensor]] = []
    rows, spec = 0, None
    for batch in batches:
        leaves, spec = tree_flatten(batch)
        held.append(leaves)
        rows += leaves[0].shape[0]
        while rows >= size:
            whole = [torch.cat(parts) for parts in zip(*held, strict=True)]
            yield tree_unflatten([t[:size] for t in whole], spec)
            rows -= size
            held = [[t[size:] for t in whole]] if rows else []
    if rows and not drop_last and spec is not None:
        yield tree_unflatten([torch.cat(parts) for parts in zip(*held, strict=True)], spec)
