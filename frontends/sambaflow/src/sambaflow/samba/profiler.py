"""samba.session.profiler: named events with their times. It can be used at any moment, started or not."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ContextDecorator
from typing import Any


class _Event(ContextDecorator):
    def __init__(self, profiler: Profiler, name: str) -> None:
        self.profiler, self.name = profiler, name
        self._handles: list[Any] = []

    def __enter__(self) -> _Event:
        self._handles.append(self.profiler.start_event(self.name))
        return self

    def __exit__(self, *_: object) -> None:
        self.profiler.end_event(self._handles.pop())


class Profiler:
    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}  # seconds

    def reset(self) -> None:
        self.times.clear()

    def start_event(self, name: str) -> tuple[str, float]:
        return name, time.perf_counter()

    def end_event(self, handle: tuple[str, float]) -> None:
        name, begin = handle
        self.times.setdefault(name, []).append(time.perf_counter() - begin)

    def event(self, name: str) -> _Event:
        """A context manager, and a decorator."""
        return _Event(self, name)

    def _of(self, keys: Sequence[str] | str | None, warmup: int) -> dict[str, list[float]]:
        wanted = list(self.times) if keys is None else [keys] if isinstance(keys, str) else list(keys)
        return {k: self.times[k][warmup:] or self.times[k] for k in wanted if self.times.get(k)}

    def get_latencies(self, keys: Sequence[str] | str | None = None, warmup: int = 0) -> dict[str, float]:
        """Mean seconds of each event."""
        return {k: statistics.fmean(v) for k, v in self._of(keys, warmup).items()}

    def get_throughputs(self, keys: Sequence[str] | str | None = None, num_samples: int = 1, warmup: int = 0) -> dict[str, float]:
        """Samples a second, where each event handles num_samples."""
        return {k: num_samples / v if v else float("inf") for k, v in self.get_latencies(keys, warmup).items()}

    def print_statistics(
        self,
        keys: Sequence[str] | str | None = None,
        warmup: int = 0,
        num_samples_per_iter: int | None = None,
        measurements: Sequence[str] | None = None,
        show: bool = True,
        **_: Any,
    ) -> str:
        lines = [f"{'event':<30} {'count':>8} {'mean':>12} {'median':>12} {'total':>12}"]
        for name, times in self._of(keys, warmup).items():
            mean = statistics.fmean(times)
            lines.append(f"{name:<30} {len(times):>8} {mean:>10.6f} s {statistics.median(times):>10.6f} s {sum(times):>10.3f} s")
            if num_samples_per_iter and mean:
                lines[-1] += f" {num_samples_per_iter / mean:>12.1f} samples/s"
        text = "\n".join(lines)
        if show:
            print(text)
        return text
