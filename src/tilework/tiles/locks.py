"""The truth about leases: the kernel's record locks. A lease has a file; its process holds a lock on it, and the kernel drops the
lock when the process ends, however it ends. Children do not inherit it. A daemon that starts finds all live leases in this way,
whatever became of the one before it, of its disk or of its memory.

The file belongs to the daemon, nobody else can open it, and the client's descriptor is for reading only: so the lock is a shared
one, and that it is there at all is what counts. It is lost when its process closes any descriptor of the file.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

READINGS = 12  # of the kernel's list of locks, before a lock is believed not to be there
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


def take(fd: int) -> None:
    """Lock for this process. OSError where somebody stands in the way."""
    fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def holder(fd: int) -> int | None:
    """The process that has locked a file, by one of our own descriptors of it."""
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)))
    return None if kind == fcntl.F_UNLCK else pid


def holder_of(path: Path) -> int | None:
    """The same for a file that we may not open: by the kernel's list.

    The kernel writes that list page by page, and an entry can slip from one page to the next between two of them: under load one
    reading in twenty misses a lock that is there. So only many readings without it are believed."""
    try:
        info = path.lstat()
    except OSError:
        return None
    wanted = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for _ in range(READINGS):
        with open("/proc/locks") as f:
            for line in f:
                if wanted in line and (words := line.split())[1] == "POSIX" and words[5] == wanted:
                    return int(words[4])
    return None


def alive(folder: Path) -> list[int]:
    """The processes that hold leases of a place."""
    return sorted({pid for lock in folder.glob("lease-*.lock") if (pid := holder_of(lock)) is not None})


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: with the pid it names a process for ever. None: there is none."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
