"""The keeper of a user's queue: starts a supervisor for each job whose turn it is, and settles what dead ones have left.

One process a user, without rights of its own: it starts with the first job, and ends when there has been nothing to do for a
while. Who gets tiles first is decided by the daemon of tiles, for all users and sessions of the machine: here jobs are only sent
to stand in that line, in the order of their arrival, WINDOW of them at a time. A job further back starts first only with tiles
that the first in line could not use.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ..errors import TileworkError
from ..tiles import alive
from ..tiles.client import SERVICE
from .book import Book, Supervised, boot
from .spec import Spec
from .supervisor import MARK, Supervisor, mark_of

log = logging.getLogger("tilework.jobs")
WINDOW = 16
IN_LINE_SECONDS = 20.0  # that a supervisor may take to stand in line: the daemon of tiles may have to be started
IDLE_SECONDS = 600.0
LOCK, SOCKET = "keeper.lock", "keeper.sock"


def _address(folder: Path) -> tuple[str, int]:
    """A name for the socket that is short enough for any path, and the descriptor that it needs."""
    place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    return f"/proc/self/fd/{place}/{SOCKET}", place


def poke(folder: Path) -> None:
    """The keeper looks at the book now; it is started where none is there."""
    name, place = _address(folder)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # it has enough to wake up for
                sock.sendto(b".", name)
            return
    except OSError:
        pass
    finally:
        os.close(place)
    here = str(Path(__file__).resolve().parents[2])  # the same Tilework as this one, wherever it was found
    keep = ("PATH", "HOME", "USER", "LANG", "TILEWORK_RUN", "TILEWORK_SITE", "TILEWORK_KILL_WAIT", "XDG_RUNTIME_DIR")
    env = {k: v for k, v in os.environ.items() if k in keep} | {SERVICE: "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-m", "tilework.jobs.keeper", str(folder)]
    subprocess.run(["/bin/sh", "-c", '"$@" &', "sh", *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, start_new_session=True, cwd="/", env=env, check=False)  # fmt: skip


class Keeper:
    def __init__(self, folder: Path) -> None:
        self.book = Book(folder)
        self.pidfds: dict[int, int] = {}  # of supervisors, by pid
        self.used = time.monotonic()
        self.purged = 0.0

    def run(self) -> int:
        lock = os.open(self.book.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            alive.lock(lock)
        except OSError:
            return 0  # another one keeps it
        name, place = _address(self.book.folder)
        with contextlib.suppress(OSError):
            os.unlink(name)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(name)
        os.close(place)
        self.sock.setblocking(False)
        self.own = os.pidfd_open(os.getpid())
        log.info("keeper of %s, pid %d", self.book.folder, os.getpid())
        while time.monotonic() - self.used < IDLE_SECONDS:
            if not (self.book.folder / LOCK).exists():  # somebody removed it all
                return 0
            try:
                busy = self.look()
            except TileworkError as e:  # a full disk, say
                log.error("%s", e)
                busy = True
            if busy:
                self.used = time.monotonic()
            ready, _, _ = select.select([self.sock.fileno(), *self.pidfds.values()], [], [], 1.0 if busy else 10.0)
            if self.sock.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    while self.sock.recv(512):
                        pass
            self._reap()
        with contextlib.suppress(OSError):
            (self.book.folder / SOCKET).unlink()
        if self.book.jobs(ended=False):  # one came while we were about to go
            poke(self.book.folder)
        return 0

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for pid, fd in list(self.pidfds.items()):
            if select.select([fd], [], [], 0)[0]:
                os.close(self.pidfds.pop(pid))

    def look(self) -> bool:
        """Whether anything is left to do."""
        at = self.book.supervised()
        for one in at:
            if one.boot == boot() and alive.start_time(one.pid) == one.start:
                if one.pid not in self.pidfds:
                    with contextlib.suppress(OSError):
                        self.pidfds[one.pid] = os.pidfd_open(one.pid)
            else:
                self.settle(one)
        waiting = self.book.waiting()
        room = WINDOW - sum(one.state == "PENDING" for one in at)
        for id, spec, reason, cancelled in waiting:
            if cancelled:
                self.book.end(id, "CANCELLED", was=("PENDING",), reason="cancelled while it waited")
            elif room > 0 and self.may_start(id, spec, reason):
                self.begin(id)
                room -= 1
        if time.monotonic() - self.purged > 3600 or not self.purged:
            self.purged = time.monotonic()
            for gone in self.book.forget_old():
                shutil.rmtree(self.book.folder / str(gone), ignore_errors=True)
        return bool(at or waiting)

    def may_start(self, id: int, spec: Spec, reason: str) -> bool:
        """After the jobs that it waits for. One whose condition can never come true ends."""
        needs = {int(word.removeprefix("any:")): word.startswith("any:") for word in spec.after}
        states = self.book.states(list(needs)) if needs else {}
        left = []
        for other, in_any_way in needs.items():
            state = states.get(other, "COMPLETED")  # forgotten by now: it ended long ago
            if state in ("PENDING", "RUNNING"):
                left.append(str(other))
            elif state != "COMPLETED" and not in_any_way:
                self.book.end(
                    id, "CANCELLED", was=("PENDING",), reason=f"job {other}, which had to end well before it, was {state}"
                )
                return False
        if left and reason != (why := f"after job {', '.join(left)}"):
            self.book.why(id, why)
        return not left

    def begin(self, id: int) -> None:
        """A supervisor, which is in line for its tiles before the next one is started."""
        read, write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                os.close(read)
                self.sock.close()
                logging.disable(logging.CRITICAL)
                supervisor = Supervisor(self.book, id, keeper=self.own)

                def in_line(_: str) -> None:
                    with contextlib.suppress(OSError):
                        os.close(write)

                code = supervisor.run(in_line)
                poke(self.book.folder)
            finally:
                os._exit(code & 0xFF)
        os.close(write)
        start = alive.start_time(pid)
        if start is not None:
            self.book.supervise(id, pid, start)
            with contextlib.suppress(OSError):
                self.pidfds[pid] = os.pidfd_open(pid)
        select.select([read], [], [], IN_LINE_SECONDS)
        os.close(read)

    def settle(self, one: Supervised) -> None:
        """Its supervisor is gone. What is left of it ends; a job that had begun is not run again unless that was asked for."""
        if one.state == "PENDING":
            self.book.leave(one.id, one.pid)
            return
        same = one.boot == boot()
        if same:
            end_all(mark_of(self.book, one.id))
        reason = "its supervisor was killed" if same else "the machine was restarted"
        log.warning("job %d: %s", one.id, reason)
        if not (one.spec.requeue and self.book.again(one.id, f"{reason}; in the queue again")):
            self.book.end(one.id, "LOST", was=("RUNNING",), reason=reason)


def end_all(mark: str) -> None:
    """Processes of this user that a job has started."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(50):
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0") and int(name) != os.getpid():
                    found.append(int(name))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main() -> int:
    folder = Path(sys.argv[1])
    os.umask(0o077)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(folder / "keeper.log", maxBytes=2**20, backupCount=3)
    logging.basicConfig(handlers=[handler], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        return Keeper(folder).run()
    except Exception:
        log.exception("the keeper failed")
        return 4


if __name__ == "__main__":
    sys.exit(main())
