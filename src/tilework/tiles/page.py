"""The page: where a process writes what its tiles are doing, and the daemon reads it. 16 KiB of shared memory, in slots of 256.

Each session has a slot of its own and writes there alone, one call at a time; slot 0 is the process's. Numbers are int64. A
writer makes the slot's sequence number odd, changes fields, and makes it even again. Times are nanoseconds of the monotonic
clock, which all processes of a machine share. The driver (compiler/driver.cpp) writes the same slots from native code.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SIZE, SLOT = 16384, 256
NUM_SLOTS = SIZE // SLOT
MAGIC = 0x32454C4954  # "TILE2"
COLUMNS = ("idle", "exec", "pload", "aload", "chkpt", "quiesce")
IDLE, EXEC, PLOAD, ALOAD, CHKPT, QUIESCE = range(6)
_MAGIC, _SEQUENCE, _STATE, _SINCE, _FIRST, _STEPS, _LOSS, _BYTES = 0, 1, 2, 3, 4, 10, 11, 12
_READ = struct.Struct("<13q")
_SHOWN = (EXEC, QUIESCE, PLOAD, CHKPT, ALOAD)  # of several sessions at once: the first that somebody is in
_NO_LOSS = struct.unpack("<q", struct.pack("<d", float("nan")))[0]


class Page:
    """The writer's side: a memory file of this process. The daemon gets its descriptor with the request for a lease."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("tilework-page", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, SIZE)
        self._memory = mmap.mmap(self.fd, SIZE)
        self._view = memoryview(self._memory).cast("q")
        self._free = list(range(NUM_SLOTS - 1, 0, -1))
        self._lock = threading.Lock()
        self.process.restart()

    @property
    def process(self) -> Slot:
        return Slot(self, 0)

    def slot(self) -> Slot:
        """For one more session. Where there are more sessions than slots, it writes where nobody looks."""
        with self._lock:
            return Slot(self, self._free.pop()) if self._free else Slot(Page(), 0)

    def give_back(self, number: int) -> None:
        with self._lock:
            if number:
                self._free.append(number)

    def close(self) -> None:
        """The descriptor. The memory stays as long as somebody writes there."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self) -> Reading:
        found = read(bytes(self._memory[:]), time.monotonic_ns())
        assert found is not None
        return found


class Slot:
    def __init__(self, page: Page, number: int) -> None:
        self._page, self.number, self._pid = page, number, os.getpid()
        self._view = page._view[number * SLOT // 8 : (number + 1) * SLOT // 8]
        v = self._view
        if v[_MAGIC] != MAGIC:  # a slot that was used before keeps its times: they are the process's
            v[_SINCE], v[_LOSS] = time.monotonic_ns(), _NO_LOSS
            v[_MAGIC] = MAGIC

    def restart(self) -> None:
        """From now on: what went before, such as waiting for the lease, does not count."""
        v = self._view
        v[_SEQUENCE] += 1
        for i in range(len(COLUMNS)):
            v[_FIRST + i] = 0
        v[_STATE], v[_SINCE] = IDLE, time.monotonic_ns()
        v[_SEQUENCE] += 1

    @property
    def address(self) -> int:
        """For native code. The page lives as long as this object."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._page._memory)) + self.number * SLOT

    def enter(self, state: int) -> int:
        """From now on the time goes to `state`. Returns the state before. A fork of the process writes nothing."""
        if os.getpid() != self._pid:
            return IDLE
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
        if os.getpid() == self._pid:
            self._view[_STEPS] += count

    def set_bytes(self, count: int) -> None:
        """Memory of the session."""
        if os.getpid() == self._pid:
            self._view[_BYTES] = count

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._view[_BYTES], self._view[_LOSS] = 0, _NO_LOSS
            self._page.give_back(self.number)


@dataclass(frozen=True)
class Reading:
    """A page as it was at one moment, all slots together, with running intervals added to their columns."""

    at: int  # ns
    since_start: int  # ns since the page was made
    times: tuple[int, ...]  # ns in each of COLUMNS but idle, which is the rest
    state: int
    since: int  # when that state began
    stuck: int  # ns inside a section or a collective without progress, the longest
    steps: int
    loss: float
    num_bytes: int


def read(data: bytes, now: int) -> Reading | None:
    """None: not a page, or caught in the middle of a change (try again)."""
    if len(data) < SIZE:
        return None
    start, times = now, [0] * len(COLUMNS)
    state, since, stuck, steps, num_bytes, loss, newest = IDLE, 0, 0, 0, 0, float("nan"), -1
    for number in range(NUM_SLOTS):
        v = _READ.unpack_from(data, number * SLOT)
        if v[_MAGIC] != MAGIC:
            if number == 0:
                return None
            continue
        if v[_SEQUENCE] % 2 or not 0 <= v[_STATE] < len(COLUMNS):
            return None
        own = list(v[_FIRST : _FIRST + len(COLUMNS)])
        own[v[_STATE]] += max(0, now - v[_SINCE])
        start = min(start, now - sum(own))
        for i in range(1, len(COLUMNS)):
            times[i] += own[i]
        if v[_STATE] in (EXEC, QUIESCE):
            stuck = max(stuck, now - v[_SINCE])
        if v[_STATE] != IDLE and (state == IDLE or _SHOWN.index(v[_STATE]) < _SHOWN.index(state)):
            state, since = v[_STATE], v[_SINCE]
        if state == IDLE:
            since = max(since, v[_SINCE])
        steps += v[_STEPS]
        num_bytes += v[_BYTES]
        if v[_LOSS] != _NO_LOSS and v[_SINCE] > newest:
            newest, loss = v[_SINCE], struct.unpack("<d", struct.pack("<q", v[_LOSS]))[0]
    return Reading(now, now - start, tuple(times), state, since, stuck, steps, loss, num_bytes)


def shares(before: Reading | None, after: Reading) -> dict[str, float]:
    """Percent of the time between two readings in each column (without a first one: since the start). They add up to 100; where
    several sessions were busy at once, their times are scaled to the time that went by."""
    wall = after.at - before.at if before is not None else after.since_start
    spent = [max(0, b - (before.times[i] if before is not None else 0)) for i, b in enumerate(after.times)]
    busy = sum(spent)
    if wall <= 0:
        return {c: 100.0 if i == after.state else 0.0 for i, c in enumerate(COLUMNS)}
    scale = 100.0 / max(wall, busy)
    found = {c: s * scale for c, s in zip(COLUMNS, spent, strict=True)}
    found["idle"] = max(0.0, 100.0 - sum(s for c, s in found.items() if c != "idle"))
    return found
