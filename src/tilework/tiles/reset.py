"""Ending a session from outside. The kernel decides who may: the signal is sent by the caller, not by the daemon."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import locks, records
from .places import run_folder

GRACE_SECONDS = 5.0


def reset(seen: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Ends the processes that hold the tiles at a path: politely, then for good."""
    if not path.strip("/"):  # an unset variable, most likely
        raise UserError("tiles-path", "no tile named", found=repr(path), expected="a path such as `tilework tiles` writes")
    held = {t["lease"] for t in seen["tiles"] if t["path"] == path or t["path"].startswith(path.rstrip("/") + "/")}
    if not held:
        raise UserError("tiles-path", f"no tile {path!r} on this node", fix="tilework tiles lists them")
    ended, folder = [], run_folder()
    for lease in seen["leases"]:
        if lease["id"] in held:
            ended.append({"pid": lease["pid"], "user": lease["user"], "command": lease["command"], "signal": _end(lease, folder)})
    if not ended:
        raise UserError("tiles-path", f"nobody holds {path}", fix="tilework tiles shows who holds what")
    return ended


def _end(lease: Mapping[str, Any], folder: Path) -> int | None:
    """The signal that did it; None where the process was gone already, or does not hold that lease.

    Which process it is, is the daemon's word; that it has locked the lease's file is the kernel's. A daemon that lies cannot make
    root end somebody else's process."""
    try:
        fd = os.pidfd_open(lease["pid"])
    except OSError:
        return None
    try:
        if locks.start_time(lease["pid"]) != lease["start"]:  # the pid is another process's by now
            return None
        lock = records.file(folder, lease["id"], "lock")
        if locks.holder_of(lock) != lease["pid"]:
            raise UserError("tiles-path", f"pid {lease['pid']} cannot be shown to hold these tiles",
                            found=f"{lock} is {'not locked by it' if lock.exists() else 'gone'}",
                            fix=f"look at it, and end it yourself: kill {lease['pid']}")  # fmt: skip
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(fd, number)
            if select.select([fd], [], [], GRACE_SECONDS)[0]:
                return int(number)
        return int(signal.SIGKILL)
    except ProcessLookupError:
        return None
    except PermissionError:
        raise UserError("tiles-permission", "a session can be reset by its owner or root",
                        found=f"pid {lease['pid']} belongs to {lease['user']}", fix="ask one of them") from None  # fmt: skip
    finally:
        os.close(fd)
