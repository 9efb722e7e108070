"""The one seat of a machine: who has it is the daemon, and clients find him there.

In the folder: daemon.lock, which the daemon has locked; its socket; and daemon.address, which names the socket. Files can be
removed under a living daemon (a login manager that tidies up /dev/shm when a user logs out): so a name that is in no file system
is taken too, no second daemon can begin, and what was removed is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import socket
import uuid
from pathlib import Path

from ..errors import MachineError
from . import locks
from .places import ADDRESS, INSTALLED, SHARED, installed, made, open_plain

log = logging.getLogger("tilework.tiles")
LOCK = "daemon.lock"
_taken_here = False  # is this process the daemon?


class Seat:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._for_all = 0o644 if folder == INSTALLED else 0o666
        self.listener: socket.socket  # changes when it had to be made again
        self._name = ""

    def take(self) -> bool:
        """False where another daemon sits there. Clients are shown the way only by `show`."""
        existed = (self.folder / LOCK).exists()
        named = self._take_name()
        if not named and not existed:  # the folder was removed under a living daemon, which will make it again
            return False
        fd = self._locked()
        if fd is None:
            return False
        if not named:
            log.warning("somebody else has this daemon's name; it goes on without")
        self._lock = fd
        _be_here(True)
        if self.folder == INSTALLED and not installed():
            self._take_over()
        self.listener, self._name = self._listen()
        return True

    def _take_name(self) -> bool:
        """A name in no file system, which anybody could take: so it is not asked for where root alone can remove files."""
        if self.folder == INSTALLED:
            return True
        self._nameless = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._nameless.bind(_abstract(self.folder))
            return True
        except OSError as e:
            self._nameless.close()
            if e.errno != errno.EADDRINUSE:
                raise
            return False

    def _locked(self) -> int | None:
        """daemon.lock, locked; None where somebody else has locked it."""
        fd = open_plain(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600 if self.folder == INSTALLED else 0o666)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            os.close(fd)
            return None

    def _take_over(self) -> None:
        """The service begins when no lease of the shared place lives any more: tiles must not have two masters. From the moment
        that the file is there, the shared place's daemon grants nothing; so the second look sees everything that it granted."""
        _check_shared()
        os.close(open_plain(INSTALLED / ADDRESS, os.O_RDWR | os.O_CREAT, self._for_all))
        try:
            _check_shared()
        except MachineError:
            (INSTALLED / ADDRESS).unlink()
            raise

    def _listen(self) -> tuple[socket.socket, str]:
        for old in self.folder.glob("daemon-*.sock"):
            with contextlib.suppress(OSError):
                old.unlink()
        name = f"daemon-{os.getpid()}-{uuid.uuid4().hex[:6]}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        place = os.open(self.folder, os.O_PATH | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{place}/{name}")  # a short name for a path of any length
        except OSError:
            listener.close()
            raise
        finally:
            os.close(place)
        os.chmod(self.folder / name, 0o666)
        listener.listen(1024)
        listener.setblocking(False)
        return listener, name

    def show(self) -> None:
        self._address = self._addressed()
        self._write(self._name)

    def _addressed(self) -> int:
        return open_plain(self.folder / ADDRESS, os.O_RDWR | os.O_CREAT, self._for_all)

    def _write(self, name: str) -> None:
        os.ftruncate(self._address, 0)
        os.pwrite(self._address, name.encode(), 0)

    def keep(self) -> bool:
        """Now and then: is everything still there, and ours? False where it had to be made again: the listener is a new one, and
        what else was in the folder is gone. OSError where it cannot be made now; then everything is as it was before."""
        if self._same(LOCK, self._lock) and self._same(ADDRESS, self._address) and (self.folder / self._name).exists():
            if os.pread(self._address, 200, 0) != self._name.encode():  # in a shared folder anybody can write there
                self._write(self._name)
            return True
        log.warning("somebody removed files in %s; they are made again", self.folder)
        made(self.folder)
        with contextlib.ExitStack() as undo:
            lock: int | None = self._lock
            if not self._same(LOCK, self._lock):
                lock = self._locked()
                if lock is None:
                    raise OSError(errno.EBUSY, "another daemon has taken this machine's tiles")
                undo.callback(os.close, lock)
            address = self._addressed()
            undo.callback(os.close, address)
            listener, name = self._listen()
            undo.pop_all()  # nothing can fail from here on
        assert lock is not None
        if lock != self._lock:
            os.close(self._lock)
        os.close(self._address)
        self.listener.close()
        self._lock, self._address, self.listener, self._name = lock, address, listener, name
        self._write(name)
        return False

    def _same(self, name: str, fd: int) -> bool:
        try:
            there, here = os.lstat(self.folder / name), os.fstat(fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def gives_way(self) -> bool:
        """The shared place's daemon has no say any more once the service has begun."""
        return self.folder == SHARED and installed()

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / self._name).unlink()
        self._write("")
        _be_here(False)


def _be_here(here: bool) -> None:
    global _taken_here
    _taken_here = here


def sits_there(folder: Path, pid: int) -> bool:
    """Is it the daemon who answers? In a shared folder anybody can offer a socket and name it in daemon.address."""
    return folder == INSTALLED or locked_by(folder) == pid


def locked_by(folder: Path) -> int | None:
    """The process that has the seat."""
    if _taken_here:  # to open and close the file would lose the lock
        return os.getpid()
    try:
        fd = open_plain(folder / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        return locks.holder(fd)
    finally:
        os.close(fd)


def _abstract(folder: Path) -> str:
    """The same for all who see this folder under this name; not for a container that has something else there."""
    where = f"{os.stat(folder.parent).st_dev}:{folder.absolute()}"
    return f"\0tilework-{hashlib.sha256(where.encode()).hexdigest()[:32]}"


def _check_shared() -> None:
    pids = locks.alive(SHARED)
    if pids:
        raise MachineError("tiles-daemon", "sessions that started before the service was installed still hold tiles",
                           found=f"in {SHARED}: " + ", ".join(f"pid {p}" for p in pids[:8]),
                           fix="wait for them, or end them")  # fmt: skip
