"""poptorch.profiling.Channel: spans that a program marks, kept as a list and shown by the log at level debug."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from .logs import logger


class Channel:
    def __init__(self, name: str) -> None:
        self.name = name
        self.spans: list[tuple[str, float]] = []  # name, seconds

    @contextlib.contextmanager
    def tracepoint(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((name, time.perf_counter() - start))
            logger.debug(f"{self.name}: {name} took {self.spans[-1][1] * 1e3:.3f} ms")

    def instrument(self, target: Any, *methods: str) -> Any:
        """Each call of these methods, or of a function, is a span."""
        if not methods:
            return self._spanned(target, getattr(target, "__name__", "call"))
        for method in methods:
            setattr(target, method, self._spanned(getattr(target, method), method))
        return target

    def _spanned(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self.tracepoint(name):
                return function(*args, **kwargs)

        return called
