"""What the leases are doing: the daemon reads every page twice a second and remembers the last minute."""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from typing import Any

from . import page
from .page import COLUMNS, IDLE, Reading

KEPT_SECONDS = 60.0
EVERY_SECONDS = 0.5
SHORTEST_WINDOW = 0.2  # seconds; where the daemon has looked for less, the averages are since the lease began


def is_memory(fd: int) -> bool:
    """A memory file, which can be read without ever waiting. A client could send us anything."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        return True
    except OSError:
        return False


class Usage:
    """The readings of one lease's page. Without a descriptor (another user's process, seen by a daemon that did not grant its
    lease) nothing is known, and nothing is made up: it counts as idle."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._kept: deque[Reading] = deque()
        self.sample()

    def sample(self) -> None:
        """A reading, kept. Where the page changes all the time, one that may be inconsistent is taken: what it is wrong by is
        then one of those very short intervals."""
        if self._fd is None:
            return
        found = None
        for _ in range(8):
            try:
                data = os.pread(self._fd, page.SIZE, 0)
                again = os.pread(self._fd, page.SIZE, 0)
            except OSError:
                return
            found = page.read(data, time.monotonic_ns()) or found
            if found is not None and data == again:
                break
        if found is not None:
            self._kept.append(found)
            while self._kept[0].at < found.at - KEPT_SECONDS * 1e9:
                self._kept.popleft()

    def about(self, window: float) -> dict[str, Any]:
        """For tables: shares of time, steps a second, loss, memory, how long idle."""
        self.sample()
        if not self._kept:
            return {
                "shares": {c: 100.0 if c == "idle" else 0.0 for c in COLUMNS},
                "state": "unknown" if self._fd is None else "idle",
            }
        last = self._kept[-1]
        first: Reading | None = next((r for r in reversed(self._kept) if r.at <= last.at - window * 1e9), self._kept[0])
        if first is not None and last.at - first.at < SHORTEST_WINDOW * 1e9:
            first = None
        seconds = (last.at - first.at if first is not None else last.since_start) / 1e9
        busy = [t / 1e9 for t in last.times]
        busy[IDLE] = max(0.0, last.since_start / 1e9 - sum(busy[1:]))
        return {
            "shares": page.shares(first, last),
            "seconds": dict(zip(COLUMNS, busy, strict=True)),
            "state": COLUMNS[last.state],
            "steps": last.steps,
            "steps_per_second": (last.steps - (first.steps if first is not None else 0)) / seconds if seconds > 0 else 0.0,
            "loss": last.loss if last.loss == last.loss else None,
            "memory_bytes": last.num_bytes,
            "idle_seconds": (last.at - last.since) / 1e9 if last.state == IDLE else 0.0,
        }

    def stuck_for(self) -> float:
        """Seconds inside a section or a collective without any progress."""
        return self._kept[-1].stuck / 1e9 if self._kept else 0.0

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
