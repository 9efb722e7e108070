"""Where the daemon and its clients meet: a folder that nobody but its owner can write to.

Installed as a service, that is root's /run/tilework, and the daemon serves every user of the machine. Otherwise each user has a
daemon of his own, in his runtime folder ($XDG_RUNTIME_DIR/tilework, else /tmp/tilework-<uid>). TILEWORK_RUN names another folder:
one's own, or root's.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import uuid
from pathlib import Path

from ..errors import MachineError
from . import alive

log = logging.getLogger("tilework.tiles")
INSTALLED = Path("/run/tilework")
COMMON = Path("/tmp")  # for users without a runtime folder
SOCKET, LOCK = "daemon.sock", "daemon.lock"


def run_folder() -> Path:
    own = os.environ.get("TILEWORK_RUN")
    if own:
        return made(Path(own).absolute())
    if installed():
        return INSTALLED
    # A process of the same user without that variable (cron, a batch job) must find the same daemon.
    runtime = [Path(p) for p in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}") if p]
    places = [p / "tilework" for p in runtime if _private(p)] + [COMMON / f"tilework-{os.getuid()}"]
    return made(next((p for p in places if _private(p) and (p / SOCKET).exists()), places[0]))


def installed() -> bool:
    return (INSTALLED / SOCKET).exists()


def is_service(folder: Path) -> bool:
    """Is its daemon not ours to start?"""
    return folder == INSTALLED or folder.lstat().st_uid != os.getuid()


def _private(place: Path) -> bool:
    try:
        found = place.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    except OSError:
        return False


def made(place: Path) -> Path:
    """Made where it is not there; and nobody but its owner, who is this user or root, can change what is in it."""
    try:
        place.mkdir(0o700)
    except FileExistsError:
        pass
    except OSError as e:
        raise MachineError("tiles-folder", f"{place}: the folder of leases cannot be made", found=str(e),
                           fix="set TILEWORK_RUN to a folder that you can write to") from e  # fmt: skip
    found, why = place.lstat(), ""
    if not stat.S_ISDIR(found.st_mode):
        why = "it is not a folder (a link?)"
    elif found.st_uid not in (0, os.getuid()):
        why = f"it belongs to user {found.st_uid}"
    elif found.st_mode & 0o022:
        why = f"others can write there (mode {stat.S_IMODE(found.st_mode):o})"
    if why:
        raise MachineError("tiles-folder", f"{place}: this folder should be yours alone", found=why,
                           fix="remove it, or set TILEWORK_RUN to a folder of your own")  # fmt: skip
    return place


def listen(folder: Path, everybody: bool = False) -> socket.socket:
    """A listening socket under the daemon's name, in place of whatever had that name."""
    name = f"{SOCKET}-{uuid.uuid4().hex[:8]}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{place}/{name}")  # a short name for a path of any length
        os.chmod(folder / name, 0o666 if everybody else 0o600)
        listener.listen(1024)
        (folder / name).rename(folder / SOCKET)
    except OSError:
        listener.close()
        raise
    finally:
        os.close(place)
    return listener


def reach(folder: Path, timeout: float) -> socket.socket | None:
    """A connection to the daemon of a folder; None where there is none. OSError where this process has no descriptors left."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout)
    try:
        place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        try:
            connection.connect(f"/proc/self/fd/{place}/{SOCKET}")
            return connection
        finally:
            os.close(place)
    except OSError as e:
        connection.close()
        if e.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN):  # EAGAIN: many stand at the door
            raise
        return None


def process_at(folder: Path) -> int | None:
    """The pid of the daemon of a folder, where we may look."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return alive.holder(fd)
    finally:
        os.close(fd)


class Place:
    """The daemon's side. It has locked daemon.lock, so that there is one, and listens at daemon.sock."""

    def __init__(self, folder: Path, everybody: bool) -> None:
        self.folder, self.everybody = folder, everybody
        self.listener: socket.socket  # changes when it had to be made again

    def take(self, listener: socket.socket | None = None) -> bool:
        """False where another daemon has the place. `listener`: already there, made by whoever started us."""
        fresh = not (self.folder / LOCK).exists()
        fd = self._locked()
        if fd is None:
            return False
        if fresh and self._lives_without_its_folder():
            os.close(fd)
            (self.folder / LOCK).unlink(missing_ok=True)
            return False
        self._lock = fd
        self.listener = listener or listen(self.folder, self.everybody)
        self.listener.setblocking(False)
        self._socket = self._inode(SOCKET)
        return True

    def _locked(self) -> int | None:
        fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            alive.lock(fd)
            return fd
        except OSError:
            os.close(fd)
            return None

    def _lives_without_its_folder(self) -> bool:
        """Somebody removed the folder under a daemon that lives and will make it again: it knows the leases, we do not."""
        lost = f"{self.folder / LOCK} (deleted)"
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if b"tilework" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    continue
                for name in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        if os.readlink(f"/proc/{pid}/fd/{name}") == lost:
                            return True
        return False

    def _inode(self, name: str) -> int:
        try:
            return os.lstat(self.folder / name).st_ino
        except OSError:
            return 0

    def keep(self) -> bool:
        """Now and then: is everything still there, and ours? False where it had to be made again: the listener is a new one, and
        what else was in the folder may be gone. OSError or MachineError where that is not possible now."""
        same = self._inode(LOCK) == os.fstat(self._lock).st_ino
        if same and self._inode(SOCKET) == self._socket:
            return True
        log.warning("somebody removed files in %s; they are made again", self.folder)
        if not self.folder.exists():
            made(self.folder)
            self.folder.chmod(0o755 if self.everybody else 0o700)
        if not same:
            fd = self._locked()
            if fd is None:
                raise OSError(errno.EBUSY, "another daemon has taken this place")
            os.close(self._lock)
            self._lock = fd
        listener = listen(self.folder, self.everybody)
        listener.setblocking(False)
        self.listener.close()
        self.listener, self._socket = listener, self._inode(SOCKET)
        return False

    def leave(self) -> None:
        """A service leaves its socket there: clients know then that it will be back."""
        self.listener.close()
        if not self.everybody:
            (self.folder / SOCKET).unlink(missing_ok=True)
