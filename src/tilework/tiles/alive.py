"""Which processes are still there: the kernel's word, not ours.

A process that holds tiles, or is shown as sharing the machine, has a page (page.py) and has locked it. The kernel drops that lock
when the process ends, however it ends, or closes the page; children do not inherit it. So a daemon that starts finds out what
lives, whatever became of the one before it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from functools import cache

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def lock(fd: int) -> None:
    """Lock a file for this process, as long as it keeps every descriptor of it open. OSError where another process has it."""
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder(fd: int) -> int | None:
    """The process that has locked a file, by a descriptor of ours."""
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)))
    return None if kind == fcntl.F_UNLCK else pid


def _fields(pid: int) -> list[str]:
    """Of /proc/<pid>/stat, from the state on. OSError where there is no such process."""
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()


def parents(pid: int) -> list[tuple[int, int]]:
    """(pid, start) of the processes above one, the nearest first."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        while (pid := int(_fields(pid)[1])) > 1 and len(found) < 1000:
            found.append((pid, int(_fields(pid)[19])))
    return found


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: with the pid it names a process for ever. None: there is none."""
    try:
        fields = _fields(pid)
    except OSError:
        return None
    ended = fields[0] in ("Z", "X") and int(fields[17]) <= 1  # the first thread may end before the others
    return None if ended else int(fields[19])


def open_memory(pid: int, uid: int, number: int, inode: int = 0) -> int | None:
    """A process's memory file, by the number that it has there. None where we may not see it, or it is something else.

    The number is the client's word. It is looked at before it is opened: root must not be made to read a file, or to touch a
    device, for somebody else."""
    try:
        there = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(there)
        if not _is_memory(found) or found.st_uid != uid or inode not in (0, found.st_ino):
            return None
        return os.open(f"/proc/self/fd/{there}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    finally:
        os.close(there)


def is_ending(pid: int, start: int) -> bool:
    """Is the kernel closing all that a process had open? Its locks may still be there."""
    with contextlib.suppress(OSError):
        return start_time(pid) == start and not os.listdir(f"/proc/{pid}/fd")
    return False


def _is_memory(info: os.stat_result) -> bool:
    """A memory file can be read without ever waiting and has no name anywhere."""
    return stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and info.st_dev == _memory_device()


@cache
def _memory_device() -> int:
    fd = os.memfd_create("tilework-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)
