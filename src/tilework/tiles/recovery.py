"""What a daemon finds when it begins: live leases of the one before it, their pages, and who was waiting in which order."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from ..errors import MachineError
from . import locks, records
from .ledger import Lease, Waiting
from .places import open_plain, read_plain
from .topology import Node

log = logging.getLogger("tilework.tiles")
QUEUE = "queue.json"
GRACE_SECONDS = 2.0  # for those who waited to ask again, before anybody is served


def live_leases(folder: Path) -> Iterator[tuple[Lease, int | None]]:
    """Each lease whose file is locked by the process that it was given to; and our descriptor of the file, if we may open it."""
    for lease in records.read_all(folder):
        path = records.file(folder, lease.id, "lock")
        if lease.bare and not path.exists():
            if records.is_ours(records.file(folder, lease.id, "json")) and locks.start_time(lease.pid) == lease.start:
                yield lease, None
            else:
                records.remove(folder, lease.id)
            continue
        fd = None
        with contextlib.suppress(OSError):
            fd = open_plain(path, os.O_RDWR)
        pid = locks.holder(fd) if fd is not None else locks.holder_of(path)
        if pid is not None and pid <= 0:
            raise MachineError("tiles-daemon", "a process that this daemon cannot see holds tiles", found=str(path),
                               fix="run the daemon in the machine's own pid namespace")  # fmt: skip
        if pid == lease.pid and records.believable(folder, lease):
            lease.start = locks.start_time(pid) or lease.start  # the lock is the kernel's word; the rest was a daemon's
            with contextlib.suppress(OSError):
                lease.uid = os.stat(f"/proc/{pid}").st_uid
            yield lease, fd
            continue
        if fd is not None:
            os.close(fd)
        records.remove(folder, lease.id)


def taken_up(node: Node, lease: Lease) -> tuple[int, ...]:
    """The tiles of this node that a live lease takes up: its own where the node is the same as then; else, because the site file,
    the platform or the cores that the daemon may see have changed, every tile that has one of its cores or its GPU."""
    cpus, gpus = set(lease.cpus), set(lease.gpus)
    unknown = not cpus and not gpus  # written by a version that did not say
    same = lease.platform == node.platform and all(0 <= i < len(node.tiles) for i in lease.tiles)
    if same and (unknown or {cpu for i in lease.tiles for cpu in node.tiles[i].cpus} == cpus):
        return lease.tiles
    found = tuple(t.index for t in node.tiles if unknown or (t.gpu in gpus if t.gpu is not None else cpus & set(t.cpus)))
    log.warning("lease %s of pid %d is of another shape of this node (%s); it keeps %d tiles of %s from others",
                lease.id, lease.pid, lease.platform, len(found), node.platform)  # fmt: skip
    return found


def memory_of(lease: Lease, number: int) -> int | None:
    """A process's memory file, by the number that it has there. None where that is not ours to open, or something else.

    The number is the client's word. It is looked at before it is opened: root must not be made to read a file, or to touch a
    device, for somebody else."""
    try:
        there = os.open(f"/proc/{lease.pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not is_memory(there) or os.fstat(there).st_uid != lease.uid:
            return None
        return os.open(f"/proc/self/fd/{there}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    finally:
        os.close(there)


def is_memory(fd: int) -> bool:
    """A memory file, which can be read without ever waiting and has no name anywhere. A client could send us anything."""
    info = os.fstat(fd)
    return stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and info.st_dev == _memory_device()


@cache
def _memory_device() -> int:
    fd = os.memfd_create("tilework-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


# ---- who was waiting ----


class _Waited(msgspec.Struct):
    pid: int
    start: int
    since: float  # on the machine's monotonic clock, which all processes share


def write_queue(folder: Path, queue: list[Waiting]) -> None:
    """For the next daemon. What cannot be written costs the order, no more."""
    with contextlib.suppress(OSError):
        fd = open_plain(folder / QUEUE, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            data = msgspec.json.encode([_Waited(w.pid, w.start, w.since) for w in queue])
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)


def read_queue(folder: Path) -> dict[tuple[int, int], float]:
    """(pid, start) -> since when, of the processes that still live. Believed only from root or ourselves."""
    try:
        if not records.is_ours(folder / QUEUE):
            return {}
        found = msgspec.json.decode(read_plain(folder / QUEUE).encode(), type=list[_Waited])
    except (OSError, ValueError, msgspec.DecodeError):
        return {}
    return {(w.pid, w.start): w.since for w in found if locks.start_time(w.pid) == w.start}
