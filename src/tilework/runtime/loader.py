"""A loader: many steps' batches at a time, loaded ahead in the background, into memory that is used again.

loader = tilework.Loader(torch_data_loader, num_steps=64)      # or any iterable of batches
loader = tilework.Loader((x, y), batch_size=32, shuffle=True)  # or data that fits in memory
for result in session.loop(loader):
    print(result.loss)

Batches come in the order in which the source gives them, and random orders draw from torch's generators exactly as the
source itself would. Data in memory is not batched one by one: rows are gathered for many steps at once, and data in its own
order is not even copied.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, default_collate

from ..artifact.structure import Structure, flatten, unflatten
from ..errors import UserError
from ..threads import one_thread_here

_END = object()


@dataclass(frozen=True)
class Chunk:
    """The inputs of several steps. Its memory is used again once the next chunk has been asked for."""

    inputs: tuple[Any, ...]  # nested as the source's batches; num_steps batches side by side
    num_steps: int


class Loader:
    """Batches for session.loop, loaded ahead in the background, many steps at a time.

    source      a torch DataLoader, any iterable of batches, or data in memory: tensors or arrays of equal length, or a
                TensorDataset (then batch_size is needed)
    num_steps   steps per chunk; session.loop runs a chunk in one call. The last chunk may have fewer
    drop_last   skip a smaller last batch; otherwise the artifact needs a signature of its size
    prefetch    how many chunks to load ahead
    shuffle, seed   for data in memory; without a seed the order is drawn from torch's global generator
    """

    def __init__(
        self,
        source: Any,
        *,
        num_steps: int = 64,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
    ) -> None:
        for name, value in (("num_steps", num_steps), ("prefetch", prefetch), ("batch_size", batch_size)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError("loader", f"Loader: {name}", found=repr(value), expected="a whole number, 1 or more")
        self.num_steps, self.prefetch, self.drop_last = num_steps, prefetch, drop_last
        in_memory = _in_memory(source)
        if in_memory is not None:
            if batch_size is None:
                raise UserError("loader", "Loader: data in memory needs a batch size", fix="give batch_size=")
            self._source: Any = _Rows(in_memory, batch_size, _order(len(in_memory[0][0]), shuffle, seed), drop_last)
        elif batch_size is not None or shuffle or seed is not None:
            raise UserError("loader", "Loader: batch_size, shuffle and seed are for data in memory",
                            found=type(source).__name__, fix="set them where that source is made")  # fmt: skip
        elif isinstance(source, DataLoader) and _is_plain(source):
            found = _in_memory(source.dataset)
            assert found is not None
            size = source.batch_sampler.batch_size  # type: ignore[union-attr]
            self._source = _Rows(found, size, lambda: _drawn(source), drop_last or source.drop_last)
        elif isinstance(source, Iterable):
            self._source = source
        else:
            raise UserError("loader", "Loader: not a source of batches", found=type(source).__name__,
                            expected="a DataLoader, an iterable of batches, or tensors with batch_size=")  # fmt: skip

    def __iter__(self) -> Iterator[Chunk]:
        return self.chunks()

    def chunks(self, batch_dim: int | None = 0, sizes: Sequence[int] = ()) -> Iterator[Chunk]:
        """One pass over the source. The batches of a chunk lie side by side along `batch_dim`. `sizes`: rows that a last batch
        may have where it is smaller than the others; it is a chunk of its own."""
        if isinstance(self._source, _Rows):
            order = self._source.order()
            if order is None and batch_dim == 0:
                yield from self._source.slices(self.num_steps, sizes)
                return
            produce = self._source.gathered(order, self.num_steps, sizes) if batch_dim == 0 else None
            if produce is not None:
                yield from _ahead(produce, self.prefetch)
                return
            batches: Iterator[Any] = self._source.batches(order, sizes)
        else:
            batches = iter(self._source)
        # The first batch is taken here and not in the background: that is when a shuffling sampler draws its seed.
        first = next(batches, _END)
        if first is _END:
            return
        yield from _ahead(_copier(batches, first, self.num_steps, batch_dim or 0, self.drop_last, sizes), self.prefetch)


# ---- data in memory ----


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _in_memory(source: Any) -> tuple[list[Tensor], Structure] | None:
    """The rows of tensors that lie in memory, and how they are nested; None for anything else."""
    if type(source) is TensorDataset:
        source = source.tensors
    if not isinstance(source, (Tensor, np.ndarray, tuple, list, dict)):
        return None
    leaves, structure = flatten(source, _is_leaf)
    if not leaves or any(not _is_leaf(leaf) for leaf in leaves):
        return None
    if structure[0] == "list" and isinstance(source, list):  # a list of batches: an ordinary iterable
        return None
    tensors = [torch.as_tensor(leaf).detach() for leaf in leaves]
    lengths = {len(t) if t.dim() else 0 for t in tensors}
    if len(lengths) != 1 or 0 in lengths:
        raise UserError("loader", "Loader: the tensors have different numbers of rows, or none",
                        found=", ".join(str(list(t.shape)) for t in tensors), expected="the same first dimension")  # fmt: skip
    return [t.contiguous() for t in tensors], structure


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether the loader only picks rows of tensors, in batches: then picking many at once gives the same."""
    return (
        type(loader.dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and loader.num_workers == 0
        and not loader.pin_memory
        and type(loader.batch_sampler) is BatchSampler
        and all(t.device.type == "cpu" and t.layout == torch.strided for t in loader.dataset.tensors)
    )


def _drawn(loader: DataLoader[Any]) -> np.ndarray:
    """The order of rows for one epoch. A DataLoader draws a base seed for workers first, which moves the generator on."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return np.fromiter(loader.batch_sampler.sampler, dtype=np.int64)  # type: ignore[union-attr]


def _order(length: int, shuffle: bool, seed: int | None) -> Callable[[], np.ndarray | None]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return lambda: torch.randperm(length, generator=generator).numpy() if shuffle else None


class _Rows:
    """Tensors whose rows are samples. `order()` gives the rows of one epoch; None: all of them as they lie."""

    def __init__(
        self, found: tuple[list[Tensor], Structure], batch_size: int, order: Callable[[], np.ndarray | None], drop_last: bool
    ) -> None:
        self.tensors, self.structure = found
        self.batch_size, self.order, self.drop_last = batch_size, order, drop_last

    def _parts(self, length: int, num_steps: int, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """Chunks of whole batches, and the rest: (first row, last row + 1, steps)."""
        rest = 0 if self.drop_last else length % self.batch_size
        if rest and rest not in sizes:
            raise UserError("loader-short", f"{length} samples do not divide into batches of {self.batch_size}",
                            found=f"a last batch of {rest}", expected="equal batches, or a signature of that size",
                            fix=f"compile with batch_sizes=[{self.batch_size}, {rest}]; or drop_last=True leaves the last ones "
                            "out; or choose another batch size")  # fmt: skip
        whole, size = length - length % self.batch_size, num_steps * self.batch_size
        parts = [(at, min(at + size, whole), (min(at + size, whole) - at) // self.batch_size) for at in range(0, whole, size)]
        return parts + ([(whole, length, 1)] if rest else [])

    def _chunk(self, leaves: list[Tensor], num_steps: int) -> Chunk:
        whole = unflatten(self.structure, iter(leaves))
        return Chunk(whole if isinstance(whole, tuple) else (whole,), num_steps)

    def slices(self, num_steps: int, sizes: Sequence[int]) -> Iterator[Chunk]:
        for start, end, steps in self._parts(len(self.tensors[0]), num_steps, sizes):
            yield self._chunk([t[start:end] for t in self.tensors], steps)

    def gathered(self, order: np.ndarray | None, num_steps: int, sizes: Sequence[int]) -> Producer:
        assert order is not None
        chunks = self._parts(len(order), num_steps, sizes)
        arrays = [_as_array(t) for t in self.tensors]
        size = num_steps * self.batch_size

        def room() -> list[Tensor]:
            return [torch.empty((size, *t.shape[1:]), dtype=t.dtype) for t in self.tensors]

        def produce(next_room: Callable[[], list[Tensor] | None]) -> Iterator[Chunk]:
            for start, end, steps in chunks:
                rows = order[start:end]
                target = next_room()
                if target is None:
                    return
                parts = [t[: len(rows)] for t in target]
                for source, part in zip(arrays, parts, strict=True):
                    np.take(source, rows, axis=0, out=_as_array(part), mode="clip")  # clip: straight into `out`
                yield self._chunk(parts, steps)

        return Producer(room, produce)

    def batches(self, order: np.ndarray | None, sizes: Sequence[int]) -> Iterator[Any]:
        order = np.arange(len(self.tensors[0])) if order is None else order
        for start, end, _ in self._parts(len(order), 1, sizes):
            rows = torch.from_numpy(order[start:end])
            yield unflatten(self.structure, iter([t[rows] for t in self.tensors]))


def _as_array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory for NumPy, which does not know bfloat16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


# ---- in the background ----


@dataclass(frozen=True)
class Producer:
    room: Callable[[], list[Tensor]]  # makes the memory of one chunk
    produce: Callable[[Callable[[], list[Tensor] | None]], Iterator[Chunk]]  # fills rooms until there are no more


def _copier(batches: Iterator[Any], first: Any, num_steps: int, dim: int, drop_last: bool, sizes: Sequence[int] = ()) -> Producer:
    """Copies batches of any source side by side into rooms. Where a batch has a size of its own, it is a chunk of its own."""
    leaves, structure = flatten(first, _is_leaf)
    kinds = [(torch.as_tensor(leaf).dtype, torch.as_tensor(leaf).shape) for leaf in leaves]

    def whole(shape: torch.Size, count: int) -> tuple[int, ...]:
        return tuple(n * count if i == dim else n for i, n in enumerate(shape)) if dim < len(shape) else (count, *shape)

    def room() -> list[Tensor]:
        return [torch.empty(whole(shape, num_steps), dtype=dtype) for dtype, shape in kinds]

    def fit(batch: Any, number: int) -> list[Tensor] | None:
        """The batch's tensors; None for a short last batch that may be dropped."""
        found, its = flatten(batch, _is_leaf)
        tensors = [torch.as_tensor(leaf).detach() for leaf in found]
        same = its == structure and [(t.dtype, t.shape) for t in tensors] == kinds
        if same:
            return tensors
        short = its == structure and all(t.dtype == d and t.dim() == len(s) and _cut(t.shape, dim) == _cut(s, dim)
                                         for t, (d, s) in zip(tensors, kinds, strict=True))  # fmt: skip
        if short and {t.shape[dim] for t in tensors if t.dim() > dim} <= set(sizes):
            return tensors
        if short and drop_last:
            return None
        raise UserError("loader-short", f"batch {number} differs from the first one",
                        found=", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors),
                        expected=", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for d, s in kinds),
                        fix="compile with batch_sizes= for its size, or leave it out: drop_last=True")  # fmt: skip

    def produce(next_room: Callable[[], list[Tensor] | None]) -> Iterator[Chunk]:
        number, batch, error = 0, first, None
        while batch is not _END and error is None:
            target = next_room()
            if target is None:
                return
            steps = 0
            while steps < num_steps and batch is not _END:
                try:
                    tensors = fit(batch, number)
                    if tensors is not None and [t.shape for t in tensors] != [s for _, s in kinds]:
                        if steps:
                            break  # it is the first of the next chunk
                        number, batch = number + 1, next(batches, _END)
                        alone = unflatten(structure, iter([t.contiguous() for t in tensors]))
                        yield Chunk(tuple(alone) if isinstance(alone, (tuple, list)) else (alone,), 1)
                        continue
                    if tensors is not None:
                        _place(target, tensors, steps, dim)
                        steps += 1
                    number += 1
                    batch = next(batches, _END)
                except Exception as e:  # the user's own: shown as it is, after the batches that came before it
                    e.add_note(f"(raised while loading batch {number}, counting from 0)")
                    error = e
                    break
            if steps:
                parts = [_part(t, shape, steps, num_steps, dim) for t, (_, shape) in zip(target, kinds, strict=True)]
                inputs = unflatten(structure, iter(parts))
                yield Chunk(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), steps)
        if error is not None:
            raise error

    return Producer(room, produce)


def _cut(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """Without the batch."""
    return tuple(n for i, n in enumerate(shape) if i != dim)


def _place(target: list[Tensor], tensors: list[Tensor], step: int, dim: int) -> None:
    for room, tensor in zip(target, tensors, strict=True):
        if dim < tensor.dim():
            size = tensor.shape[dim]
            room.narrow(dim, step * size, size).copy_(tensor)
        else:
            room[step].copy_(tensor)


def _part(room: Tensor, shape: torch.Size, steps: int, num_steps: int, dim: int) -> Tensor:
    if steps == num_steps:
        return room
    return room.narrow(dim, 0, steps * shape[dim]) if dim < len(shape) else room[:steps]


def ahead(items: Iterable[Chunk], prefetch: int) -> Iterator[Chunk]:
    """Items of a source that makes each in memory of its own, taken in the background."""

    def produce(next_room: Callable[[], list[Tensor] | None]) -> Iterator[Chunk]:
        for item in items:
            if next_room() is None:
                return
            yield item

    return _ahead(Producer(list, produce), prefetch)


def _ahead(producer: Producer, prefetch: int) -> Iterator[Chunk]:
    """Runs the producer in a thread. A chunk's room goes back to it when the next chunk is asked for."""
    rooms: queue.SimpleQueue[list[Tensor] | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    in_use: queue.SimpleQueue[list[Tensor]] = queue.SimpleQueue()
    for _ in range(prefetch + 1):
        rooms.put(producer.room())

    def next_room() -> list[Tensor] | None:
        room = rooms.get()
        if room is not None:
            in_use.put(room)
        return room

    def work() -> None:
        one_thread_here()
        try:
            for chunk in producer.produce(next_room):
                ready.put(chunk)
            ready.put(_END)
        except BaseException as e:
            ready.put(e)

    thread = threading.Thread(target=work, name="tilework-loader", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if item is _END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
            rooms.put(in_use.get())
    finally:
        rooms.put(None)  # the loop was left early: the thread stops at its next room
        thread.join(timeout=5.0)
