"""Who holds which tiles and who waits for some. No input or output here: the daemon tells it what happened, and acts on it."""

from __future__ import annotations

import bisect
import time
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from . import alive
from .asks import Ask, capped
from .leases import Lease
from .machine import ranges
from .placement import fitted, grants, inside
from .records import Record
from .site import Limits
from .topology import Node


@dataclass(eq=False)
class Waiting:
    """A request in the queue."""

    record: Record  # what the lease will be
    ask: Ask
    until: float  # on the monotonic clock
    page: int = -1  # our descriptor of the client's page
    whose: Any = None  # the daemon's connection
    cpus: Set[int] | None = None  # that the process may use; None: all
    for_job: bool = False
    within: Set[int] = frozenset()  # tiles that it may have
    note: str = ""
    since: float = field(default_factory=time.monotonic)


class Ledger:
    def __init__(self, node: Node, limits: Limits) -> None:
        self.node, self.limits = node, limits
        self.leases: dict[str, Lease] = {}  # and sessions that share the machine: they have no tiles
        self.queue: list[Waiting] = []
        self.drained: dict[str, str] = {}  # path of a tile -> reason

    @property
    def holding(self) -> list[Lease]:
        return [lease for lease in self.leases.values() if lease.record.tiles]

    @property
    def usable(self) -> set[int]:
        return {t.index for t in self.node.tiles if t.path not in self.drained}

    @property
    def held(self) -> set[int]:
        return {i for lease in self.leases.values() for i in lease.record.tiles}

    def held_by(self, uid: int) -> int:
        return sum(len(lease.record.tiles) for lease in self.leases.values() if lease.record.uid == uid)

    def wait(self, request: Waiting) -> None:
        """Into the queue, if this request can ever be served and its user may wait for one more."""
        waiting = sum(w.record.uid == request.record.uid for w in self.queue)
        if waiting >= self.limits.requests_per_user:
            raise UserError("tiles-limit", "too many requests of this user are waiting already", found=str(waiting),
                            expected=f"at most {self.limits.requests_per_user}", fix="wait until some are served")  # fmt: skip
        ask, note = capped(request.ask, self.node)
        every = {t.index for t in self.node.tiles}
        request.within = every if request.cpus is None else inside(self.node, request.cpus)
        fits = fitted(self.node, request.within, ask)
        if fits is None:
            raise self._outside(request, ask)
        request.ask, request.note = fits, note
        most = self.limits.tiles_per_user
        if most is not None and self._size(fits) > most:
            raise UserError("tiles-limit", "the request is larger than one user may hold", found=str(fits),
                            expected=f"at most {most} tiles (limits.tiles_per_user of the site file)",
                            fix="ask for fewer tiles: TILEWORK_TILES, --tiles or tiles=")  # fmt: skip
        bisect.insort(self.queue, request, key=lambda w: w.since)

    def _outside(self, request: Waiting, ask: Ask) -> UserError:
        """It could wait for ever."""
        cpus, have = ranges(request.cpus or ()), len(request.within)
        these = f"tiles {ranges(request.within)}" if have else "no whole tile"
        return UserError("tiles-mask", f"{ask} cannot lie on the CPUs that this process may use",
                         found=f"CPUs {cpus} (taskset, a container or the batch system), which have {these}",
                         expected="tiles whose CPUs are all among those",
                         fix=("ask for fewer or other tiles (TILEWORK_TILES, --tiles, tiles=), or " if have else "")
                         + "let the process use more CPUs; TILEWORK_TILES=shared takes no tiles")  # fmt: skip

    def _size(self, ask: Ask) -> int:
        if ask.tiles is not None:
            return len(ask.tiles)
        if ask.count is not None:
            return ask.count
        return (ask.chips or 1) * len(next(c for c in self.node.chips if (c[0].gpu is not None) == ask.gpu))

    def next_one(self) -> tuple[Waiting, list[int]] | None:
        """Who is served now. He leaves the queue; the caller makes his lease before it asks again.

        A user at his limit steps aside: he must not keep others waiting for what he himself holds."""
        most, held, usable = self.limits.tiles_per_user, self.held, self.usable
        able = [
            (w, w.ask, w.within) for w in self.queue if most is None or self.held_by(w.record.uid) + self._size(w.ask) <= most
        ]
        for request, tiles in grants(self.node, usable - held, usable, able, held):
            assert isinstance(request, Waiting)
            self.queue.remove(request)
            return request, tiles
        return None

    def next_member(self) -> tuple[Waiting, Lease] | None:
        """Who waits for tiles of a job that has some by now. He leaves the queue."""
        for request in self.queue:
            lease = self.of_job(request.record) if request.for_job else None
            if lease is not None:
                self.queue.remove(request)
                return request, lease
        return None

    def of_job(self, record: Record) -> Lease | None:
        """The lease of the job that a process is in. A job has one user."""
        jobs = [x for x in self.leases.values() if x.record.kind == "job" and x.record.uid == record.uid]
        if record.cgroup:
            return next((x for x in jobs if x.record.cgroup == record.cgroup), None)
        above = alive.parents(record.pid) if jobs else []  # (pid, start), the nearest first
        kept = {(x.record.pid, x.record.start): x for x in jobs if not x.record.cgroup}
        return next((kept[who] for who in above if who in kept), None)

    def kept(self, record: Record, name: str) -> Lease | None:
        """What the user of a process keeps under a name."""
        found = (x for x in self.leases.values() if x.record.kind == "job" and not x.record.cgroup and x.record.job == name)
        return next((x for x in found if x.record.uid == record.uid), None)

    def members(self, lease: Lease) -> list[Lease]:
        """Whose pages say what a lease is doing."""
        if lease.record.kind != "job":
            return [lease]
        return [x for x in self.leases.values() if x.record.of == lease.record.id]

    def forget(self, request: Waiting) -> None:
        if request in self.queue:
            self.queue.remove(request)

    def in_the_way(self, request: Waiting) -> list[Lease]:
        """The leases that a request waits for."""
        wanted = set(request.ask.tiles) if request.ask.tiles is not None else request.within
        return [lease for lease in self.leases.values() if wanted & set(lease.record.tiles)]

    def drain(self, path: str, on: bool, reason: str) -> list[str]:
        """No new lease gets these tiles; who holds them keeps them."""
        paths = [t.path for t in self.node.find(path)]
        for p in paths:
            if on:
                self.drained[p] = reason
            else:
                self.drained.pop(p, None)
        return paths
