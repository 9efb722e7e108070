"""The truth about leases: the kernel's record locks. A lease has a file; its process holds a lock on it, and the kernel drops the
lock when the process ends, however it ends. Children do not inherit it. A daemon that starts finds all live leases in this way,
whatever became of the one before it, of its disk or of its memory.

A lock is lost when its process closes any descriptor of the file: in a process with a lease, nothing else may open it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take(fd: int) -> None:
    """Lock for this process. OSError if another one has it."""
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holders() -> dict[tuple[int, int, int], int]:
    """(major, minor, inode) -> pid, for every write lock on this machine."""
    found = {}
    with open("/proc/locks") as f:
        for line in f:
            words = line.split()
            if len(words) >= 8 and words[1] == "POSIX" and words[3] == "WRITE":
                major, minor, inode = words[5].split(":")
                found[int(major, 16), int(minor, 16), int(inode)] = int(words[4])
    return found


def key(path: Path) -> tuple[int, int, int] | None:
    """How the kernel's list calls a file."""
    try:
        info = path.stat()
    except OSError:
        return None
    return os.major(info.st_dev), os.minor(info.st_dev), info.st_ino


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: with the pid it names a process for ever. None: there is none."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
