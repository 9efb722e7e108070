"""The daemon's state for others: the view, and who holds what in words."""

from __future__ import annotations

import os
import pwd
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from .. import __version__
from .leases import Lease
from .ledger import Ledger, Waiting
from .machine import machine
from .page import COLUMNS
from .place import INSTALLED
from .topology import HOST, Node, detect
from .view import DaemonView, ProcessView, SessionView, State, TileView, View, WaitingView, duration

if TYPE_CHECKING:
    from .daemon import Daemon

MOST_WAITING = 64  # requests in a view
IDLE_SECONDS = 10.0  # who holds tiles and does nothing for so long is idle


@cache
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def compute(node: Node, tiles: tuple[int, ...]) -> dict[str, Any]:
    """What a lease gives: where its threads may run, and how many there are to be."""
    chosen = [node.tiles[i] for i in tiles]
    cpus = sorted({cpu for t in chosen for cpu in t.cpus})
    cores = [c for c in machine().cores if set(c.cpus) & set(cpus)]
    gpus = sorted({t.gpu for t in chosen if t.gpu is not None})
    return {"tiles": tiles, "paths": [t.path for t in chosen], "cpus": cpus, "gpus": gpus,
            "num_cores": max(1, len(cores))}  # fmt: skip


def holders_in_words(ledger: Ledger, request: Waiting) -> list[str]:
    """For messages: who is in the way, and what else is."""
    found = [f"{len(x.tiles)} by {f'job {x.job}' if x.kind == 'job' else f'pid {x.pid}'} ({user_name(x.uid)}, "
             f"{x.command[:60] or 'no command'}, {duration(time.time() - x.since)})"
             for x in (lease.record for lease in ledger.in_the_way(request))][:8]  # fmt: skip
    ahead = ledger.queue.index(request) if request in ledger.queue else 0
    if ahead:
        found.append(f"{ahead} earlier request{'s' if ahead != 1 else ''}")
    if ledger.drained:
        found.append(f"{len(ledger.drained)} drained")
    return found


def not_that_platform(daemon: Daemon, wanted: str) -> str:
    why = "the site's choice" if daemon.fixed else "in use"
    return f"platform {wanted} asked for; this machine's tiles are {daemon.ledger.node.platform} ({why})"


def _doing(lease: Lease, members: list[Lease], window: float) -> dict[str, Any]:
    """What the processes of a lease do, together: times, steps and memory are added, shares are averages."""
    found = [about for member in members if (about := member.usage.about(window))["shares"]]
    if not found:
        if lease.record.kind != "job" or members:
            return {}
        idle = time.time() - lease.empty_since  # a job between two of its processes
        return {"shares": {c: 100.0 * (c == "idle") for c in COLUMNS}, "state": "idle", "idle_seconds": idle}
    if len(found) == 1:
        return found[0]
    each = {key: [about[key] for about in found] for key in found[0]}
    return {
        "shares": {c: sum(s[c] for s in each["shares"]) / len(found) for c in COLUMNS},
        "seconds": {c: sum(s[c] for s in each["seconds"]) for c in COLUMNS},
        "state": next((s for s in each["state"] if s != "idle"), "idle"),
        "loss": next((x for x in each["loss"] if x is not None), None),
        "idle_seconds": min(each["idle_seconds"]),
        **{key: sum(each[key]) for key in ("steps", "steps_per_second", "memory_bytes")},
    }


def _session(lease: Lease, members: list[Lease], uid: int, window: float) -> SessionView:
    r, kind = lease.record, lease.record.kind
    first = members[0].record if members else r
    seen = SessionView(r.id, kind if kind != "member" else "shared", first.pid, user_name(r.uid), r.uid, first.command, r.tiles,
                       r.job, r.step, r.label, r.since, time.time() - r.since,
                       [ProcessView(m.record.pid, m.record.start, m.record.command) for m in members],
                       **_doing(lease, members, window))  # fmt: skip
    stuck = [m for m in members if m.hung]
    if stuck:
        seen.hung, seen.state = True, "hung"
        seen.stuck_seconds = max(m.usage.stuck_for() for m in stuck)
        seen.stack = "\n".join(m.stack() for m in stuck) if uid in (0, r.uid) else ""
    return seen


def _state(lease: SessionView | None, drained: str | None) -> State:
    if lease is None:
        return "free" if drained is None else "drained"
    if lease.hung:
        return "hung"
    if drained is not None:
        return "draining"
    return "held-idle" if lease.idle_seconds >= IDLE_SECONDS else "held"


def _activity(lease: SessionView | None) -> str:
    if lease is None:
        return ""
    return lease.activity


def view(daemon: Daemon, uid: int, window: float, platform: str | None = None) -> View:
    """Everything, for one user. A platform that is only asked about changes nothing."""
    ledger, now = daemon.ledger, time.monotonic()
    node, other = ledger.node, ""
    wanted, free = platform or daemon.fixed or HOST, daemon.can_change_platform()
    if wanted != node.platform and (platform or free):
        asked = detect(wanted, daemon.site)  # an unknown one is refused, whatever is in use
        if free:
            node = asked
        else:
            other = not_that_platform(daemon, wanted)
    leases = [_session(x, ledger.members(x), uid, window) for x in ledger.holding]
    shared = [_session(x, [x], uid, window) for x in ledger.leases.values() if x.record.kind == "shared"]
    holder = {i: lease for lease in leases for i in lease.tiles}
    tiles = []
    for t in node.tiles:
        lease, drained = holder.get(t.index), ledger.drained.get(t.path)
        tiles.append(TileView(t.path, t.chip, t.cpus, t.memory_node, t.gpu, t.multiprocessors, _state(lease, drained),
                              _activity(lease), lease.id if lease else None, drained))  # fmt: skip
    queue = [
        WaitingView(str(w.ask), user_name(w.record.uid), w.record.pid, w.record.command, now - w.since)
        for w in ledger.queue[:MOST_WAITING]
    ]
    about = DaemonView(os.getpid(), user_name(os.getuid()), daemon.started, __version__, str(daemon.folder),
                       daemon.store.trouble, daemon.folder == INSTALLED)  # fmt: skip
    return View(node.platform, node.title, node.virtual, node.levels, tiles, about, node.note, other, leases, shared, queue,
                len(ledger.queue), window)  # fmt: skip
