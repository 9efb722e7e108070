"""Batches that are loaded ahead, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..threads import one_thread_here as one_thread_here

T = TypeVar("T")
_END = object()


def ahead(
    items: Iterable[Any], change: Callable[[Any], T], size: int, *, timeout: float, ends_on_error: bool = False
) -> Iterator[T]:
    """change(item) of every item, up to `size` of them before they are asked for. What the thread raises is raised here, or ends
    the loop. TimeoutError where no item comes within `timeout` seconds."""
    ready: queue.Queue[Any] = queue.Queue(size)
    stop = threading.Event()

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def load() -> None:
        one_thread_here()
        try:
            for item in items:
                if not put(change(item)):
                    return
            put(_END)
        except BaseException as e:
            put(_END if ends_on_error else e)

    thread = threading.Thread(target=load, daemon=True, name="tilework-ahead")
    thread.start()
    try:
        while True:
            try:
                item = ready.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"no batch within {timeout} s") from None
            if item is _END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(timeout=5)
