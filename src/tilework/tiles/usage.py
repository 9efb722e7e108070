"""What the leases are doing: the daemon reads every page twice a second, and when it is asked, and remembers the last minute."""

from __future__ import annotations

import os
from bisect import bisect_right
from typing import Any

from . import page
from .page import COLUMNS, IDLE, Reading

KEPT_SECONDS = 60.0
EVERY_SECONDS = 0.5
KEPT_EVERY_SECONDS = 0.1  # whoever asks more often sees what is newest, but leaves nothing behind
SHORTEST_WINDOW = 0.2  # seconds; where the daemon has looked for less, the averages are since the lease began


class Usage:
    """The readings of one process's page. Without a descriptor (we may not see it) nothing is known, and nothing is made up."""

    def __init__(self, fd: int | None) -> None:
        self.fd = fd
        self._last: Reading | None = None
        self._counted: Reading | None = None  # up to here spent() has told
        self._kept: list[Reading] = []  # in order, at most KEPT_SECONDS / KEPT_EVERY_SECONDS
        self.sample()

    def sample(self) -> None:
        """A new reading."""
        if self.fd is None:
            return
        fd = self.fd
        try:
            found = page.look(lambda size, at: os.pread(fd, size, at))
        except OSError:
            return
        if found is None:
            return
        if self._last is not None and found.began != self._last.began:  # the lease was taken: what was before does not count
            self._kept.clear()
        self._last = found
        if not self._kept or found.at - self._kept[-1].at >= KEPT_EVERY_SECONDS * 1e9:
            self._kept.append(found)
            del self._kept[: self._place(found.at - KEPT_SECONDS * 1e9)]

    def _place(self, at: float) -> int:
        """How many of the kept readings are from then or earlier."""
        return bisect_right(self._kept, at, key=lambda r: r.at)

    def _before(self, last: Reading, window: float) -> Reading | None:
        """The newest reading that is older than the window. None: the window is longer than the lease, or nothing is known but
        the times since the lease began."""
        cut = last.at - max(window, SHORTEST_WINDOW) * 1e9
        if last.began >= cut:
            return None
        if found := self._place(cut):
            return self._kept[found - 1]
        first = self._kept[0] if self._kept else last  # a daemon that began later than the window
        return first if last.at - first.at >= SHORTEST_WINDOW * 1e9 else None

    def about(self, window: float) -> dict[str, Any]:
        """For tables: shares of time, steps a second, loss, memory, how long idle."""
        self.sample()
        last = self._last
        if last is None:
            return {"shares": {}, "state": "unknown"}
        first = self._before(last, window)
        seconds = (last.at - first.at if first is not None else last.since_start) / 1e9
        return {
            "shares": page.shares(first, last),
            "seconds": {c: t / 1e9 for c, t in zip(COLUMNS, last.times, strict=True)},
            "state": COLUMNS[last.state],
            "steps": last.steps,
            "steps_per_second": (last.steps - (first.steps if first is not None else 0)) / seconds if seconds > 0 else 0.0,
            "loss": last.loss if last.loss == last.loss else None,
            "memory_bytes": last.num_bytes,
            "idle_seconds": max(0.0, (last.at - last.since) / 1e9) if last.state == IDLE else 0.0,
        }

    def spent(self) -> tuple[list[float], int]:
        """Seconds in each column, and steps, since this was last asked: for counters. What a page says is its process's word, so
        no more time is believed than went by."""
        self.sample()
        last, before, self._counted = self._last, self._counted, self._last
        if last is None or last is before:
            return [0.0] * len(COLUMNS), 0
        if before is None or before.began != last.began:
            most, then, steps = max(0, last.at - last.began), (0,) * len(COLUMNS), 0 if before is None else before.steps
        else:
            most, then, steps = last.at - before.at, before.times, before.steps
        times = [min(max(0, now - past), most) / 1e9 for now, past in zip(last.times, then, strict=True)]
        return times, min(max(0, last.steps - steps), 10**9)

    def stuck_for(self) -> float:
        """Seconds inside a section or a collective without any progress."""
        return self._last.stuck / 1e9 if self._last is not None else 0.0

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
