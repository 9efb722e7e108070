"""Sources: records by number. Every format is one; none of them knows about batches, shuffling or ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import MachineError, TileworkError, UserError

Record = tuple[Tensor, ...]  # what a step takes, in order, without the batch: inputs, then targets


class Source(Protocol):
    """Records that are read one by one or many at a time; only those that are asked for are in memory."""

    def __len__(self) -> int: ...

    def rows(self, numbers: np.ndarray) -> Record:
        """These records, stacked: each tensor is [len(numbers), ...]. BadRecord where one cannot be read."""

    def place(self, number: int) -> str:
        """Where a record lies, for messages: a file, and the number in it."""


class BadRecord(Exception):
    """A record that cannot be read. `number` counts within the whole source."""

    def __init__(self, number: int, place: str, why: str) -> None:
        super().__init__(number, place, why)
        self.number, self.place, self.why = number, place, why

    def __str__(self) -> str:
        return f"record {self.number} ({self.place}): {self.why}"


class Arrays:
    """Tensors or arrays with a row for each record: in memory, or memory maps of files of any size. `pictures`: bytes of 0 to 255
    are brightness, and become 0 to 1 where a step takes floating-point numbers."""

    def __init__(self, arrays: Sequence[Tensor | np.ndarray], names: Sequence[str] = (), *, pictures: bool = False) -> None:
        if not arrays or len({len(a) for a in arrays}) != 1:
            raise UserError("data-shape", "the arrays have different numbers of rows, or there are none",
                            found=", ".join(str(list(a.shape)) for a in arrays) or "none",
                            expected="a row for each record")  # fmt: skip
        self.arrays = [a.detach().contiguous() if isinstance(a, Tensor) else a for a in arrays]
        self.names = list(names) or [f"array {i}" for i in range(len(arrays))]
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.arrays[0])

    def rows(self, numbers: np.ndarray) -> Record:
        return tuple(_picked(a, numbers) if isinstance(a, Tensor) else as_tensor(a[numbers]) for a in self.arrays)

    def place(self, number: int) -> str:
        return f"row {number} of {', '.join(self.names)}"


def _picked(tensor: Tensor, numbers: np.ndarray) -> Tensor:
    """By NumPy: torch would use threads of its own, which then wait for more, and take the cores from the step for a while."""
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know
        return torch.from_numpy(np.take(tensor.view(torch.int16).numpy(), numbers, axis=0)).view(torch.bfloat16)
    return torch.from_numpy(np.take(tensor.numpy(), numbers, axis=0))


class Each:
    """A source that reads its records one by one, by a function from the number to the record: tensors, arrays or numbers, in the
    order of the step's inputs and targets. What the first of them that can be read looks like is what all have to look like.

    count   how many there are
    place   from the number to where that record lies, for messages: str, or a function that names a file"""

    def __init__(self, count: int, read: Callable[[int], Record], place: Callable[[int], str]) -> None:
        self._count, self._read, self.place = count, read, place
        self._kinds: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    def rows(self, numbers: np.ndarray) -> Record:
        found = [self._checked(number) for number in numbers.tolist()]
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True))

    def _checked(self, number: int) -> Record:
        if self._kinds is None:
            self._kinds = self._first_kinds()
        record = self._one(number)
        if _kinds(record) != self._kinds:
            raise BadRecord(
                number, self.place(number), f"it has {', '.join(_kinds(record))}; others have {', '.join(self._kinds)}"
            )
        return record

    def _one(self, number: int) -> Record:
        try:
            return tuple(t if isinstance(t, Tensor) else as_tensor(np.asarray(t)) for t in self._read(number))
        except TileworkError:
            raise
        except Exception as e:  # whatever a decoder raises
            raise BadRecord(number, self.place(number), f"{type(e).__name__}: {e}") from e

    def _first_kinds(self) -> list[str]:
        for number in range(self._count):
            try:
                return _kinds(self._one(number))
            except BadRecord as e:
                last = e
        raise last


def _kinds(record: Record) -> list[str]:
    return [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in record]


def as_tensor(array: np.ndarray) -> Tensor:
    """A tensor of its own. Types that torch does not have become the next larger one."""
    wider = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}
    native = array.dtype.newbyteorder("=")
    return torch.from_numpy(np.array(array, dtype=wider.get(native, native)))


def extra(package: str, for_what: str) -> MachineError:
    return MachineError("data-extra", f"{for_what} needs the package {package}", found="it is not installed",
                        fix="pip install 'tilework[data]'")  # fmt: skip


def existing(path: str | Path) -> Path:
    if not Path(path).exists():
        raise UserError("data-missing", f"{path}: there is no such file or folder")
    return Path(path)
