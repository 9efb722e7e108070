"""What the leases are doing: the daemon reads every page twice a second and remembers the last minute."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from . import page
from .page import EXEC, IDLE, QUIESCE, Reading

KEPT_SECONDS = 60.0
EVERY_SECONDS = 0.5


class Usage:
    """The readings of one lease's page."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._kept: deque[Reading] = deque()
        self.sample()

    def sample(self) -> Reading | None:
        """A reading, kept. Where the page changes all the time, an inconsistent one is taken at last: what it is wrong by is then
        one of those very short intervals."""
        found = None
        for _ in range(8):
            data = os.pread(self._fd, page.SIZE, 0)
            now = time.monotonic_ns()
            reading = page.read(data, now)
            if reading is not None:
                found = reading
                if os.pread(self._fd, 16, 0) == data[:16]:  # the same sequence number: nothing changed meanwhile
                    break
        if found is not None:
            self._kept.append(found)
            while self._kept[0].at < found.at - KEPT_SECONDS * 1e9:
                self._kept.popleft()
        return found

    def over(self, window: float) -> tuple[Reading, Reading] | None:
        """The newest reading, and the one that lies a window before it (or the oldest there is)."""
        if not self._kept:
            return None
        last = self._kept[-1]
        first = next((r for r in reversed(self._kept) if r.at <= last.at - window * 1e9), self._kept[0])
        return first, last

    def about(self, window: float) -> dict[str, Any]:
        """For tables: shares of time, steps a second, loss, memory, how long idle."""
        self.sample()
        pair = self.over(window)
        if pair is None:
            return {"shares": {c: 100.0 if c == "idle" else 0.0 for c in page.COLUMNS}, "state": "idle"}
        first, last = pair
        seconds = (last.at - first.at) / 1e9
        return {
            "shares": page.shares(first, last),
            "seconds": dict(zip(page.COLUMNS, (t / 1e9 for t in last.times), strict=True)),
            "state": page.COLUMNS[last.state],
            "steps": last.steps,
            "steps_per_second": (last.steps - first.steps) / seconds if seconds > 0 else 0.0,
            "loss": last.loss if last.loss == last.loss else None,
            "memory_bytes": last.num_bytes,
            "idle_seconds": (last.at - last.since) / 1e9 if last.state == IDLE else 0.0,
        }

    def stuck_for(self) -> float:
        """Seconds inside a section or a collective without any progress."""
        if not self._kept:
            return 0.0
        last = self._kept[-1]
        return (last.at - last.since) / 1e9 if last.state in (EXEC, QUIESCE) else 0.0

    def close(self) -> None:
        os.close(self._fd)
