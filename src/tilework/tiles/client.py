"""Asking the daemon: a lease for this process, or a look at all tiles. The daemon is started where none runs."""

from __future__ import annotations

import contextlib
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
from . import locks, messages
from .asks import Ask
from .page import Page
from .places import INSTALLED, run_folder

START_SECONDS = 10.0
_KINDS: dict[str, type[TileworkError]] = {"environment": MachineError}


class Lease:
    """This process's right to some tiles, until release() or the end of the process."""

    def __init__(self, granted: dict[str, Any], fds: list[int], connection: socket.socket) -> None:
        self.id: str = granted["lease"]
        self.tiles: list[int] = granted["tiles"]
        self.paths: list[str] = granted["paths"]
        self.cpus: list[int] = granted["cpus"]
        self.gpus: list[int] = granted["gpus"]
        self.num_cores: int = granted["num_cores"]
        self.note: str = granted["note"]
        self.pid = os.getpid()
        self._file, self.stack = fds
        self._connection = connection
        self.page = Page(self._file)

    def release(self) -> None:
        if self._file < 0 or self.pid != os.getpid():  # a child of the holder holds nothing
            return
        os.close(self._file)  # the kernel drops the lock: from here on the tiles are free, whatever becomes of the message
        self._file = -1
        with contextlib.suppress(OSError, ConnectionError):
            messages.ask_daemon(self._connection, messages.Release(self.id))
        self._connection.close()
        os.close(self.stack)


def connect(start: bool = True) -> socket.socket:
    """A connection to this machine's daemon."""
    folder = run_folder()
    found = _try(folder)
    if found is None and start:
        _start(folder)
        found = _try(folder)
    if found is None:
        fix = "systemctl start tilework (as root)" if folder == INSTALLED else "tilework daemon run"
        raise MachineError("tiles-daemon", "no daemon serves this machine's tiles", found=f"nothing answers in {folder}", fix=fix)
    return found


def _try(folder: Path) -> socket.socket | None:
    try:
        name = (folder / "daemon.lock").read_text()
        if not name or "/" in name:
            return None
        place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except (OSError, UnicodeDecodeError):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(30)
    try:
        connection.connect(f"/proc/self/fd/{place}/{name}")
        return connection
    except OSError:
        connection.close()
        return None
    finally:
        os.close(place)


def _start(folder: Path) -> None:
    """One of many clients starts the daemon; the others wait for it."""
    if folder == INSTALLED and not os.access(folder, os.W_OK):
        return
    gate_path = folder / f"start-{os.getuid()}.lock"
    try:
        gate = os.open(gate_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise MachineError("tiles-folder", f"{folder}: the daemon cannot be started there", found=str(e),
                           fix="make room or set TILEWORK_RUN to a directory that you can write to") from e  # fmt: skip
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        if (found := _try(folder)) is not None:
            found.close()
            return
        command = [sys.executable, "-m", "tilework.tiles.daemon", "--auto"]
        environment = dict(os.environ) if folder == INSTALLED else {**os.environ, "TILEWORK_RUN": str(folder.resolve())}
        here = str(Path(__file__).resolve().parents[2])  # the same Tilework as this one, wherever it was found
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                 start_new_session=True, cwd="/", env=environment)  # fmt: skip
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if (found := _try(folder)) is not None:
                found.close()
                return
            if child.poll() not in (None, 0):
                said = child.stderr.read().decode(errors="replace").strip() if child.stderr is not None else ""
                raise MachineError("tiles-daemon", "the daemon of this machine's tiles does not start",
                                   found=said.splitlines()[-1] if said else f"exit code {child.returncode}",
                                   fix="tilework daemon run shows why; TILEWORK_LEASE=0 runs without a lease")  # fmt: skip
            time.sleep(0.003)
    finally:
        os.close(gate)


def lease(
    ask: Ask,
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
    for attempt in range(100):
        connection = connect()
        try:
            left = None if until is None else max(0.0, until - time.monotonic())
            return _lease(connection, messages.LeaseRequest(ask, command, job, platform, left), report)
        except (ConnectionError, TimeoutError, BrokenPipeError):
            connection.close()
            time.sleep(min(0.5, 0.01 * (attempt + 1)))
        except BaseException:
            connection.close()
            raise
    raise MachineError("tiles-daemon", "the daemon of this machine's tiles ends again and again",
                       fix="look at its log: tilework daemon status")  # fmt: skip


def _lease(connection: socket.socket, request: messages.LeaseRequest, report: Callable[[str], None] | None) -> Lease:
    connection.send(messages.encode(request))
    while True:
        packet, fds, _, _ = socket.recv_fds(connection, messages.LARGEST_REPLY, 4, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            raise ConnectionError("the daemon has gone")
        reply = granted = messages.loads(packet)
        if reply["state"] == "granted":
            break
        if reply["state"] == "waiting":
            connection.settimeout(None)  # the daemon watches the clock
            if report is not None:
                report(f"waiting for {request.ask}: held: " + ("; ".join(reply["holders"]) or "by nobody, some are drained"))
            continue
        if reply["state"] == "timeout":
            raise UserError("tiles-timeout", f"no tiles became free in time: {request.ask}",
                            found="held: " + ("; ".join(reply["holders"]) or "by nobody, some are drained"),
                            fix="wait longer (TILEWORK_WAIT, in seconds), ask for fewer tiles (TILEWORK_TILES), "
                            "or see `tilework top`")  # fmt: skip
        raise refusal(reply)
    connection.settimeout(30)
    try:
        locks.take(fds[0])
        reply = messages.ask_daemon(connection, messages.Taken())
        if reply["state"] != "go":
            raise refusal(reply)
        return Lease(granted, fds, connection)
    except BaseException:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
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
        reply = messages.ask_daemon(connection, request)
        if reply.get("state") == "refused":
            raise refusal(reply)
        return reply

    try:
        yield ask
    finally:
        connection.close()


def view(window: float = 2.0, platform: str | None = None) -> dict[str, Any]:
    """All tiles, leases and waiting requests, as the daemon sees them."""
    with talking() as ask:
        return ask(messages.View(window, platform))
