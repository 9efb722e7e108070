"""The daemon: grants leases, notices when they end, and knows what every tile is doing. One per machine, one thread.

It starts by itself where a session needs it (`--auto`, and then ends when it has been idle for a while), or as a service. Which
leases are alive does not rest on its memory or its disk (locks.py): the next daemon finds them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import logging.handlers
import os
import selectors
import signal
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..errors import MachineError, TileworkError, UserError
from . import locks, messages, records, recovery
from .asks import Ask, parse
from .describe import compute, holders_in_words, not_that_platform, user_name, view
from .ledger import Lease, Ledger, Waiting
from .messages import printable
from .places import open_plain, state_path
from .recovery import is_memory
from .seat import Seat
from .site import read_site
from .store import Store
from .topology import HOST, detect
from .usage import EVERY_SECONDS, Usage

log = logging.getLogger("tilework.tiles")
CONNECTIONS_PER_USER = 128
SILENT_SECONDS = 10.0  # a connection without a lease or a request is closed after this
OFFER_SECONDS = 5.0  # a client must take what it was offered
IDLE_EXIT_SECONDS = 600.0
SAME_VIEW_SECONDS = 0.05
LONGEST_WAIT = 7 * 86400.0


class Connection:
    """A client, known by the kernel's word."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pid, self.uid = messages.peer(sock)
        self.heard = time.monotonic()
        self.waiting: Waiting | None = None
        self.fds: list[int] = []  # the client's page and stack, until there is a lease for them
        self.offered: str | None = None  # the lease that it has not taken yet
        self.lease: str | None = None

    def drop_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def close(self) -> None:
        self.sock.close()
        self.drop_fds()


class Daemon:
    def __init__(self, folder: Path, platform: str | None = None, auto: bool = False) -> None:
        self.folder, self.auto, self.seat = folder, auto, Seat(folder)
        self.site = read_site()
        self.fixed = platform or self.site.platform  # a client cannot change what the administrator chose
        self.ledger = Ledger(detect(self.fixed or HOST, self.site), self.site.limits)
        self.connections: dict[int, Connection] = {}  # by file descriptor
        self.usage: dict[str, Usage] = {}
        self.stacks: dict[str, int] = {}  # lease -> the client's memory file
        self.files: dict[str, int] = {}  # lease -> our descriptor of its lock's file
        self.offers: dict[str, float] = {}  # leases offered but not yet taken -> until when
        self.hung: set[str] = set()  # leases
        self.pidfds: dict[str, int] = {}
        self.selector = selectors.DefaultSelector()
        self.started, self.begun, self.used = time.time(), time.monotonic(), time.monotonic()
        self.expected: dict[tuple[int, int], float] = {}  # who waited at the daemon before this one -> since when
        self._written: list[Waiting] = []  # the queue as the next daemon would find it
        self.stopping = False
        self._advancing = self._again = False
        self._lost = 0  # how often in a row the seat could not be kept
        self._metrics = (0.0, "")
        self._views: dict[tuple[Any, ...], tuple[float, bytes]] = {}  # what was just shown, encoded

    # ---- starting and stopping ----

    def open(self) -> bool:
        """False where another daemon serves this machine already."""
        if not self.seat.take():
            return False
        self.selector.register(self.seat.listener, selectors.EVENT_READ, self._accept)
        self.store = Store(state_path(self.folder))
        platform, drained = self.store.drained()
        if drained and not self.fixed:
            with contextlib.suppress(UserError):  # drained tiles are tiles of their platform
                self.ledger.node = detect(platform, self.site)
        for lease, fd in recovery.live_leases(self.folder):
            if lease.platform != self.ledger.node.platform and not (self.ledger.leases or self.fixed):
                with contextlib.suppress(UserError):
                    self.ledger.node = detect(lease.platform, self.site)
            lease.tiles = recovery.taken_up(self.ledger.node, lease)  # a live lease is never passed over
            if fd is not None:
                self.files[lease.id] = fd
            self._watch(lease, recovery.memory_of(lease, lease.page), recovery.memory_of(lease, lease.stack))
        self.store.still_alive(self.ledger.leases)
        known = {t.path for t in self.ledger.node.tiles}
        self.ledger.drained = {p: r for p, r in drained.items() if p in known and platform == self.ledger.node.platform}
        holding = {(lease.pid, lease.start) for lease in self.ledger.leases.values()}
        self.expected = {who: since for who, since in recovery.read_queue(self.folder).items() if who not in holding}
        self.seat.show()  # only now can clients find it
        log.info("daemon %s, pid %d, platform %s, %d tiles, %d leases found", __version__, os.getpid(),
                 self.ledger.node.platform, len(self.ledger.node.tiles), len(self.ledger.leases))  # fmt: skip
        return True

    def stop(self) -> None:
        self.seat.leave()
        self.store.close()
        log.info("daemon stopped, %d leases live on", len(self.ledger.leases))

    # ---- the loop ----

    def serve(self) -> None:
        last = 0.0
        while not self.stopping:
            next_look = min([last + EVERY_SECONDS, *(w.until for w in self.ledger.queue)])
            for key, _ in self.selector.select(max(0.0, next_look - time.monotonic())):
                try:
                    key.data(key.fileobj)
                except Exception:
                    log.exception("a request failed")
                    if isinstance(key.fileobj, socket.socket) and key.fileobj is not self.seat.listener:
                        self._close(key.fileobj)
            try:
                self._expire(time.monotonic())
                if time.monotonic() - last >= EVERY_SECONDS:
                    last = time.monotonic()
                    self._tick(last)
            except Exception:
                log.exception("the regular check failed")

    def _tick(self, now: float) -> None:
        for lease in list(self.ledger.leases.values()):
            if lease.id in self.offers:
                if now > self.offers[lease.id]:
                    self._end(lease, "not taken")
            elif not self._still_held(lease):
                self._end(lease, "released")
            else:
                self.usage[lease.id].sample()
                self._look_for_hang(lease)
        for connection in list(self.connections.values()):
            idle = connection.waiting is None and connection.offered is None and connection.lease is None
            if idle and now - connection.heard > SILENT_SECONDS:
                self._close(connection.sock)
        if self.ledger.leases or self.ledger.queue or self.ledger.drained:
            self.used = now
        if (self.auto and now - self.used > IDLE_EXIT_SECONDS) or (self.seat.gives_way() and not self.ledger.leases):
            self.stopping = True
        if now - self.begun > recovery.GRACE_SECONDS:
            self.expected.clear()
        self._keep_seat()
        self._remember_queue()
        self.store.purge(now)
        self._advance()

    def _keep_seat(self) -> None:
        listener = self.seat.listener
        try:
            kept = self.seat.keep()
            self._lost = 0
        except (OSError, MachineError) as e:
            self._lost += 1
            if self._lost == 1:
                log.error("%s: what was removed there cannot be made again: %s", self.folder, e)
            if isinstance(e, OSError) and e.errno == errno.EBUSY and self._lost > 4:  # another daemon, not somebody who looks
                self.stopping = True
            return
        if not kept:
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(listener)
            for lease in self.ledger.leases.values():
                if not records.file(self.folder, lease.id, "lock").exists():  # the lock lives on, but no other daemon can see it
                    lease.bare = True
                    with contextlib.suppress(OSError):
                        records.write(self.folder, lease)
            self._written = []
        if self.seat.listener not in self.selector.get_map():  # a new one, or left out because descriptors had run out
            self.selector.register(self.seat.listener, selectors.EVENT_READ, self._accept)

    def _remember_queue(self) -> None:
        if self.ledger.queue != self._written:
            self._written = self.ledger.queue[:]
            recovery.write_queue(self.folder, self._written)

    def _expire(self, now: float) -> None:
        for request in [w for w in self.ledger.queue if now >= w.until]:
            connection, words = request.whose, holders_in_words(self.ledger, request)
            self.ledger.forget(request)
            connection.waiting = None
            connection.drop_fds()
            self._say(connection, {"state": "timeout", "ask": str(request.ask), "holders": words})

    def _still_held(self, lease: Lease) -> bool:
        fd, path = self.files.get(lease.id), records.file(self.folder, lease.id, "lock")
        if fd is not None:
            return locks.holder(fd) == lease.pid
        if lease.bare or not path.exists():  # somebody removed it: its lock may live on, so only the process's end tells
            return locks.start_time(lease.pid) == lease.start
        return locks.holder_of(path) == lease.pid

    def _drop_released(self) -> None:
        """Whoever asks must not see, or wait for, what has just been given back."""
        for lease in list(self.ledger.leases.values()):
            if lease.id not in self.offers and not self._still_held(lease):
                self._end(lease, "released")

    def _look_for_hang(self, lease: Lease) -> None:
        if self.usage[lease.id].stuck_for() < self.site.limits.hung_seconds:
            self.hung.discard(lease.id)
        elif lease.id not in self.hung:
            self.hung.add(lease.id)
            log.warning("lease %s hung: pid %d, user %s, %s", lease.id, lease.pid, user_name(lease.uid), lease.command)
            with contextlib.suppress(OSError):  # not ours to signal: no stack then
                os.kill(lease.pid, signal.SIGURG)  # its faulthandler writes the stack; ignored by everybody else

    # ---- clients ----

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as e:  # no descriptors left: those who are connected are served first
            log.error("a client could not be let in: %s", e)
            self.selector.unregister(listener)
            return
        sock.setblocking(False)
        connection = Connection(sock)
        theirs = sum(c.uid == connection.uid and c.lease is None for c in self.connections.values())
        if theirs >= CONNECTIONS_PER_USER and connection.uid:
            self._refuse_and_close(connection, "tiles-limit", f"more than {CONNECTIONS_PER_USER} connections of one user")
            return
        self.connections[sock.fileno()] = connection
        self.selector.register(sock, selectors.EVENT_READ, self._packet)

    def _close(self, sock: socket.socket) -> None:
        connection = self.connections.pop(sock.fileno(), None)
        if connection is None:
            return
        with contextlib.suppress(KeyError):
            self.selector.unregister(sock)
        connection.close()
        if connection.waiting is not None:
            self.ledger.forget(connection.waiting)
        if connection.offered in self.ledger.leases:
            self._end(self.ledger.leases[str(connection.offered)], "not taken")
        self._advance()

    def _say(self, connection: Connection, what: Any, fds: tuple[int, ...] = ()) -> bool:
        """A client that does not read what it is told is cut off."""
        data, memory = what if isinstance(what, bytes) else messages.encode(what), -1
        try:
            if len(data) > messages.LARGEST_REPLY:
                memory = os.memfd_create("tilework-answer", os.MFD_CLOEXEC)
                with open(memory, "wb", closefd=False) as f:
                    f.write(data)
                os.lseek(memory, 0, os.SEEK_SET)
                data, fds = messages.encode({"state": "in memory"}), (memory,)
            socket.send_fds(connection.sock, [data], list(fds), socket.MSG_NOSIGNAL)
            return True
        except OSError:
            self._close(connection.sock)
            return False
        finally:
            if memory >= 0:
                os.close(memory)

    def _refuse_and_close(self, connection: Connection, id: str, summary: str) -> None:
        with contextlib.suppress(OSError):
            what = {"state": "refused", "id": id, "summary": summary}
            if id == "tiles-protocol":
                what |= {"found": f"the daemon is version {__version__}", "fix": "if yours is another: tilework daemon stop"}
            connection.sock.send(messages.encode(what), socket.MSG_NOSIGNAL)
        self._close(connection.sock)
        connection.close()

    def _packet(self, sock: socket.socket) -> None:
        connection = self.connections[sock.fileno()]
        fds: list[int] = []
        try:
            packet, fds, flags, _ = socket.recv_fds(sock, messages.LARGEST_REQUEST, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        try:
            if not packet:
                self._close(sock)
                return
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                self._refuse_and_close(connection, "tiles-protocol", f"a request is at most {messages.LARGEST_REQUEST} bytes")
                return
            connection.heard = self.used = time.monotonic()
            try:
                request = messages.decode(packet)
            except msgspec.DecodeError as e:
                self._refuse_and_close(connection, "tiles-protocol", f"not a request: {printable(str(e), 200)}")
                return
            try:
                self._handle(connection, request, fds)
            except TileworkError as e:
                self._say(connection, {"state": "refused", **e.as_json(), "id": e.id})
        finally:
            for fd in fds:  # what the request did not take over
                os.close(fd)

    def _handle(self, connection: Connection, request: messages.Request, fds: list[int]) -> None:
        if isinstance(request, messages.LeaseRequest):
            self._ask(connection, request, fds)
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
            self._drop_released()
            self._say(connection, self._view(connection.uid, min(max(request.window, 0.0), 60.0), request.platform))
        elif isinstance(request, messages.Metrics):
            if time.monotonic() - self._metrics[0] > 1.0:
                from .metrics import exposition

                self._metrics = time.monotonic(), exposition(view(self, connection.uid, 10.0))
            self._say(connection, {"text": self._metrics[1]})
        elif isinstance(request, messages.History):
            rows = self.store.history(request.limit)
            self._say(connection, {"leases": [{**row, "user": user_name(row["uid"])} for row in rows]})
        elif isinstance(request, messages.Drain):
            self._only_admin(connection, "drain a tile")
            if other := self._take_platform(request.platform):
                raise UserError("tiles-platform", other, fix="leave --platform out to change the tiles in use")
            paths = self.ledger.drain(request.path, request.on, printable(request.reason, 100))
            self.store.set_drained(self.ledger.node.platform, self.ledger.drained)
            log.info("%s: %s (%s)", "drained" if request.on else "back in use", paths, printable(request.reason, 100))
            self._say(connection, {"state": "done", "tiles": paths})
            self._advance()
        elif isinstance(request, messages.Stop):
            self._only_admin(connection, "stop the daemon")
            self._say(connection, {"state": "done"})
            self.stopping = True

    def _view(self, uid: int, window: float, platform: str | None) -> bytes:
        """The same for all who ask at the same time, as long as nobody has come or gone."""
        now = time.monotonic()
        who = (tuple(self.ledger.leases), tuple(map(id, self.ledger.queue)), tuple(self.ledger.drained.items()), tuple(self.hung))
        key = (uid, window, platform, self.ledger.node.platform, who)
        at, found = self._views.get(key, (0.0, b""))
        if now - at > SAME_VIEW_SECONDS:
            found = messages.encode(view(self, uid, window, platform))
            self._views = {k: v for k, v in self._views.items() if now - v[0] <= SAME_VIEW_SECONDS}
            self._views[key] = now, found
        return found

    def _only_admin(self, connection: Connection, what: str) -> None:
        if connection.uid not in (0, os.getuid()):
            raise UserError("tiles-permission", f"only root, or the user that runs the daemon, may {what}",
                            found=f"user {user_name(connection.uid)}", fix=f"ask {user_name(os.getuid())}")  # fmt: skip

    # ---- leases ----

    def can_change_platform(self) -> bool:
        """Only while nobody holds, waits for or has drained anything: tiles of two platforms are the same cores."""
        return not (self.fixed or self.ledger.leases or self.ledger.queue or self.ledger.drained)

    def _take_platform(self, wanted: str | None) -> str:
        """The client's platform, where that is possible; a line that says so where it is not."""
        asked = wanted is not None
        wanted = wanted or self.fixed or HOST  # whoever asks for nothing does not inherit the last one's wish
        if wanted == self.ledger.node.platform or (not asked and not self.can_change_platform()):
            return ""
        node = detect(wanted, self.site)  # a UserError where there is none of that name
        if not self.can_change_platform():
            return not_that_platform(self, wanted)
        self.ledger.node = node
        return ""

    def _ask(self, connection: Connection, request: messages.LeaseRequest, fds: list[int]) -> None:
        if connection.waiting is not None or connection.offered is not None or connection.lease is not None:
            raise UserError("tiles-protocol", "one lease a connection")
        if len(fds) != 2 or not all(map(is_memory, fds)):
            raise UserError("tiles-protocol", "a request for a lease comes with two memory files")
        self._drop_released()
        note = self._take_platform(request.platform)
        ask = request.ask or (parse(request.text, self.ledger.node) if request.text else Ask())
        wait = self.site.limits.wait_seconds if request.wait is None else request.wait
        wait = max(0.0, min(wait, LONGEST_WAIT))
        start = locks.start_time(connection.pid)
        if start is None:
            raise MachineError("tiles-daemon", f"the daemon cannot see process {connection.pid}",
                               found="it runs in another pid namespace, or /proc hides it (hidepid)",
                               fix="run the daemon as root, in the machine's own namespace")  # fmt: skip
        since = self.expected.pop((connection.pid, start), time.monotonic())
        until = (since if request.wait is None else time.monotonic()) + wait
        if self.expected:  # nobody is served before they are back: that must not cost anybody his turn
            until = max(until, self.begun + recovery.GRACE_SECONDS + EVERY_SECONDS)
        waiting = Waiting(ask, connection.uid, connection.pid, start, printable(request.command, 200), printable(request.job, 60),
                          until, connection, request.page, request.stack, since=since)  # fmt: skip
        self.ledger.wait(waiting)
        waiting.capped = "; ".join(filter(None, (note, waiting.capped)))
        connection.drop_fds()
        connection.waiting, connection.fds = waiting, fds[:]
        fds.clear()
        self._advance()
        if connection.waiting is not None and connection.sock.fileno() >= 0:
            self._remember_queue()
            self._say(connection, {"state": "waiting", "seconds": wait, "ask": str(waiting.ask),
                                   "holders": holders_in_words(self.ledger, waiting)})  # fmt: skip

    def _advance(self) -> None:
        """Serves who can be served, one at a time: whatever happens to one client changes what is free for the next."""
        if self._advancing:  # called from within: the loop below looks again
            self._again = True
            return
        if self.expected:  # some who waited before this daemon began have not come back yet: they were first
            return
        self._advancing = True
        try:
            while True:
                self._again = False
                served = self.ledger.next_one()
                if served is not None:
                    self._serve(*served)
                elif not self._again:
                    return
        finally:
            self._advancing = False

    def _serve(self, request: Waiting, tiles: list[int]) -> None:
        connection: Connection = request.whose
        connection.waiting = None
        try:
            try:
                self._offer(connection, request, tiles)
            except FileNotFoundError:  # somebody has just removed the folder
                self._keep_seat()
                self._offer(connection, request, tiles)
        except Exception as e:
            connection.drop_fds()
            log.error("a lease cannot be made: %s", e)
            kind = "environment" if isinstance(e, OSError) else "bug"
            self._say(connection, {"state": "refused", "id": "tiles-folder", "kind": kind,
                                   "summary": f"{self.folder}: the lease cannot be written", "found": printable(str(e), 200),
                                   "fix": "make room on that file system"})  # fmt: skip

    def _offer(self, connection: Connection, request: Waiting, tiles: list[int]) -> None:
        """Files first, then the client's word that it has locked them; only then may it run (Taken)."""
        taken = {i for lease in self.ledger.leases.values() for i in lease.tiles}
        assert not taken & set(tiles), f"{tiles} are held already"
        gives = compute(self.ledger.node, tiles)
        lease = Lease(
            uuid.uuid4().hex[:12], tuple(tiles), request.uid, request.pid, request.start, request.command, request.job,
            self.ledger.node.platform, time.time(), request.page, request.stack, tuple(gives["cpus"]), tuple(gives["gpus"]),
        )  # fmt: skip
        theirs = -1
        try:
            path = records.file(self.folder, lease.id, "lock")
            self.files[lease.id] = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            theirs = open_plain(path, os.O_RDONLY)
            records.write(self.folder, lease)
            page, stack = connection.fds
            connection.fds = []
            self._watch(lease, page, stack)
            self.offers[lease.id] = time.monotonic() + OFFER_SECONDS
            connection.offered = lease.id
            self._say(connection, {"state": "granted", "lease": lease.id, "note": request.capped, **gives}, (theirs,))
        except BaseException:
            if lease.id in self.ledger.leases:
                self._end(lease, "failed")
            else:
                fd = self.files.pop(lease.id, None)
                if fd is not None:
                    os.close(fd)
                records.remove(self.folder, lease.id)
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)

    def _taken(self, connection: Connection) -> None:
        lease = self.ledger.leases.get(connection.offered or "")
        if lease is None:
            raise UserError("tiles-late", "the offer was not taken in time", fix="ask again")
        if locks.holder(self.files[lease.id]) != connection.pid:
            raise UserError("tiles-protocol", "the lease's file is not locked by this process")
        if self.seat.gives_way():  # asked after the lock was taken: the service looks for locks after it has shown itself
            self._close(connection.sock)  # the client asks again, and finds the service
            return
        connection.offered, connection.lease = None, lease.id
        self.offers.pop(lease.id, None)
        self.store.began(lease)
        self._say(connection, {"state": "go"})

    def _watch(self, lease: Lease, page: int | None, stack: int | None) -> None:
        self.ledger.leases[lease.id] = lease
        self.usage[lease.id] = Usage(page)
        if stack is not None:
            self.stacks[lease.id] = stack
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
            with contextlib.suppress(KeyError):
                self.selector.unregister(pidfd)
            os.close(pidfd)
        self.usage.pop(lease.id).close()
        for fd in (self.stacks.pop(lease.id, None), self.files.pop(lease.id, None)):
            if fd is not None:
                os.close(fd)
        if self.offers.pop(lease.id, None) is None:
            self.store.ended(lease, how)
        self.hung.discard(lease.id)
        records.remove(self.folder, lease.id)
        for connection in self.connections.values():
            if lease.id in (connection.lease, connection.offered):
                connection.lease = connection.offered = None
        self.used = time.monotonic()
        self._advance()

    def stack(self, lease: str) -> str:
        with contextlib.suppress(OSError):
            fd = self.stacks.get(lease)
            if fd is not None:
                end = os.fstat(fd).st_size
                text = os.pread(fd, 4000, max(0, end - 4000)).decode("utf-8", "replace")
                return "\n".join(printable(line, 200) for line in text.splitlines())
        return ""
