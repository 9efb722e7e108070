"""The daemon's state for others: the view, and who holds what in words."""

from __future__ import annotations

import os
import pwd
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from .. import __version__
from .ledger import Ledger, Waiting
from .machine import machine
from .places import INSTALLED
from .topology import HOST, Node, detect

if TYPE_CHECKING:
    from .daemon import Daemon

MOST_WAITING = 64  # requests in a view


@cache
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def compute(node: Node, tiles: list[int]) -> dict[str, Any]:
    """What a lease gives: where its threads may run, and how many there are to be."""
    chosen = [node.tiles[i] for i in tiles]
    cpus = sorted({cpu for t in chosen for cpu in t.cpus})
    cores = [c for c in machine().cores if set(c.cpus) & set(cpus)]
    gpus = sorted({t.gpu for t in chosen if t.gpu is not None})
    return {"tiles": tiles, "paths": [t.path for t in chosen], "cpus": cpus, "gpus": gpus,
            "num_cores": max(1, len(cores))}  # fmt: skip


def duration(seconds: float) -> str:
    """'12 s', '3 min', '2.5 h', '4 d'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def holders_in_words(ledger: Ledger, request: Waiting) -> list[str]:
    """For messages: who is in the way, and what else is."""
    found = [f"{len(x.tiles)} by pid {x.pid} ({user_name(x.uid)}, {x.command[:60] or 'no command'}, "
             f"{duration(time.time() - x.since)})" for x in ledger.in_the_way(request.ask)][:8]  # fmt: skip
    ahead = ledger.queue.index(request) if request in ledger.queue else 0
    if ahead:
        found.append(f"{ahead} earlier request{'s' if ahead != 1 else ''}")
    if ledger.drained:
        found.append(f"{len(ledger.drained)} drained")
    return found


def not_that_platform(daemon: Daemon, wanted: str) -> str:
    why = "the site's choice" if daemon.fixed else "in use"
    return f"platform {wanted} asked for; this machine's tiles are {daemon.ledger.node.platform} ({why})"


def view(daemon: Daemon, uid: int, window: float, platform: str | None = None) -> dict[str, Any]:
    """Everything, for one user: stacks are for their owner and root. A platform that is only asked about changes nothing."""
    ledger, now = daemon.ledger, time.monotonic()
    node, other = ledger.node, ""
    wanted, free = platform or daemon.fixed or HOST, daemon.can_change_platform()
    if wanted != node.platform and (platform or free):
        asked = detect(wanted, daemon.site)  # an unknown one is refused, whatever is in use
        if free:
            node = asked
        else:
            other = not_that_platform(daemon, wanted)
    holder = {i: lease.id for lease in ledger.leases.values() for i in lease.tiles}
    tiles = [{"path": t.path, "chip": t.chip, "cpus": t.cpus, "memory_node": t.memory_node, "gpu": t.gpu,
              "multiprocessors": t.multiprocessors, "lease": holder.get(t.index), "drained": ledger.drained.get(t.path)}
             for t in node.tiles]  # fmt: skip
    leases = []
    for lease in ledger.leases.values():
        usage = daemon.usage[lease.id]
        about = {"id": lease.id, "pid": lease.pid, "start": lease.start, "user": user_name(lease.uid), "uid": lease.uid,
                 "command": lease.command, "job": lease.job, "tiles": lease.tiles, "since": lease.since,
                 "held_seconds": time.time() - lease.since, "hung": lease.id in daemon.hung, **usage.about(window)}  # fmt: skip
        if about["hung"]:
            about["stuck_seconds"] = usage.stuck_for()
            about["stack"] = daemon.stack(lease.id) if uid in (0, lease.uid) else ""
        leases.append(about)
    queue = [{"ask": str(w.ask), "user": user_name(w.uid), "pid": w.pid, "command": w.command, "waited_seconds": now - w.since}
             for w in ledger.queue[:MOST_WAITING]]  # fmt: skip
    return {
        "platform": node.platform, "title": node.title, "virtual": node.virtual, "note": node.note, "levels": node.levels,
        "platform_note": other,  # where the tiles are not those of the platform that was asked for
        "tiles": tiles, "leases": leases, "queue": queue, "num_waiting": len(ledger.queue), "window_seconds": window,
        "daemon": {"pid": os.getpid(), "user": user_name(os.getuid()), "started": daemon.started, "version": __version__,
                   "folder": str(daemon.folder), "trouble": daemon.store.trouble, "installed": daemon.folder == INSTALLED},
    }  # fmt: skip
