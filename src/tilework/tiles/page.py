"""The page: where a process writes what its tiles are doing, and anybody can read it. 256 bytes, shared through a file.

Numbers are int64. A writer makes the sequence number odd, changes fields, and makes it even again; a reader tries again where it
changed. Times are nanoseconds of the monotonic clock, which all processes of a machine share. The driver (compiler/driver.cpp)
writes the same page from native code.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SIZE = 256
MAGIC = 0x31454C4954  # "TILE1"
COLUMNS = ("idle", "exec", "pload", "aload", "chkpt", "quiesce")
IDLE, EXEC, PLOAD, ALOAD, CHKPT, QUIESCE = range(6)
_MAGIC, _SEQUENCE, _STATE, _SINCE, _FIRST, _STEPS, _LOSS, _BYTES = 0, 1, 2, 3, 4, 10, 11, 12
_READ = struct.Struct("<13q")


class Page:
    """The writer's side. Without a file descriptor it is the process's own memory: nobody else sees it."""

    def __init__(self, fd: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if fd is None else fd, SIZE)
        self._view = memoryview(self._memory).cast("q")
        if self._view[_MAGIC] != MAGIC:
            self._view[_SINCE] = time.monotonic_ns()
            self._view[_LOSS] = struct.unpack("<q", struct.pack("<d", float("nan")))[0]
            self._view[_MAGIC] = MAGIC

    @property
    def address(self) -> int:
        """For native code. The page lives as long as this object."""
        import ctypes

        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def enter(self, state: int) -> int:
        """From now on the time goes to `state`. Returns the state before."""
        v, now = self._view, time.monotonic_ns()
        before = v[_STATE]
        v[_SEQUENCE] += 1
        v[_FIRST + before] += now - v[_SINCE]
        v[_STATE], v[_SINCE] = state, now
        v[_SEQUENCE] += 1
        return before

    @contextmanager
    def during(self, state: int) -> Iterator[None]:
        before = self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    def add_steps(self, count: int) -> None:
        self._view[_STEPS] += count

    def set_bytes(self, count: int) -> None:
        """Memory of the process's sessions."""
        self._view[_BYTES] = count

    @property
    def num_bytes(self) -> int:
        return self._view[_BYTES]


@dataclass(frozen=True)
class Reading:
    """A page as it was at one moment, with the running interval added to its column."""

    at: int  # ns
    times: tuple[int, ...]  # ns in each of COLUMNS
    state: int
    since: int
    steps: int
    loss: float
    num_bytes: int


def read(data: bytes, now: int) -> Reading | None:
    """None: not a page, or caught in the middle of a change (try again)."""
    if len(data) < _READ.size:
        return None
    values = _READ.unpack_from(data)
    state = values[_STATE]
    if values[_MAGIC] != MAGIC or values[_SEQUENCE] % 2 or not 0 <= state < len(COLUMNS):
        return None
    times = list(values[_FIRST : _FIRST + len(COLUMNS)])
    times[state] += max(0, now - values[_SINCE])
    loss = struct.unpack("<d", struct.pack("<q", values[_LOSS]))[0]
    return Reading(now, tuple(times), state, values[_SINCE], values[_STEPS], loss, values[_BYTES])


def shares(before: Reading, after: Reading) -> dict[str, float]:
    """Percent of the time between two readings in each column; they add up to 100."""
    spent = [max(0, b - a) for a, b in zip(before.times, after.times, strict=True)]
    total = sum(spent)
    if not total:
        return {c: 100.0 if i == after.state else 0.0 for i, c in enumerate(COLUMNS)}
    return {c: 100.0 * s / total for c, s in zip(COLUMNS, spent, strict=True)}
