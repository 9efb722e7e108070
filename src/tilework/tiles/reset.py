"""Ending a session from outside. The kernel decides who may: the signal is sent by the caller, not by the daemon."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

from ..errors import UserError
from . import alive
from .view import ProcessView, SessionView, View

GRACE_SECONDS = 5.0


def reset(seen: View, path: str) -> list[dict[str, Any]]:
    """Ends the processes that hold the tiles at a path: politely, then for good."""
    if not path.strip("/"):  # an unset variable, most likely
        raise UserError("tiles-path", "no tile named", found=repr(path), expected="a path such as `tilework tiles` writes")
    held = {t.lease for t in seen.tiles if t.path == path or t.path.startswith(path.rstrip("/") + "/")}
    if not held:
        raise UserError("tiles-path", f"no tile {path!r} on this node", fix="tilework tiles lists them")
    ended = [{"pid": one.pid, "user": lease.user, "command": one.command, "signal": _end(one, lease)}
             for lease in seen.leases if lease.id in held for one in lease.processes]  # fmt: skip
    if not ended:
        raise UserError("tiles-path", f"nobody runs on {path}", fix="tilework tiles shows who holds what")
    return ended


def _end(one: ProcessView, lease: SessionView) -> int | None:
    """The signal that did it; None where the process was gone already."""
    try:
        fd = os.pidfd_open(one.pid)
    except OSError:
        return None
    try:
        if alive.start_time(one.pid) != one.start:  # the pid is another process's by now
            return None
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(fd, number)
            if select.select([fd], [], [], GRACE_SECONDS)[0]:
                return int(number)
        return int(signal.SIGKILL)
    except ProcessLookupError:
        return None
    except PermissionError:
        raise UserError("tiles-permission", "a session can be reset by its owner or root",
                        found=f"pid {one.pid} belongs to {lease.user}", fix="ask one of them") from None  # fmt: skip
    finally:
        os.close(fd)
