"""The page: where a process writes what its tiles are doing, and the daemon reads it. 16 KiB of shared memory, in slots of 256.

Each session has a slot of its own and writes there alone, one call at a time; slot 0 is the process's. Its second half is the
process's record: where its time goes. At every moment the process is in one state, whatever its threads do: the first of exec,
load, copy, save, wait and reduce that some session is in, else idle. So the columns are measured, none is counted twice, and they
add up to the time that went by. A writer makes the record's sequence number odd, changes fields, and makes it even again.

Numbers are int64, times nanoseconds of the monotonic clock, which all processes of a machine share. The native driver
(compiler/driver.cpp) writes the same fields. Python cannot take the lock that its threads need for the record: as soon as a
driver is loaded, Python's own changes go through it (`use_native`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SIZE, SLOT, RECORD = 16384, 256, 128
NUM_SLOTS = SIZE // SLOT
MAGIC = 0x34454C4954  # "TILE4": with the layout, its last letter changes
COLUMNS = ("idle", "exec", "load", "copy", "save", "wait", "reduce")
IDLE, EXEC, LOAD, COPY, SAVE, WAIT, REDUCE = range(7)
# Of a slot. The state lies before the time and is written after it: who reads a state never sees the time of an earlier one.
_MAGIC, _STATE, _SINCE, _STEPS, _LOSS, _BYTES = range(6)
_SLOT = struct.Struct("<6q")
# Of the record. _LOCK is the driver's. _COUNTS: how many sessions are in each state but idle, 10 bits a state.
_SEQUENCE, _LOCK, _COUNTS, _NOW, _NOW_SINCE, _BEGAN, _FIRST = range(7)
_RECORD = struct.Struct("<13q")
_BITS = 10
_ONE = (0, *(1 << _BITS * i for i in range(len(COLUMNS) - 1)))
_NO_LOSS = struct.unpack("<q", struct.pack("<d", float("nan")))[0]
_TRIES = 8

Enter = Callable[[int, int, int], int]  # addresses of a record and a slot, the state -> the state before
_native: Enter | None = None
_lock = threading.RLock()  # a session may be forgotten, and its slot closed, in the middle of anything


def _in_a_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_a_child)


def use_native(enter: Enter) -> None:
    """From now on states change through the driver's function: threads of native code write to the same record. When this
    returns, no thread is in the middle of a change of Python's own."""
    global _native
    with _lock:
        _native = _native or enter


class Page:
    """The writer's side: a memory file of this process. The daemon gets its descriptor with the request for a lease. A page
    that is not shared has none: nobody looks there."""

    def __init__(self, shared: bool = True) -> None:
        self.pid = os.getpid()
        self.fd = -1
        if shared:
            self.fd = os.memfd_create("tilework-page", os.MFD_CLOEXEC)
            try:
                os.ftruncate(self.fd, SIZE)
                self._memory = mmap.mmap(self.fd, SIZE)
            except BaseException:
                self.close()
                raise
        else:
            self._memory = mmap.mmap(-1, SIZE)
        self._held = ctypes.c_char.from_buffer(self._memory)  # the memory stays where it is as long as this lives
        self.address = ctypes.addressof(self._held)
        self._view = memoryview(self._memory).cast("q")
        self._record = self._view[RECORD // 8 : SLOT // 8]
        self._free = list(range(NUM_SLOTS - 1, 0, -1))  # without a lock: pop and append are one step each
        _ = self.process  # makes it a page
        self.restart()

    @property
    def process(self) -> Slot:
        return Slot(self, self, 0)

    def slot(self) -> Slot:
        """For one more session. Where there are more sessions than slots, only its time is seen."""
        try:
            number = self._free.pop()
        except IndexError:
            return Slot(self, Page(shared=False), 0)
        return Slot(self, self, number)

    def give_back(self, number: int) -> None:
        if number:
            self._free.append(number)

    def restart(self) -> None:
        """From now on: what went before, such as waiting for the lease, does not count. Before there are sessions."""
        r, now = self._record, time.monotonic_ns()
        r[_SEQUENCE] |= 1
        for i in range(len(COLUMNS)):
            r[_FIRST + i] = 0
        r[_NOW_SINCE] = r[_BEGAN] = now
        r[_SEQUENCE] += 1

    def close(self) -> None:
        """The descriptor. The memory stays as long as somebody writes there."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self) -> Reading:
        found = look(lambda size, at: bytes(self._memory[at : at + size]))
        assert found is not None
        return found


class Slot:
    """A session's place on a page. `home` has the memory: another page where the first is full."""

    def __init__(self, page: Page, home: Page, number: int) -> None:
        self._page, self._home, self.number, self._pid = page, home, number, page.pid
        self._view = home._view[number * SLOT // 8 : (number * SLOT + RECORD) // 8]
        self.address, self.record = home.address + number * SLOT, page.address + RECORD  # for native code
        v = self._view
        if v[_MAGIC] != MAGIC and self.is_own:  # a slot that was used before keeps its steps: they are the process's
            v[_SINCE], v[_LOSS] = time.monotonic_ns(), _NO_LOSS
            v[_MAGIC] = MAGIC

    @property
    def is_own(self) -> bool:
        """Not closed, and not of the process that this one was forked from: to that page a fork writes nothing."""
        return os.getpid() == self._pid

    def restart(self) -> None:
        self._page.restart()

    def enter(self, state: int) -> int:
        """From now on the session is in `state`. Returns the state before."""
        if os.getpid() != self._pid:
            return IDLE
        native = _native
        if native is None:
            with _lock:
                native = _native
                if native is None:
                    return self._enter(state)
        return native(self.record, self.address, state)

    def _enter(self, state: int) -> int:
        v, r = self._view, self._page._record
        before, now = v[_STATE], time.monotonic_ns()
        counts = r[_COUNTS] + _ONE[state] - _ONE[before]
        first = ((counts & -counts).bit_length() + _BITS - 1) // _BITS
        # Nothing is called from here on, so that no signal and no other thread comes in between.
        r[_SEQUENCE] |= 1
        v[_SINCE] = now
        v[_STATE] = state
        r[_COUNTS] = counts
        if first != r[_NOW]:
            r[_FIRST + r[_NOW]] += now - r[_NOW_SINCE]
            r[_NOW_SINCE] = now
            r[_NOW] = first
        r[_SEQUENCE] += 1
        return before

    @contextmanager
    def during(self, state: int) -> Iterator[None]:
        before = self._view[_STATE]
        try:
            self.enter(state)
            yield
        finally:
            self.enter(before)

    @contextmanager
    def beside(self, state: int) -> Iterator[None]:
        """For something that goes on beside the session's calls, in another thread: in a slot of its own."""
        slot = self._page.slot()
        try:
            with slot.during(state):
                yield
        finally:
            slot.close()

    def times(self) -> dict[str, float]:
        """Seconds of the process in each column."""
        return {c: ns / 1e9 for c, ns in zip(COLUMNS, self._page.read().times, strict=True)}

    def add_steps(self, count: int) -> None:
        if self.is_own:
            self._view[_STEPS] += count

    def set_bytes(self, count: int) -> None:
        """Memory of the session."""
        if self.is_own:
            self._view[_BYTES] = count

    def close(self) -> None:
        """From now on nothing is written: the next session may be there."""
        if not self.is_own:
            return
        if self._view[_STATE] != IDLE:
            self.enter(IDLE)
        self._view[_BYTES], self._view[_LOSS] = 0, _NO_LOSS
        self._pid = -1
        if self._home is self._page:
            self._page.give_back(self.number)


@dataclass(frozen=True)
class Reading:
    """A page as it was at one moment."""

    at: int  # ns
    began: int  # ns: when the times began
    times: tuple[int, ...]  # ns in each of COLUMNS, the running interval included
    state: int
    since: int  # when that state began
    stuck: int  # ns inside a section or a collective without progress, the longest
    steps: int
    loss: float
    num_bytes: int

    @property
    def since_start(self) -> int:
        return max(0, self.at - self.began)


def look(get: Callable[[int, int], bytes]) -> Reading | None:
    """A reading of what get(size, offset) returns. Where the page changes all the time, one that may be inconsistent is taken:
    what it is wrong by is then one of those very short intervals."""
    data, now = b"", 0
    for _ in range(_TRIES):
        data, now = get(SIZE, 0), time.monotonic_ns()
        sequence = data[RECORD : RECORD + 8]
        if len(data) < SIZE or (sequence[0] % 2 == 0 and sequence == get(8, RECORD)):
            break
    return read(data, now)


def read(data: bytes, now: int) -> Reading | None:
    """None: not a page."""
    if len(data) < SIZE:
        return None
    r = _RECORD.unpack_from(data, RECORD)
    if not 0 <= r[_NOW] < len(COLUMNS):
        return None
    times = list(r[_FIRST:])
    times[r[_NOW]] += max(0, now - r[_NOW_SINCE])
    stuck, steps, num_bytes, loss, newest = 0, 0, 0, float("nan"), -1
    for number in range(NUM_SLOTS):
        v = _SLOT.unpack_from(data, number * SLOT)
        if v[_MAGIC] != MAGIC:
            if number == 0:
                return None
            continue
        if v[_STATE] in (EXEC, WAIT, REDUCE):
            stuck = max(stuck, now - v[_SINCE])
        steps += v[_STEPS]
        num_bytes += v[_BYTES]
        if v[_LOSS] != _NO_LOSS and v[_SINCE] > newest:
            newest, loss = v[_SINCE], struct.unpack("<d", struct.pack("<q", v[_LOSS]))[0]
    return Reading(now, r[_BEGAN], tuple(times), r[_NOW], r[_NOW_SINCE], stuck, steps, loss, num_bytes)


def shares(before: Reading | None, after: Reading) -> dict[str, float]:
    """Percent of the time between two readings in each column (without a first one: since the start). They add up to 100."""
    spent = [max(0, b - (before.times[i] if before is not None else 0)) for i, b in enumerate(after.times)]
    total = sum(spent)
    if total <= 0:
        return {c: 100.0 if i == after.state else 0.0 for i, c in enumerate(COLUMNS)}
    return {c: 100.0 * s / total for c, s in zip(COLUMNS, spent, strict=True)}
