"""What can only be changed for the whole process: done where no other thread of Python would notice."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import warnings
from collections.abc import Iterator


def alone() -> bool:
    """Whether every other Python thread, if there is any, waits for an event: a progress bar's, say."""
    with _without_garbage_collection():  # which may deadlock there before Python 3.11.9 (gh-106883)
        frames = sys._current_frames()
    others = [frames.get(t.ident or 0) for t in threading.enumerate() if t is not threading.current_thread()]
    return all(f is not None and f.f_code is threading.Condition.wait.__code__ for f in others)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Of torch's machinery. Where others run they may be seen, rather than that others' are not."""
    if not alone():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Tracing and code generation make millions of objects that live to the end; looking through them for cycles as often
    as Python does by default took a fifth of a compile."""
    before = gc.get_threshold()
    if not alone():
        yield
        return
    gc.set_threshold(20_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
