"""Who holds which tiles and who waits for some. No input or output here: the daemon tells it what happened, and acts on it."""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import UserError
from .asks import Ask, capped
from .placement import grants
from .site import Limits
from .topology import Node


@dataclass(eq=False)
class Waiting:
    """A request in the queue."""

    ask: Ask
    uid: int
    pid: int
    start: int  # of the process, in the kernel's ticks
    command: str
    job: str
    until: float  # on the monotonic clock
    whose: Any = None  # the daemon's connection
    page: int = -1  # descriptor numbers in the client
    stack: int = -1
    capped: str = ""
    since: float = field(default_factory=time.monotonic)


class Lease(msgspec.Struct, eq=False):
    """Also what is written down for the next daemon, which may be of an older or newer version."""

    id: str
    tiles: tuple[int, ...]
    uid: int
    pid: int
    start: int  # of the process, in the kernel's ticks: a reused pid is another process
    command: str
    job: str
    platform: str
    since: float  # wall clock, seconds
    page: int = -1  # descriptor numbers in the process
    stack: int = -1
    cpus: tuple[int, ...] = ()  # what the tiles were then: the next daemon may see this node in another shape
    gpus: tuple[int, ...] = ()
    bare: bool = False  # its lock's file was removed: nobody can see any more whether the process still has the lock


class Ledger:
    def __init__(self, node: Node, limits: Limits) -> None:
        self.node, self.limits = node, limits
        self.leases: dict[str, Lease] = {}
        self.queue: list[Waiting] = []
        self.drained: dict[str, str] = {}  # path of a tile -> reason

    @property
    def usable(self) -> set[int]:
        return {t.index for t in self.node.tiles if t.path not in self.drained}

    @property
    def free(self) -> set[int]:
        return self.usable - {i for lease in self.leases.values() for i in lease.tiles}

    def held_by(self, uid: int) -> int:
        return sum(len(lease.tiles) for lease in self.leases.values() if lease.uid == uid)

    def wait(self, request: Waiting) -> None:
        """Into the queue, if this request can ever be served and its user may wait for one more."""
        waiting = sum(w.uid == request.uid for w in self.queue)
        if waiting >= self.limits.requests_per_user:
            raise UserError("tiles-limit", "too many requests of this user are waiting already", found=str(waiting),
                            expected=f"at most {self.limits.requests_per_user}", fix="wait until some are served")  # fmt: skip
        request.ask, request.capped = capped(request.ask, self.node)
        most = self.limits.tiles_per_user
        if most is not None and self._size(request.ask) > most:
            raise UserError("tiles-limit", "the request is larger than one user may hold", found=str(request.ask),
                            expected=f"at most {most} tiles (limits.tiles_per_user of the site file)",
                            fix="ask for fewer tiles: TILEWORK_TILES, or tiles=")  # fmt: skip
        bisect.insort(self.queue, request, key=lambda w: w.since)

    def _size(self, ask: Ask) -> int:
        if ask.tiles is not None:
            return len(ask.tiles)
        if ask.count is not None:
            return ask.count
        return (ask.chips or 1) * len(next(c for c in self.node.chips if (c[0].gpu is not None) == ask.gpu))

    def next_one(self) -> tuple[Waiting, list[int]] | None:
        """Who is served now. He leaves the queue; the caller makes his lease before it asks again.

        A user at his limit steps aside: he must not keep others waiting for what he himself holds."""
        most = self.limits.tiles_per_user
        able = [(w, w.ask) for w in self.queue if most is None or self.held_by(w.uid) + self._size(w.ask) <= most]
        for request, tiles in grants(self.node, self.free, self.usable, able):
            assert isinstance(request, Waiting)
            self.queue.remove(request)
            return request, tiles
        return None

    def forget(self, request: Waiting) -> None:
        if request in self.queue:
            self.queue.remove(request)

    def in_the_way(self, ask: Ask) -> list[Lease]:
        """The leases that a request waits for."""
        wanted = set(ask.tiles) if ask.tiles is not None else {t.index for t in self.node.tiles}
        return [lease for lease in self.leases.values() if wanted & set(lease.tiles)]

    def drain(self, path: str, on: bool, reason: str) -> list[str]:
        """No new lease gets these tiles; who holds them keeps them."""
        paths = [t.path for t in self.node.find(path)]
        for p in paths:
            if on:
                self.drained[p] = reason
            else:
                self.drained.pop(p, None)
        return paths
