"""The tiles under a session: a lease of the process, its page, and as many threads as its tiles have cores."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..tiles import holding
from ..tiles.client import Lease
from ..tiles.page import Page, Slot

_unleased: Page | None = None  # of a process without a lease: nobody else sees it
_threads_before = 0


class Footing:
    """What a session stands on. close() gives it back; so does forgetting the session."""

    def __init__(self, tiles: Any = None, *, leased: bool = True) -> None:
        global _unleased, _threads_before
        self.lease: Lease | None = holding.hold(tiles) if leased and holding.wanted() else None
        if self.lease is None:
            if _unleased is None or not _unleased.process.is_own:  # none yet, or that of the process we were forked from
                _unleased = Page(shared=False)
            self.page = _unleased.slot()
            self.num_threads: int | None = None
            self.close: Callable[[], Any] = weakref.finalize(self, self.page.close)
            return
        try:
            self.page = self.lease.page.slot()
            self.num_threads = self.lease.num_cores if "OMP_NUM_THREADS" not in os.environ else None
            _threads_before = _threads_before or torch.get_num_threads()
            self.close = weakref.finalize(self, _give_back, self.lease, self.page)
        except BaseException:
            holding.let_go(self.lease)
            raise


def _give_back(lease: Lease, page: Slot) -> None:
    global _threads_before
    page.close()
    if holding.let_go(lease) and _threads_before:
        torch.set_num_threads(_threads_before)
        _threads_before = 0
