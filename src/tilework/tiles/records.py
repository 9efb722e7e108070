"""What is written down of each lease for the next daemon: lease-<id>.json, beside lease-<id>.lock, which its process has locked.

In a shared folder anybody can leave files, so a record is read with care, and its name is taken from the file alone."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
from pathlib import Path

import msgspec

from ..errors import MachineError
from . import locks
from .ledger import Lease
from .messages import printable
from .places import open_plain, read_plain

log = logging.getLogger("tilework.tiles")
_NAME = re.compile(r"lease-([0-9a-f]{12})\.json")


def file(folder: Path, lease: str, kind: str) -> Path:
    return folder / f"lease-{lease}.{kind}"


def write(folder: Path, lease: Lease) -> None:
    """Whole or not at all."""
    part = file(folder, lease.id, "part")
    try:
        fd = open_plain(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            data = msgspec.json.encode(lease)
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        part.rename(file(folder, lease.id, "json"))
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def read_all(folder: Path) -> list[Lease]:
    """All records that can be believed. One that cannot be read, but whose lease is alive, is a reason not to serve at all."""
    found = []
    for path in sorted(folder.glob("lease-*.json")):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        try:
            lease = msgspec.json.decode(read_plain(path).encode(), type=Lease)
            if lease.id != name[1] or not math.isfinite(lease.since):
                raise ValueError("a record of another lease")
            lease.command, lease.job = printable(lease.command, 200), printable(lease.job, 60)
            found.append(lease)
        except PermissionError as e:
            if locks.holder_of(file(folder, name[1], "lock")):
                raise MachineError("tiles-folder", f"{path}: a live lease cannot be read", found=str(e),
                                   fix="run the daemon as root, or end that session") from e  # fmt: skip
        except (OSError, ValueError, RecursionError, msgspec.DecodeError) as e:
            if is_ours(path) and locks.holder_of(file(folder, name[1], "lock")):
                raise MachineError("tiles-folder", f"{path}: the record of a live lease is damaged", found=str(e)[:200],
                                   fix="end that session, then remove the file") from e  # fmt: skip
            log.warning("%s is no record of a lease: %s", path, e)
            remove(folder, name[1])
    for path in [*folder.glob("lease-*.lock"), *folder.glob("lease-*.part")]:  # of a daemon that died while it wrote
        name = re.fullmatch(r"lease-([0-9a-f]{12})\.\w+", path.name)
        if name is not None and not file(folder, name[1], "json").exists() and not locks.holder_of(path):
            remove(folder, name[1])
    return found


def believable(folder: Path, lease: Lease) -> bool:
    """One daemon made both files. More cannot be known in a shared folder, and no more is needed where the process has the lock:
    nobody can make another user's process lock a file."""
    try:
        return len({file(folder, lease.id, kind).lstat().st_uid for kind in ("json", "lock")}) == 1
    except OSError:
        return False


def is_ours(path: Path) -> bool:
    """Written by root or by this user."""
    try:
        return path.lstat().st_uid in (0, os.geteuid())
    except OSError:
        return False


def remove(folder: Path, lease: str) -> None:
    for kind in ("json", "lock", "part"):
        with contextlib.suppress(OSError):
            file(folder, lease, kind).unlink()
