"""AsynchronousDataAccessor: batches are loaded ahead by a thread, while the device computes without Python's lock."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilework.frontend.ahead import one_thread_here

from .enums import SharingStrategy
from .errors import ArgumentError, Error

_LOOK = 0.1  # seconds between looks at whether somebody still wants the data
_GRACE = 1.0  # seconds that whoever leaves a loop waits for its thread
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
        self._last: _Epoch | None = None  # begun, of all
        if early_preload:
            self._ready = self._start()

    def __len__(self) -> int:
        count = len(self.dataset)
        if self.size is None:
            return count
        rows = count * (getattr(self.dataset, "batch_size", None) or 1)
        return rows // self.size if self.drops_last else math.ceil(rows / self.size)

    def _start(self) -> _Epoch:
        """One thread at a time reads the data: torch's loader with persistent workers has one iterator for all epochs."""
        if self._last is not None:
            self._last.wait()
        epoch = self._last = _Epoch(self._batches(), self.buffer_size)
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
            self._thread.join(timeout=_GRACE)

    def wait(self) -> None:
        """Until the thread has ended, however long its last batch takes. Ctrl-C is noticed."""
        self._stopped.set()
        while self._thread.is_alive():
            self._thread.join(timeout=_LOOK)


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

    one_thread_here()
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
    held: list[list[Any]] = []
    rows, spec = 0, None
    for batch in batches:
        leaves, spec = tree_flatten(batch, is_leaf=_are_texts)
        rows += _rows(leaves)
        held.append(leaves)
        while rows >= size:
            whole = [_joined(parts) for parts in zip(*held, strict=True)]
            yield tree_unflatten([t[:size] for t in whole], spec)
            rows -= size
            held = [[t[size:] for t in whole]] if rows else []
    if rows and not drop_last and spec is not None:
        yield tree_unflatten([_joined(parts) for parts in zip(*held, strict=True)], spec)


def _are_texts(tree: Any) -> bool:
    """One text for each row: what torch's own collate function leaves as they are."""
    return type(tree) in (list, tuple) and bool(tree) and all(isinstance(t, (str, bytes)) for t in tree)


def _rows(leaves: Sequence[Any]) -> int:
    """The same in every part of a batch."""
    for leaf in leaves:
        if not _are_texts(leaf) and not (isinstance(leaf, torch.Tensor) and leaf.dim()):
            found = "a tensor without dimensions" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise Error("poptorch-loader", "a part of a batch has no rows that could be put into other batches",
                        found=found, expected="tensors whose first dimension is the rows, or lists with one text a row",
                        fix="DataLoaderMode.Async, or leave it out in the collate function")  # fmt: skip
    counts = sorted({len(leaf) for leaf in leaves})
    if len(counts) != 1:
        raise Error("poptorch-loader", "the parts of a batch have different numbers of rows",
                    found=", ".join(map(str, counts)) or "a batch with nothing in it", expected="the same number in each",
                    fix="DataLoaderMode.Async, or another collate function")  # fmt: skip
    return counts[0]


def _joined(parts: Sequence[Any]) -> Any:
    """Tensors, or lists, or tuples."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts))
    return type(parts[0])(itertools.chain.from_iterable(parts))
