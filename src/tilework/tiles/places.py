"""Where the daemon and its clients meet on this machine: one place for all, so that there are never two views of the same tiles.

Installed (systemd): /run/tilework belongs to root, and so does the daemon. Otherwise everybody shares a sticky directory in the
machine's shared memory, and whoever needs the daemon first starts it. TILEWORK_RUN names another directory (for tests, or one
user alone). In a shared directory nothing that others may have put there is followed, waited for or believed without a check.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import MachineError

INSTALLED = Path("/run/tilework")
SHARED = Path("/dev/shm/tilework")
ADDRESS = "daemon.address"  # a file there: the name of the daemon's socket
LARGEST = 64 * 1024  # bytes of any small file that we read there


def run_folder() -> Path:
    own = os.environ.get("TILEWORK_RUN")
    if own and not (Path(own).absolute() == SHARED and installed()):  # the shared place has no say beside the service
        return made(Path(own).absolute())
    return INSTALLED if installed() else made(SHARED)


def installed() -> bool:
    return (INSTALLED / ADDRESS).exists()


def made(place: Path, mode: int = 0o1777) -> Path:
    try:
        place.mkdir()
        place.chmod(mode)
    except FileExistsError:
        pass
    except OSError as e:
        raise MachineError("tiles-folder", f"{place}: the directory of leases cannot be made", found=str(e),
                           fix="set TILEWORK_RUN to a directory that you can write to") from e  # fmt: skip
    if not stat.S_ISDIR(place.lstat().st_mode):  # a link that somebody left there would lead all of us astray
        raise MachineError("tiles-folder", f"{place}: expected a directory", found="something else (a link?)",
                           fix="remove it, or set TILEWORK_RUN")  # fmt: skip
    return place


def private(folder: Path) -> Path:
    """Of one user: the daemon's log and history, and who starts it. In the installed folder everything is root's already."""
    if folder == INSTALLED:
        return folder
    place = made(folder / f"user-{os.getuid()}", 0o700)
    if place.lstat().st_uid != os.getuid():
        raise MachineError("tiles-folder", f"{place}: this directory should be yours",
                           found=f"it belongs to user {place.lstat().st_uid}", fix="let root remove it")  # fmt: skip
    return place


def open_plain(path: Path, flags: int, mode: int = 0o644) -> int:
    """Opens a plain file: no link is followed, no pipe waited for. The mode holds whatever the umask is."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    existed = True
    try:  # without O_CREAT: in a sticky folder the kernel may forbid it for files of others (fs.protected_regular)
        fd = os.open(path, flags & ~(os.O_CREAT | os.O_EXCL)) if not flags & os.O_EXCL else -1
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
        fd = -1
    if fd < 0:
        existed = False
        fd = os.open(path, flags | os.O_EXCL, mode)
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a plain file")
    if not existed and info.st_uid == os.geteuid():
        os.fchmod(fd, mode)
    return fd


def read_plain(path: Path) -> str:
    fd = open_plain(path, os.O_RDONLY)
    try:
        return os.read(fd, LARGEST).decode("utf-8", "replace")
    finally:
        os.close(fd)


def state_path(folder: Path) -> Path:
    return (
        Path(os.environ.get("STATE_DIRECTORY", "/var/lib/tilework")) / "state.db"
        if folder == INSTALLED
        else private(folder) / "state.db"
    )


def log_path(folder: Path) -> Path:
    return Path("/var/log/tilework/daemon.log") if folder == INSTALLED else private(folder) / "daemon.log"
