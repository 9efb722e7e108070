"""Asking the daemon: a lease for this process, or a look at all tiles. The daemon is started where none runs.

Who starts it makes its socket, too, and hands it over: from then on anybody can connect, and is served as soon as it is up. So a
session that shares the machine says that it is there, and goes on without waiting for anything.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MachineError, TileworkError, UserError
from . import alive, messages, place
from .asks import Ask
from .machine import ranges
from .messages import printable
from .page import Page
from .place import is_service, run_folder
from .topology import asked_platform
from .view import View

log = logging.getLogger("tilework.tiles")
ANSWER_SECONDS = 20.0  # for an answer, also from a daemon that is just starting
GATE_SECONDS = 2.0  # then several may start it, because who was first may have been stopped; one of them becomes the daemon
RESTART_SECONDS = 30.0  # how long a client bears a daemon that is being restarted
UP_AGAIN_SECONDS = 3.0  # how long a service may take to be up again
SERVICE = "TILEWORK_SERVICE"  # in the environment of what serves others: it does not end with the job that happened to start it
_KINDS: dict[str, type[TileworkError]] = {"environment": MachineError}
_views = msgspec.json.Decoder(View)


class _Ended(MachineError):
    """The daemon went away while we asked it; the next one can be asked."""


class Connection:
    """To the daemon, which may still be starting."""

    def __init__(self, sock: socket.socket, said: int = -1) -> None:
        self.sock, self._said = sock, said  # said: what the daemon that we started writes while it starts

    def send(self, request: messages.Request) -> None:
        self.sock.send(messages.encode(request))

    def receive(self) -> bytes:
        """ConnectionError where the daemon has gone; MachineError where it could not start, or says nothing."""
        try:
            return messages.receive(self.sock)
        except TimeoutError:
            raise MachineError("tiles-daemon", "the daemon of this machine's tiles does not answer",
                               found=f"nothing for {self.sock.gettimeout() or 0:.0f} s",
                               fix="look whether it is stopped") from None  # fmt: skip
        except ConnectionError:
            why = self._why()
            if not why:
                raise
            raise MachineError("tiles-daemon", "the daemon of this machine's tiles does not start", found=why,
                               fix="see `tilework daemon run`; TILEWORK_TILES=shared needs no daemon") from None  # fmt: skip

    def _why(self) -> str:
        if self._said < 0:
            return ""
        with open(self._said, "rb", closefd=False) as f:
            f.seek(0)
            return f.read(4000).decode(errors="replace").strip()

    def close(self) -> None:
        self.sock.close()
        if self._said >= 0:
            os.close(self._said)
            self._said = -1


def connect(start: bool = True) -> Connection:
    """A connection to the daemon that serves this process."""
    folder = run_folder()
    until, service, pid = time.monotonic() + UP_AGAIN_SECONDS, is_service(folder), None
    try:
        while True:
            sock = _reach(folder)
            if sock is not None:
                return Connection(sock)
            pid = place.process_at(folder) if start else None  # about to end, or to make again what somebody removed
            if time.monotonic() >= until or not (service or pid):
                break
            time.sleep(0.02)
        if start and not service and pid is None:
            return _start(folder, GATE_SECONDS)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):
            raise MachineError("tiles-daemon", "this process has no file descriptors left", found=str(e), fix="ulimit -n") from e
        raise MachineError("tiles-folder", f"{folder}: the daemon cannot be started there", found=str(e),
                           fix="make room, or set TILEWORK_RUN to a folder that you can write to") from e  # fmt: skip
    raise MachineError("tiles-daemon", "no daemon serves this machine's tiles",
                       found=f"nothing answers in {folder}" + (f", though pid {pid} has its place" if pid else ""),
                       fix="systemctl start tilework (as root)" if service else "tilework daemon run")  # fmt: skip


def _reach(folder: Path) -> socket.socket | None:
    for attempt in range(100):
        try:
            return place.reach(folder, ANSWER_SECONDS)
        except BlockingIOError:  # many stand at the door
            time.sleep(0.01 * (1 + attempt % 5))
    return None


def answers(folder: Path) -> bool:
    found = _reach(folder)
    if found is not None:
        found.close()
    return found is not None


def _start(folder: Path, patience: float) -> Connection:
    """One of many clients makes the daemon's socket and starts it; the others find the socket."""
    gate = os.open(folder / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            try:
                alive.lock(gate)
                break
            except OSError:  # another process is about to
                time.sleep(0.002)
        sock = _reach(folder)
        if sock is not None:
            return Connection(sock)
        said, listener = os.memfd_create("tilework-said", os.MFD_CLOEXEC), place.listen(folder)
        try:
            sock = _reach(folder)
            assert sock is not None
            _run(folder, listener.fileno(), said)
            return Connection(sock, said)
        except BaseException:
            os.close(said)
            raise
        finally:
            listener.close()
    finally:
        os.close(gate)


def _run(folder: Path, listener: int, said: int) -> None:
    """Through a shell that ends at once: the daemon is no child of a session."""
    here = str(Path(__file__).resolve().parents[2])  # the same Tilework as this one, wherever it was found
    environment = {**os.environ, "TILEWORK_RUN": str(folder), SERVICE: "1",
                   "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}  # fmt: skip
    if "TILEWORK_SITE" in os.environ:
        environment["TILEWORK_SITE"] = str(Path(os.environ["TILEWORK_SITE"]).absolute())  # it starts in another folder
    words = [sys.executable, "-m", "tilework.tiles.service", "--auto", "--listener", str(listener)]
    subprocess.run(["/bin/sh", "-c", '"$@" &', "sh", *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                   start_new_session=True, cwd="/", env=environment, pass_fds=[listener], check=False)  # fmt: skip


# ---- leases ----


class Lease:
    """This process's right to some tiles, until release() or the end of the process."""

    def __init__(self, granted: dict[str, Any], page: Page, stack: int) -> None:
        self.id: str = granted["lease"]
        self.tiles: list[int] = granted["tiles"]
        self.paths: list[str] = granted["paths"]
        self.cpus: list[int] = granted["cpus"]
        self.gpus: list[int] = granted["gpus"]
        self.num_cores: int = granted["num_cores"]
        self.note: str = granted["note"]
        self.pid = os.getpid()
        self.page, self.stack = page, stack

    def release(self) -> None:
        if self.page.fd < 0 or self.pid != os.getpid():  # a child of the holder holds nothing
            return
        self.page.close()  # the kernel drops the lock: from here on the tiles are free, whatever becomes of the message
        os.close(self.stack)
        with contextlib.suppress(OSError, TileworkError):
            sock = place.reach(run_folder(), 0.2)
            if sock is not None:
                with sock:
                    sock.send(messages.encode(messages.Release(self.id)))


def files() -> tuple[Page, int]:
    """A page, locked, and a memory file for stacks: what the daemon needs of a process."""
    try:
        page = Page()
        try:
            alive.lock(page.fd)
            return page, os.memfd_create("tilework-stack", os.MFD_CLOEXEC)
        except BaseException:
            page.close()
            raise
    except OSError as e:
        raise MachineError("tiles-daemon", "this process has no file descriptors left", found=str(e), fix="ulimit -n") from e


def share(page: Page, stack: int, *, command: str = "", label: str = "") -> None:
    """Has this process shown, beside those that hold tiles. Never fails, and waits for nobody: where no daemon runs, one is
    started, and finds what was sent here."""
    try:
        folder = run_folder()
        sock = place.reach(folder, 0.0)
        connection = Connection(sock) if sock is not None else None if is_service(folder) else _start(folder, 0.05)
        if connection is not None:
            connection.sock.setblocking(False)
            connection.send(messages.Share(page.fd, stack, _text(command, 200), _text(label, 60)))
            connection.close()
    except (OSError, TileworkError) as e:
        log.debug("this session is not shown: %s", e)


def lease(
    ask: Ask | str | None = None,
    *,
    command: str = "",
    label: str = "",
    platform: str | None = None,
    wait: float | None = None,
    cpus: set[int] | None = None,
    keeps: str = "",
    part: tuple[int, int] = (0, 1),
    chosen: str = "",
    report: Callable[[str], None] | None = None,
    own: tuple[Page, int] | None = None,
) -> Lease:
    """Waits in line. UserError where the time runs out, with the names of those who hold the tiles. If the daemon dies meanwhile,
    the request is made again at the next one.

    cpus: that the process may use, as far as it knows better than the kernel. own: its files, where it has some.
    keeps: a job's id; the tiles are for this process's descendants, who ask for `job`, each for its part of them, or
    for those that it names (chosen)."""
    until = None if wait is None else time.monotonic() + wait
    page, stack = own or files()
    text, exact = (ask, None) if isinstance(ask, str) else ("", ask)
    request = messages.LeaseRequest(text, exact, ranges(cpus or os.sched_getaffinity(0)), page.fd, stack, _text(command, 200),
                                    _text(label, 60), platform, keeps=keeps, part=part, chosen=chosen,
                                    request=uuid.uuid4().hex[:12])  # fmt: skip
    lost = 0.0  # since when the daemon that we asked is gone
    try:
        while True:
            try:
                connection = connect()
            except MachineError:
                if not lost or time.monotonic() > lost + RESTART_SECONDS:
                    raise
                time.sleep(0.2)
                continue
            heard: list[str] = []
            try:
                request.wait = None if until is None else max(0.0, until - time.monotonic())
                granted = _wait(connection, request, report, heard)
                if own is None:
                    page.process.restart()
                return Lease(granted, page, stack)
            except ConnectionError:
                lost = time.monotonic() if heard or not lost else lost
                if time.monotonic() > lost + RESTART_SECONDS:
                    raise MachineError("tiles-daemon", "the daemon of this machine's tiles ends again and again",
                                       fix="look at its log: tilework daemon log") from None  # fmt: skip
                time.sleep(0.02)
            finally:
                connection.close()
    except BaseException:
        if own is None:
            os.close(stack)
            page.close()
        raise


def _text(text: str, length: int) -> str:
    return printable(text.encode("utf-8", "replace").decode(), length)


def _wait(
    connection: Connection, request: messages.LeaseRequest, report: Callable[[str], None] | None, heard: list[str]
) -> dict[str, Any]:
    connection.send(request)
    while True:
        reply = messages.loads(connection.receive())
        heard.append(reply["state"])
        if reply["state"] == "granted":
            return reply
        held = "held: " + ("; ".join(reply.get("holders", ())) or "by nobody")
        if reply["state"] == "waiting":
            connection.sock.settimeout(reply["seconds"] + ANSWER_SECONDS)  # the daemon watches the clock, unless it is stopped
            if report is not None:
                report(f"waiting for {reply['ask']}; {held}")
            continue
        if reply["state"] == "timeout":
            raise UserError("tiles-timeout", f"{reply['ask']} did not become free in time", found=held,
                            fix="wait longer (TILEWORK_WAIT, in seconds), ask for fewer tiles (TILEWORK_TILES, --tiles), run "
                            "without (TILEWORK_TILES=shared), or see `tilework top`")  # fmt: skip
        raise refusal(reply)


def refusal(reply: dict[str, Any]) -> TileworkError:
    kind = _KINDS.get(str(reply.get("kind")), UserError)
    return kind(str(reply.get("id")), str(reply.get("summary")), found=str(reply.get("found") or ""),
                expected=str(reply.get("expected") or ""), fix=str(reply.get("fix") or ""))  # fmt: skip


# ---- questions ----


@contextmanager
def talking(start: bool = True) -> Iterator[Callable[[messages.Request], dict[str, Any]]]:
    """Questions to the daemon; refusals are raised."""
    connection = connect(start)
    try:
        yield lambda request: _answer(connection, request)[1]
    finally:
        connection.close()


def _answer(connection: Connection, request: messages.Request) -> tuple[bytes, dict[str, Any]]:
    try:
        connection.send(request)
        packet = connection.receive()
    except OSError as e:
        raise _Ended("tiles-daemon", "the daemon of this machine's tiles has just ended", found=str(e), fix="try again") from e
    reply = messages.loads(packet)
    if reply.get("state") == "refused":
        raise refusal(reply)
    return packet, reply


def view(window: float = 2.0, platform: str | None = None, start: bool = True) -> View:
    """All tiles, leases and waiting requests, as the daemon sees them; of the platform that the environment asks for, too."""
    for attempt in range(20):
        connection = connect(start)
        try:
            return _views.decode(_answer(connection, messages.Look(window, platform or asked_platform()))[0])
        except _Ended:
            if attempt == 19:
                raise
            time.sleep(0.05)
        finally:
            connection.close()
    raise AssertionError
