"""What a session stands on: the tiles of its process, where some were asked for, with as many threads as they have cores; and a
page that says what it is doing."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..tiles import holding
from ..tiles.holding import Held
from ..tiles.page import Page, Slot

_unseen: Page | None = None  # of a process that the daemon does not know: nobody else sees it
_threads_before = 0


class Footing:
    """close() gives it back; so does forgetting the session."""

    def __init__(self, tiles: Any = None, *, leased: bool = True) -> None:
        global _unseen, _threads_before
        self.num_threads: int | None = None
        if not leased or not holding.wanted():
            if _unseen is None or not _unseen.process.is_own:  # none yet, or that of the process we were forked from
                _unseen = Page(shared=False)
            self.page = _unseen.slot()
            self.close: Callable[[], Any] = weakref.finalize(self, self.page.close)
            return
        held = holding.hold(tiles)
        try:
            self.page = held.page.slot()
            if held.lease is not None:
                self.num_threads = held.lease.num_cores if "OMP_NUM_THREADS" not in os.environ else None
                _threads_before = _threads_before or torch.get_num_threads()
            self.close = weakref.finalize(self, _give_back, held, self.page)
        except BaseException:
            holding.let_go(held)
            raise


def _give_back(held: Held, page: Slot) -> None:
    global _threads_before
    page.close()
    if holding.let_go(held) and _threads_before:
        torch.set_num_threads(_threads_before)
        _threads_before = 0
