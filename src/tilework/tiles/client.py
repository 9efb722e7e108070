"""Asking the daemon: a lease for this process, or a look at all tiles. The daemon is started where none runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import MachineError, TileworkError, UserError
from . import locks, messages, seat
from .asks import Ask
from .messages import printable
from .page import Page
from .places import ADDRESS, INSTALLED, open_plain, private, read_plain, run_folder
from .topology import asked_platform

START_SECONDS = 10.0
ANSWER_SECONDS = 10.0
GATE_SECONDS = 2.0  # then several may try, because who was first may have been stopped; one of them becomes the daemon
RESTART_SECONDS = 30.0  # how long a client bears a daemon that is being restarted
_KINDS: dict[str, type[TileworkError]] = {"environment": MachineError}


class _Ended(MachineError):
    """The daemon went away while we asked it; the next one can be asked."""


class Lease:
    """This process's right to some tiles, until release() or the end of the process."""

    def __init__(self, granted: dict[str, Any], file: int, stack: int, page: Page, connection: socket.socket) -> None:
        self.id: str = granted["lease"]
        self.tiles: list[int] = granted["tiles"]
        self.paths: list[str] = granted["paths"]
        self.cpus: list[int] = granted["cpus"]
        self.gpus: list[int] = granted["gpus"]
        self.num_cores: int = granted["num_cores"]
        self.note: str = granted["note"]
        self.pid = os.getpid()
        self.page, self.stack = page, stack
        self._file, self._connection = file, connection

    def release(self) -> None:
        if self._file < 0 or self.pid != os.getpid():  # a child of the holder holds nothing
            return
        os.close(self._file)  # the kernel drops the lock: from here on the tiles are free, whatever becomes of the message
        self._file = -1
        try:
            self._connection.settimeout(0.2)
            self._connection.send(messages.encode(messages.Release(self.id)))
        except OSError:  # a later daemon serves: it sees the lock go, but not always at once
            with contextlib.suppress(OSError, TileworkError):
                other = _try(run_folder())
                if other is not None:
                    other.send(messages.encode(messages.Release(self.id)))
                    other.close()
        self._connection.close()
        os.close(self.stack)
        self.page.close()


def connect(start: bool = True) -> socket.socket:
    """A connection to this machine's daemon."""
    folder = run_folder()
    found = _try(folder)
    for _ in range(15 if folder == INSTALLED else 0):  # the service may be on its way up again
        if found is not None:
            break
        time.sleep(0.2)
        found = _try(folder)
    if found is None and start:
        _start(folder)
        found = _try(folder)
    if found is None:
        fix = "systemctl start tilework (as root)" if folder == INSTALLED else "tilework daemon run"
        pid = None if folder == INSTALLED else seat.locked_by(folder)
        why = f", though pid {pid} has its place" if pid is not None else ""
        raise MachineError(
            "tiles-daemon", "no daemon serves this machine's tiles", found=f"nothing answers in {folder}{why}", fix=fix
        )
    return found


def _try(folder: Path) -> socket.socket | None:
    try:
        name = read_plain(folder / ADDRESS)
        found = _reach(folder, name) if name and "/" not in name else None
        if (
            found is None and folder != INSTALLED
        ):  # in a shared folder anybody can write there: who has the lock has a socket, too
            pid = seat.locked_by(folder)
            for path in sorted(folder.glob(f"daemon-{pid}-*.sock"))[:8]:
                found = found or _reach(folder, path.name)
        return found
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise MachineError("tiles-daemon", "this process has no file descriptors left", found=str(e), fix="ulimit -n") from e
        return None


def _reach(folder: Path, name: str) -> socket.socket | None:
    """A connection to the daemon, and to nobody else."""
    place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        for attempt in range(100):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(f"/proc/self/fd/{place}/{name}")
                if seat.sits_there(folder, messages.peer(connection)[0]):
                    return connection
                connection.close()
                return None
            except OSError as e:
                connection.close()
                if e.errno != errno.EAGAIN or read_plain(folder / ADDRESS) != name:  # EAGAIN: many stand at the door
                    return None
                time.sleep(0.01 * (1 + attempt % 5))
        return None
    finally:
        os.close(place)


def answers(folder: Path) -> bool:
    found = _try(folder)
    if found is not None:
        found.close()
    return found is not None


def _start(folder: Path) -> None:
    """One of many clients starts the daemon; the others wait for it. An installed one is systemd's to start."""
    if folder == INSTALLED:
        return
    try:
        gate = open_plain(private(folder) / "start.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as e:
        raise MachineError("tiles-folder", f"{folder}: the daemon cannot be started there", found=str(e),
                           fix="make room or set TILEWORK_RUN to a directory that you can write to") from e  # fmt: skip
    try:
        until = time.monotonic() + GATE_SECONDS
        while not _locks(gate) and time.monotonic() < until:  # another process of this user's is about to start it
            if answers(folder):
                return
            time.sleep(0.005)
        if answers(folder):
            return
        here = str(Path(__file__).resolve().parents[2])  # the same Tilework as this one, wherever it was found
        environment = {**os.environ, "TILEWORK_RUN": str(folder),
                       "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}  # fmt: skip
        if "TILEWORK_SITE" in os.environ:
            environment["TILEWORK_SITE"] = str(Path(os.environ["TILEWORK_SITE"]).absolute())  # it starts in another folder
        child = subprocess.Popen([sys.executable, "-m", "tilework.tiles.service", "--auto"], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, cwd="/",
                                 env=environment)  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if answers(folder) and child.wait(1.0) == 0:  # it ends when the daemon, its child, serves
                return
            if child.poll() not in (None, 0):
                said = child.stderr.read().decode(errors="replace").strip() if child.stderr is not None else ""
                raise MachineError("tiles-daemon", "the daemon of this machine's tiles does not start",
                                   found=said or f"exit code {child.returncode}",
                                   fix="tilework daemon run shows why; TILEWORK_LEASE=0 runs without a lease")  # fmt: skip
            time.sleep(0.003)
    except subprocess.TimeoutExpired:
        pass  # another daemon answers
    finally:
        fcntl.flock(gate, fcntl.LOCK_UN)  # a process that was forked meanwhile has the same open file
        os.close(gate)


def _locks(gate: int) -> bool:
    try:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def lease(
    ask: Ask | str | None = None,
    *,
    command: str = "",
    job: str = "",
    platform: str | None = None,
    wait: float | None = None,
    report: Callable[[str], None] | None = None,
) -> Lease:
    """Waits in line. UserError where the time runs out, with the names of those who hold the tiles.

    If the daemon dies meanwhile, the request is made again at the next one."""
    until = None if wait is None else time.monotonic() + wait
    try:
        page, stack = Page(), os.memfd_create("tilework-stack", os.MFD_CLOEXEC)
    except OSError as e:
        raise MachineError("tiles-daemon", "this process has no file descriptors left", found=str(e), fix="ulimit -n") from e
    patience, answered, failures = 0.0, False, 0
    try:
        while True:
            try:
                connection = connect()
            except MachineError:
                patience = patience or time.monotonic() + (RESTART_SECONDS if answered else 0.0)
                if time.monotonic() >= patience:
                    raise
                time.sleep(0.2)
                continue
            answered, patience = True, 0.0
            left = None if until is None else max(0.0, until - time.monotonic())
            text, exact = (ask, None) if isinstance(ask, str) else ("", ask)
            request = messages.LeaseRequest(text, exact, page.fd, stack, _text(command, 200), _text(job, 60), platform, left)
            heard: list[str] = []
            try:
                return _lease(connection, request, page, stack, report, heard)
            except (ConnectionError, BrokenPipeError, BlockingIOError):  # it has died, or somebody stands in the way of our lock
                connection.close()
                failures = 0 if heard else failures + 1
                if failures > 100 or (until is not None and time.monotonic() > until + RESTART_SECONDS):
                    raise MachineError("tiles-daemon", "the daemon of this machine's tiles ends again and again",
                                       fix="look at its log: tilework daemon log") from None  # fmt: skip
                time.sleep(0.02)
            except TimeoutError:
                connection.close()
                raise _silent() from None
            except BaseException:
                connection.close()
                raise
    except BaseException:
        os.close(stack)
        page.close()
        raise


def _text(text: str, length: int) -> str:
    return printable(text.encode("utf-8", "replace").decode(), length)


def _silent() -> MachineError:
    return MachineError("tiles-daemon", "the daemon of this machine's tiles does not answer",
                        found=f"nothing for {ANSWER_SECONDS:.0f} s", fix="look whether it is stopped")  # fmt: skip


def _lease(
    connection: socket.socket,
    request: messages.LeaseRequest,
    page: Page,
    stack: int,
    report: Callable[[str], None] | None,
    heard: list[str],
) -> Lease:
    socket.send_fds(connection, [messages.encode(request)], [page.fd, stack])
    while True:
        packet, fds, _, _ = socket.recv_fds(connection, messages.LARGEST_REPLY, 4, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            raise ConnectionError("the daemon has gone")
        reply = granted = messages.loads(packet)
        heard.append(reply["state"])
        if reply["state"] == "granted" and len(fds) == 1:
            break
        for fd in fds:
            os.close(fd)
        if reply["state"] == "granted":
            raise MachineError("tiles-daemon", "this process has no file descriptors left for a lease", fix="ulimit -n")
        if reply["state"] == "waiting":
            connection.settimeout(reply["seconds"] + ANSWER_SECONDS)  # the daemon watches the clock, unless it is stopped
            if report is not None:
                report(f"waiting for {reply['ask']}; held: " + ("; ".join(reply["holders"]) or "by nobody"))
            continue
        if reply["state"] == "timeout":
            raise UserError("tiles-timeout", f"{reply['ask']} did not become free in time",
                            found="held: " + ("; ".join(reply["holders"]) or "by nobody"),
                            fix="wait longer (TILEWORK_WAIT, in seconds), ask for fewer tiles (TILEWORK_TILES), "
                            "or see `tilework top`")  # fmt: skip
        raise refusal(reply)
    connection.settimeout(ANSWER_SECONDS)
    try:
        locks.take(fds[0])
        reply = messages.ask_daemon(connection, messages.Taken())
        if reply.get("id") == "tiles-late":  # this process was stopped for a while, or very slow: stand in line again
            raise ConnectionError("the offer has run out")
        if reply["state"] != "go":
            raise refusal(reply)
        page.process.restart()
        return Lease(granted, fds[0], stack, page, connection)
    except BaseException:
        os.close(fds[0])
        raise


def refusal(reply: dict[str, Any]) -> TileworkError:
    kind = _KINDS.get(str(reply.get("kind")), UserError)
    return kind(str(reply.get("id")), str(reply.get("summary")), found=str(reply.get("found") or ""),
                expected=str(reply.get("expected") or ""), fix=str(reply.get("fix") or ""))  # fmt: skip


@contextmanager
def talking(start: bool = True) -> Iterator[Callable[[messages.Request], dict[str, Any]]]:
    """Questions to the daemon; refusals are raised."""
    connection = connect(start)

    def ask(request: messages.Request) -> dict[str, Any]:
        try:
            reply = messages.ask_daemon(connection, request)
        except TimeoutError:
            raise _silent() from None
        except OSError as e:
            raise _Ended(
                "tiles-daemon", "the daemon of this machine's tiles has just ended", found=str(e), fix="try again"
            ) from e
        if reply.get("state") == "refused":
            raise refusal(reply)
        return reply

    try:
        yield ask
    finally:
        connection.close()


def view(window: float = 2.0, platform: str | None = None) -> dict[str, Any]:
    """All tiles, leases and waiting requests, as the daemon sees them; of the platform that the environment asks for, too."""
    for attempt in (1, 2, 3):
        try:
            with talking() as ask:
                return ask(messages.View(window, platform or asked_platform()))
        except _Ended:
            if attempt == 3:
                raise
            time.sleep(0.05)
    raise AssertionError
