"""The daemon: grants leases, notices when they end, and knows what every tile is doing. One per machine, one thread.

It starts by itself where a session needs it (`--auto`, and then ends when it has been idle for a while), or as a service. It
decides who comes next; that two processes never hold one tile does not rest on its memory (locks.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import logging.handlers
import os
import pwd
import selectors
import signal
import socket
import struct
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..errors import MachineError, TileworkError, UserError
from . import locks, messages, page
from .ledger import Lease, Ledger, Waiting
from .machine import machine
from .places import INSTALLED, run_folder
from .site import read_site
from .store import Store
from .topology import HOST, Node, asked_platform, detect
from .usage import EVERY_SECONDS, Usage

log = logging.getLogger("tilework.tiles")
CONNECTIONS_PER_USER = 512
SILENT_SECONDS = 10.0  # a connection without a lease or a request is closed after this
OFFER_SECONDS = 5.0  # a client must take what it was offered
IDLE_EXIT_SECONDS = 600.0


class Connection:
    """A client, known by the kernel's word."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid, self.uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self.heard = time.monotonic()
        self.waiting: Waiting | None = None
        self.offered: str | None = None  # the lease that it has not taken yet
        self.lease: str | None = None


class Daemon:
    def __init__(self, folder: Path, platform: str | None = None, auto: bool = False) -> None:
        self.folder, self.auto = folder, auto
        self.site = read_site()
        self.fixed = platform or self.site.platform  # a client cannot change what the administrator chose
        self.ledger = Ledger(detect(platform, self.site), self.site.limits)
        self.connections: dict[int, Connection] = {}  # by file descriptor
        self.usage: dict[str, Usage] = {}
        self.offers: dict[str, float] = {}  # leases offered but not yet taken -> until when
        self.hung: dict[str, float] = {}  # lease -> since when, monotonic
        self.pidfds: dict[str, int] = {}
        self.selector = selectors.DefaultSelector()
        self.started, self.used = time.time(), time.monotonic()
        self.stopping = False

    # ---- starting and stopping ----

    def open(self) -> bool:
        """False where another daemon serves this machine already."""
        lock = self.folder / "daemon.lock"
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if lock.exists() else os.O_CREAT)
        before = os.umask(0)
        try:
            self._lock = os.open(lock, flags, 0o644 if self.folder == INSTALLED else 0o666)
        finally:
            os.umask(before)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            return False
        self.name = f"daemon-{os.getpid()}-{uuid.uuid4().hex[:6]}.sock"
        for old in self.folder.glob("daemon-*.sock"):
            with contextlib.suppress(OSError):
                old.unlink()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._folder_fd = os.open(self.folder, os.O_PATH | os.O_CLOEXEC)
        self.listener.bind(f"/proc/self/fd/{self._folder_fd}/{self.name}")  # a short name for a path of any length
        os.chmod(self.folder / self.name, 0o666)
        self.listener.listen(256)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.store = Store(self._private("state.db"))
        self.ledger.drained = {p: r for p, r in self.store.drained().items() if p in {t.path for t in self.ledger.node.tiles}}
        self._recover()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, self.name.encode(), 0)  # only now can clients find it
        log.info("daemon %s, pid %d, platform %s, %d tiles, %d leases found", __version__, os.getpid(),
                 self.ledger.node.platform, len(self.ledger.node.tiles), len(self.ledger.leases))  # fmt: skip
        return True

    def _private(self, name: str) -> Path:
        if self.folder == INSTALLED:
            return Path(os.environ.get("STATE_DIRECTORY", "/var/lib/tilework")) / name
        stem, dot, suffix = name.partition(".")
        return self.folder / f"{stem}-{os.getuid()}{dot}{suffix}"

    def _recover(self) -> None:
        """Live leases of an earlier daemon: those whose file is locked by the process that it was given to."""
        held = locks.holders()
        for record in sorted(self.folder.glob("lease-*.json")):
            try:
                lease = Lease(**json.loads(record.read_text()))
                tiles = tuple(int(t) for t in lease.tiles)
            except (OSError, ValueError, TypeError):
                self._remove(record.stem.removeprefix("lease-"))
                continue
            lease.tiles = tiles
            alive = locks.start_time(lease.pid) == lease.start
            if not alive or held.get(locks.key(self._file(lease.id, "page")) or (0, 0, 0)) != lease.pid:
                self._remove(lease.id)
                continue
            if lease.platform != self.ledger.node.platform and not self.ledger.leases:
                with contextlib.suppress(UserError):
                    self.ledger.node = detect(lease.platform, self.site)
            self._watch(lease)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / self.name).unlink()
        os.ftruncate(self._lock, 0)
        self.store.close()
        log.info("daemon stopped, %d leases live on", len(self.ledger.leases))

    # ---- the loop ----

    def serve(self) -> None:
        last = 0.0
        while not self.stopping:
            for key, _ in self.selector.select(max(0.0, last + EVERY_SECONDS - time.monotonic())):
                try:
                    key.data(key.fileobj)
                except Exception:
                    log.exception("a request failed")
                    if isinstance(key.fileobj, socket.socket) and key.fileobj is not self.listener:
                        self._close(key.fileobj)
            if time.monotonic() - last >= EVERY_SECONDS:
                last = time.monotonic()
                try:
                    self._tick(last)
                except Exception:
                    log.exception("the regular check failed")

    def _tick(self, now: float) -> None:
        held = locks.holders()
        for lease in list(self.ledger.leases.values()):
            if lease.id in self.offers:
                if now > self.offers[lease.id]:
                    self._end(lease, "not taken")
            elif held.get(locks.key(self._file(lease.id, "page")) or (0, 0, 0)) != lease.pid:
                self._end(lease, "released")
            elif locks.start_time(lease.pid) != lease.start:
                self._end(lease, "process ended")
            else:
                self.usage[lease.id].sample()
                self._look_for_hang(lease, now)
        for request in [w for w in self.ledger.queue if now > w.until]:
            self.ledger.forget(request)
            self._say(request.whose, {"state": "timeout", "holders": self._holders(request)})
        for connection in list(self.connections.values()):
            idle = connection.waiting is None and connection.offered is None and connection.lease is None
            if idle and now - connection.heard > SILENT_SECONDS:
                self._close(connection.sock)
        if self.ledger.leases or self.ledger.queue:
            self.used = now
        if self.auto and now - self.used > IDLE_EXIT_SECONDS:
            self.stopping = True
        self._advance()

    def _look_for_hang(self, lease: Lease, now: float) -> None:
        if self.usage[lease.id].stuck_for() < self.site.limits.hung_seconds:
            self.hung.pop(lease.id, None)
        elif lease.id not in self.hung:
            self.hung[lease.id] = now
            log.warning("lease %s hung: pid %d, user %s, %s", lease.id, lease.pid, _user(lease.uid), lease.command)
            with contextlib.suppress(OSError):  # not ours to signal: no stack then
                os.kill(lease.pid, signal.SIGURG)  # its faulthandler writes the stack; ignored by everybody else

    # ---- clients ----

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        connection = Connection(sock)
        if sum(c.uid == connection.uid for c in self.connections.values()) >= CONNECTIONS_PER_USER:
            sock.close()
            return
        self.connections[sock.fileno()] = connection
        self.selector.register(sock, selectors.EVENT_READ, self._packet)

    def _close(self, sock: socket.socket) -> None:
        connection = self.connections.pop(sock.fileno(), None)
        if connection is None:
            return
        with contextlib.suppress(KeyError):
            self.selector.unregister(sock)
        sock.close()
        if connection.waiting is not None:
            self.ledger.forget(connection.waiting)
        if connection.offered in self.ledger.leases:
            self._end(self.ledger.leases[str(connection.offered)], "not taken")
        self._advance()

    def _say(self, connection: Connection, what: Any, fds: tuple[int, ...] = ()) -> bool:
        """A client that does not read what it is told is cut off."""
        try:
            socket.send_fds(connection.sock, [messages.encode(what)], list(fds), socket.MSG_NOSIGNAL)
            return True
        except OSError:
            self._close(connection.sock)
            return False

    def _packet(self, sock: socket.socket) -> None:
        connection = self.connections[sock.fileno()]
        try:
            packet, _, flags, _ = sock.recvmsg(messages.LARGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        if not packet or flags & socket.MSG_TRUNC:
            self._close(sock)
            return
        connection.heard = self.used = time.monotonic()
        try:
            request = messages.decode(packet)
        except msgspec.DecodeError as e:
            if self._say(connection, {"state": "refused", "id": "tiles-protocol", "summary": f"not a request: {e}"}):
                self._close(sock)
            return
        try:
            self._handle(connection, request)
        except TileworkError as e:
            self._say(connection, {"state": "refused", **e.as_json(), "id": e.id})

    def _handle(self, connection: Connection, request: messages.Request) -> None:
        if isinstance(request, messages.LeaseRequest):
            self._ask(connection, request)
        elif isinstance(request, messages.Taken):
            self._taken(connection)
        elif isinstance(request, messages.Release):
            lease = self.ledger.leases.get(request.lease)
            if lease is None or lease.pid != connection.pid or lease.uid != connection.uid:
                raise UserError("tiles-lease", f"no lease {request.lease!r} of this process")
            connection.lease = None
            self._end(lease, "released")
            self._say(connection, {"state": "released"})
        elif isinstance(request, messages.View):
            self._take_platform(request.platform)
            self._say(connection, self.view(connection, request.window))
        elif isinstance(request, messages.Metrics):
            from .metrics import exposition

            self._say(connection, {"text": exposition(self.view(connection, 10.0))})
        elif isinstance(request, messages.Drain):
            self._only_admin(connection, "drain a tile")
            paths = self.ledger.drain(request.path, request.on, request.reason)
            self.store.set_drained(self.ledger.drained)
            log.info("%s: %s (%s)", "drained" if request.on else "back in use", request.path, request.reason)
            self._say(connection, {"state": "done", "tiles": paths})
            self._advance()
        elif isinstance(request, messages.Stop):
            self._only_admin(connection, "stop the daemon")
            self._say(connection, {"state": "done"})
            self.stopping = True

    def _only_admin(self, connection: Connection, what: str) -> None:
        if connection.uid not in (0, os.getuid()):
            raise UserError("tiles-permission", f"only root, or the user that runs the daemon, may {what}",
                            found=f"user {_user(connection.uid)}", fix=f"ask {_user(os.getuid())}")  # fmt: skip

    # ---- leases ----

    def _take_platform(self, wanted: str | None) -> str:
        """The client's platform, where the administrator chose none and nobody holds or waits for anything."""
        now = self.ledger.node.platform
        if wanted is None or wanted == now:
            return ""
        if self.fixed or self.ledger.leases or self.ledger.queue:
            why = "the site's choice" if self.fixed else "in use"
            return f"platform {wanted} asked for; this machine's tiles are {now} ({why})"
        self.ledger.node = detect(wanted, self.site)
        return ""

    def _ask(self, connection: Connection, request: messages.LeaseRequest) -> None:
        if connection.waiting is not None or connection.offered is not None or connection.lease is not None:
            raise UserError("tiles-protocol", "one lease a connection")
        note = self._take_platform(request.platform)
        wait = self.site.limits.wait_seconds if request.wait is None else request.wait
        waiting = Waiting(request.ask, connection.uid, connection.pid, request.command[:500], request.job[:100],
                          time.monotonic() + max(0.0, min(wait, 1e9)), connection)  # fmt: skip
        self.ledger.wait(waiting)
        waiting.capped = "; ".join(filter(None, (note, waiting.capped)))
        connection.waiting = waiting
        self._advance()
        if connection.waiting is not None and connection.sock.fileno() >= 0:
            ahead = self.ledger.queue.index(waiting)
            self._say(connection, {"state": "waiting", "ahead": ahead, "holders": self._holders(waiting)})

    def _advance(self) -> None:
        for request, tiles in self.ledger.next():
            connection: Connection = request.whose
            connection.waiting = None
            try:
                self._offer(connection, request, tiles)
            except OSError as e:
                log.error("a lease cannot be made: %s", e)
                self._say(connection, {"state": "refused", "id": "tiles-folder", "kind": "environment",
                                       "summary": f"{self.folder}: the lease cannot be written", "found": str(e),
                                       "fix": "make room on that file system"})  # fmt: skip

    def _offer(self, connection: Connection, request: Waiting, tiles: list[int]) -> None:
        """Files first, then the client's word that it has locked them; only then may it run (Taken)."""
        start = locks.start_time(request.pid)
        if start is None:
            return
        lease = Lease(uuid.uuid4().hex[:12], tuple(tiles), request.uid, request.pid, start, request.command, request.job,
                      self.ledger.node.platform, time.time())  # fmt: skip
        fds: list[int] = []
        try:
            for kind, mode in (("page", 0o644), ("stack", 0o600)):
                fds.append(os.open(self._file(lease.id, kind), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
            os.posix_fallocate(fds[0], 0, page.SIZE)  # the client writes through memory: there must be room for it
            record = self._file(lease.id, "json")
            part = record.with_suffix(".part")
            part.write_text(json.dumps(vars(lease)))
            part.rename(record)
            self._watch(lease)
            self.offers[lease.id] = time.monotonic() + OFFER_SECONDS
            connection.offered = lease.id
            self._say(connection, {"state": "granted", "lease": lease.id, "note": request.capped,
                                   **_compute(self.ledger.node, tiles)}, tuple(fds))  # fmt: skip
        except OSError:
            if lease.id in self.ledger.leases:
                self._end(lease, "failed")
            self._remove(lease.id)
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _taken(self, connection: Connection) -> None:
        lease = self.ledger.leases.get(connection.offered or "")
        if lease is None:
            raise UserError("tiles-protocol", "nothing was offered to this connection")
        if locks.holders().get(locks.key(self._file(lease.id, "page")) or (0, 0, 0)) != connection.pid:
            raise UserError("tiles-protocol", "the lease's file is not locked by this process")
        connection.offered, connection.lease = None, lease.id
        self.offers.pop(lease.id, None)
        self.store.began(lease)
        self._say(connection, {"state": "go"})

    def _watch(self, lease: Lease) -> None:
        self.ledger.leases[lease.id] = lease
        self.usage[lease.id] = Usage(self._file(lease.id, "page"))
        try:
            self.pidfds[lease.id] = fd = os.pidfd_open(lease.pid)
            self.selector.register(fd, selectors.EVENT_READ, lambda _: self._end(lease, "process ended"))
        except OSError:
            pass  # it has ended already: the next regular check sees that

    def _end(self, lease: Lease, how: str) -> None:
        if self.ledger.leases.pop(lease.id, None) is None:
            return
        pidfd = self.pidfds.pop(lease.id, None)
        if pidfd is not None:
            self.selector.unregister(pidfd)
            os.close(pidfd)
        self.usage.pop(lease.id).close()
        if self.offers.pop(lease.id, None) is None:
            self.store.ended(lease, how)
        self.hung.pop(lease.id, None)
        self._remove(lease.id)
        for connection in self.connections.values():
            if lease.id in (connection.lease, connection.offered):
                connection.lease = connection.offered = None
        self.used = time.monotonic()
        self._advance()

    def _file(self, lease: str, kind: str) -> Path:
        return self.folder / f"lease-{lease}.{kind}"

    def _remove(self, lease: str) -> None:
        for kind in ("json", "page", "stack"):
            with contextlib.suppress(OSError):
                self._file(lease, kind).unlink()

    # ---- the view ----

    def _holders(self, request: Waiting) -> list[str]:
        """For messages: who is in the way."""
        found = [f"{len(x.tiles)} by pid {x.pid} ({_user(x.uid)}, {x.command[:60] or 'no command'}, "
                 f"{_duration(time.time() - x.since)})" for x in self.ledger.in_the_way(request.ask)]  # fmt: skip
        ahead = self.ledger.queue.index(request) if request in self.ledger.queue else 0
        return found + ([f"{ahead} earlier request{'s' if ahead != 1 else ''}"] if ahead else [])

    def view(self, connection: Connection, window: float) -> dict[str, Any]:
        ledger, now = self.ledger, time.monotonic()
        holder = {i: lease.id for lease in ledger.leases.values() for i in lease.tiles}
        tiles = [{"path": t.path, "chip": t.chip, "cpus": t.cpus, "memory_node": t.memory_node, "gpu": t.gpu,
                  "multiprocessors": t.multiprocessors, "lease": holder.get(t.index),
                  "drained": ledger.drained.get(t.path)} for t in ledger.node.tiles]  # fmt: skip
        leases = []
        for lease in ledger.leases.values():
            private = connection.uid in (0, lease.uid)
            about = {"id": lease.id, "pid": lease.pid, "start": lease.start, "user": _user(lease.uid), "uid": lease.uid,
                     "command": lease.command, "job": lease.job, "tiles": lease.tiles, "since": lease.since,
                     "held_seconds": time.time() - lease.since, "hung": lease.id in self.hung,
                     **self.usage[lease.id].about(window)}  # fmt: skip
            if about["hung"]:
                about["stuck_seconds"] = self.usage[lease.id].stuck_for()
                about["stack"] = self._stack(lease.id) if private else ""
            leases.append(about)
        queue = [{"ask": str(w.ask), "user": _user(w.uid), "pid": w.pid, "command": w.command, "waited_seconds": now - w.since}
                 for w in ledger.queue]  # fmt: skip
        node = ledger.node
        return {
            "platform": node.platform, "title": node.title, "virtual": node.virtual, "note": node.note, "levels": node.levels,
            "tiles": tiles, "leases": leases, "queue": queue, "window_seconds": window,
            "daemon": {"pid": os.getpid(), "user": _user(os.getuid()), "started": self.started, "version": __version__,
                       "folder": str(self.folder), "trouble": self.store.trouble, "installed": self.folder == INSTALLED},
        }  # fmt: skip

    def _stack(self, lease: str) -> str:
        with contextlib.suppress(OSError):
            return self._file(lease, "stack").read_text(errors="replace")[-8000:]
        return ""


def _compute(node: Node, tiles: list[int]) -> dict[str, Any]:
    """What a lease gives: where its threads may run, and how many there are to be."""
    chosen = [node.tiles[i] for i in tiles]
    cpus = sorted({cpu for t in chosen for cpu in t.cpus})
    cores = [c for c in machine().cores if set(c.cpus) & set(cpus)]
    gpus = sorted({t.gpu for t in chosen if t.gpu is not None})
    return {"tiles": tiles, "paths": [t.path for t in chosen], "cpus": cpus, "gpus": gpus,
            "num_cores": max(1, len(cores))}  # fmt: skip


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilework daemon run", description="Serve this machine's tiles.")
    parser.add_argument("--platform", default=None, help="host, or a named platform; clients cannot change it then")
    parser.add_argument("--auto", action="store_true", help="started by a session: ends when nobody needs it")
    parser.add_argument("--listen", default=None, metavar="HOST:PORT", help="read-only HTTP: /metrics, /tiles")
    parser.add_argument("--token-file", default=None, help="the token that HTTP clients must send")
    args = parser.parse_args(argv)
    try:
        folder = run_folder() if not (os.geteuid() == 0 and INSTALLED.is_dir() and not args.auto) else INSTALLED
        platform = args.platform if args.platform else None
        daemon = Daemon(folder, platform, args.auto)
        if args.auto and not daemon.fixed and asked_platform() not in (None, HOST):
            daemon.ledger.node = detect(asked_platform(), daemon.site)
        path = Path("/var/log/tilework/daemon.log") if folder == INSTALLED else daemon._private("daemon.log")
        handler: logging.Handler
        try:
            handler = logging.handlers.RotatingFileHandler(path, maxBytes=2**20, backupCount=3)
        except OSError:
            handler = logging.StreamHandler()
        logging.basicConfig(handlers=[handler], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        if not daemon.open():
            print("a daemon serves this machine already", file=sys.stderr)
            return 0 if args.auto else 1
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(daemon, "stopping", True))
        signal.set_wakeup_fd(_wakeup(daemon))
        if args.listen:
            from .endpoint import listen

            listen(args.listen, args.token_file)
        daemon.serve()
        daemon.stop()
        return 0
    except TileworkError as e:
        log.error("%s", e)
        print(e, file=sys.stderr)
        return e.exit_code
    except OSError as e:
        print(MachineError("tiles-folder", "the daemon cannot start", found=str(e)), file=sys.stderr)
        return 3


def _wakeup(daemon: Daemon) -> int:
    """A signal must wake the loop."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    daemon.selector.register(read, selectors.EVENT_READ, lambda _: os.read(read, 64))
    return write


if __name__ == "__main__":
    sys.exit(main())
