"""The daemon: grants leases, notices when they end, and knows what every tile is doing. One thread.

It starts by itself where a session needs it (`--auto`, and then ends when it has been idle for a while), or as a service. Which
leases are alive does not rest on its memory (alive.py): the next daemon finds them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from .. import __version__
from ..errors import MachineError, UserError
from . import alive, messages, records
from .asks import Ask, for_job, named, parse
from .describe import compute, holders_in_words, not_that_platform, user_name, view
from .jobs import job_of
from .leases import Lease
from .ledger import Ledger, Waiting
from .machine import numbers, ranges
from .messages import printable
from .metrics import Counters, exposition
from .place import INSTALLED, Place
from .placement import share_of
from .records import Kind, Record
from .server import Connection, Server
from .site import read_site
from .store import Store
from .topology import HOST, detect, taken_up
from .usage import EVERY_SECONDS

log = logging.getLogger("tilework.tiles")
IDLE_EXIT_SECONDS = 600.0
GRACE_SECONDS = 2.0  # for those who waited to ask again at a new daemon, before anybody is served
SAME_VIEW_SECONDS = 0.05
LONGEST_WAIT = 7 * 86400.0
SHARED_PER_USER = 512  # processes that share the machine; each costs the daemon a descriptor
_OF_A_JOB: dict[str, Any] = {"kind": "job", "step": "", "page": -1, "stack": -1, "inode": 0}


class Daemon(Server):
    def __init__(self, folder: Path, platform: str | None = None, auto: bool = False) -> None:
        super().__init__()
        self.folder, self.auto, self.place = folder, auto, Place(folder, everybody=not auto)
        self.site = read_site()
        self.fixed = platform or self.site.platform  # a client cannot change what the administrator chose
        self.ledger = Ledger(detect(self.fixed or HOST, self.site), self.site.limits)
        self.counted = Counters()
        self.started, self.begun = time.time(), time.monotonic()
        self.expected: dict[tuple[int, int], float] = {}  # who waited at the daemon before this one -> since when
        self._written: list[Waiting] = []  # the queue as the next daemon would find it
        self.stopping = False
        self._advancing = self._again = False
        self._lost = 0  # how often in a row the place could not be kept
        self._metrics = (-1.0, "")  # when, and what
        self._views: dict[tuple[Any, ...], tuple[float, bytes]] = {}  # what was just shown, encoded

    # ---- starting and stopping ----

    def open(self, listener: socket.socket | None = None) -> bool:
        """False where another daemon has this place already."""
        if not self.place.take(listener):
            return False
        state = Path(os.environ.get("STATE_DIRECTORY", "/var/lib/tilework")) if self.folder == INSTALLED else self.folder
        self.store = Store(state / "state.db")
        platform, drained = self.store.drained()
        if drained and not self.fixed:
            with contextlib.suppress(UserError):  # drained tiles are tiles of their platform
                self.ledger.node = detect(platform, self.site)
        for record in records.read_all(self.folder):
            lease = Lease.found(record)
            if lease is None:
                records.remove(self.folder, record)
                continue
            if record.tiles and record.platform != self.ledger.node.platform and not (self.ledger.holding or self.fixed):
                with contextlib.suppress(UserError):
                    self.ledger.node = detect(record.platform, self.site)
            record.tiles = taken_up(self.ledger.node, record)  # a live lease is never passed over
            self._watch(lease)
        for lease in [x for x in self.ledger.leases.values() if x.record.of and x.record.of not in self.ledger.leases]:
            self._end(lease, "its job ended")
        self.store.still_alive(self.ledger.leases)
        known = {t.path for t in self.ledger.node.tiles}
        self.ledger.drained = {p: r for p, r in drained.items() if p in known and platform == self.ledger.node.platform}
        holding = {(x.record.pid, x.record.start) for x in self.ledger.leases.values() if x.record.kind != "shared"}
        self.expected = {who: since for who, since in records.read_queue(self.folder).items() if who not in holding}
        self.accept_at(self.place.listener)  # only now is anybody served
        log.info("daemon %s, pid %d, platform %s, %d tiles, %d leases found", __version__, os.getpid(),
                 self.ledger.node.platform, len(self.ledger.node.tiles), len(self.ledger.leases))  # fmt: skip
        return True

    def stop(self) -> None:
        self.place.leave()
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
                    if isinstance(key.fileobj, socket.socket) and key.fileobj is not self.place.listener:
                        self.close(key.fileobj)
            try:
                self._expire(time.monotonic())
                if time.monotonic() - last >= EVERY_SECONDS:
                    last = time.monotonic()
                    self._tick(last)
            except Exception:
                log.exception("the regular check failed")

    def _tick(self, now: float) -> None:
        self._drop_ended()
        for lease in list(self.ledger.leases.values()):
            self._count(lease)
            if lease.look_for_hang(self.site.limits.hung_seconds):
                r = lease.record
                log.warning("lease %s hung: pid %d, user %s, %s", r.id, r.pid, user_name(r.uid), r.command)
        self.close_the_silent(now)
        if self.ledger.leases or self.ledger.queue or self.ledger.drained:
            self.used = now
        if self.auto and now - self.used > IDLE_EXIT_SECONDS:
            self.stopping = True
        if now - self.begun > GRACE_SECONDS:
            self.expected.clear()
        self._keep_place()
        self._remember_queue()
        self.store.purge(now)
        self._advance()

    def _keep_place(self) -> None:
        listener = self.place.listener
        try:
            kept = self.place.keep()
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
                with contextlib.suppress(OSError):
                    records.write(self.folder, lease.record)
            self._written = []
        self.accept_at(self.place.listener)

    def _remember_queue(self) -> None:
        if self.ledger.queue != self._written:
            self._written = self.ledger.queue[:]
            records.write_queue(self.folder, ((w.record.pid, w.record.start, w.since) for w in self._written))

    def _expire(self, now: float) -> None:
        for request in [w for w in self.ledger.queue if now >= w.until]:
            words = holders_in_words(self.ledger, request)
            self._forget(request)
            self.say(request.whose, {"state": "timeout", "ask": str(request.ask), "holders": words})

    def _forget(self, request: Waiting) -> None:
        self.ledger.forget(request)
        request.whose.waiting = None
        os.close(request.page)

    def _drop_ended(self) -> None:
        """Whoever asks must not see, or wait for, what has just been given back."""
        for lease in list(self.ledger.leases.values()):
            if not lease.alive() and not self._has_members(lease):
                self._end(lease, "released" if alive.start_time(lease.record.pid) == lease.record.start else "process ended")

    def _has_members(self, lease: Lease) -> bool:
        """Of a job whose keeper was killed: its processes may still run on its tiles."""
        return lease.record.kind == "job" and any(member.alive() for member in self.ledger.members(lease))

    def _process_ended(self, lease: Lease) -> None:
        if self._has_members(lease):  # _drop_ended sees when they are gone
            self.selector.unregister(lease.pidfd)
        else:
            self._end(lease, "process ended")

    def _count(self, lease: Lease) -> None:
        if lease.record.kind == "job":  # its members count
            return
        job = self.ledger.leases.get(lease.record.of)
        self.counted.look(self.ledger.node, lease, job.record.tiles if job else lease.record.tiles)

    # ---- clients ----

    def left(self, connection: Connection) -> None:
        if connection.waiting is not None:
            self._forget(connection.waiting)
            self._advance()

    def handle(self, connection: Connection, request: messages.Request) -> None:
        if isinstance(request, messages.LeaseRequest):
            self._ask(connection, request)
        elif isinstance(request, messages.Share):
            self._share(connection, request)
        elif isinstance(request, messages.Release):
            self._release(connection, request.lease)
        elif isinstance(request, messages.Look):
            self._drop_ended()
            self.say(connection, self._view(connection.uid, min(max(request.window, 0.0), 60.0), request.platform))
        elif isinstance(request, messages.Metrics):
            if time.monotonic() - self._metrics[0] > 1.0:
                self._drop_ended()
                for lease in self.ledger.leases.values():
                    self._count(lease)
                self._metrics = time.monotonic(), exposition(view(self, connection.uid, 10.0), self.counted)
            self.say(connection, {"text": self._metrics[1]})
        elif isinstance(request, messages.History):
            rows = self.store.history(request.limit)
            self.say(connection, {"leases": [{**row, "user": user_name(row["uid"])} for row in rows]})
        elif isinstance(request, messages.Drain):
            self._only_admin(connection, "drain a tile")
            if other := self._take_platform(request.platform):
                raise UserError("tiles-platform", other, fix="leave --platform out to change the tiles in use")
            paths = self.ledger.drain(request.path, request.on, printable(request.reason, 100))
            self.store.set_drained(self.ledger.node.platform, self.ledger.drained)
            log.info("%s: %s (%s)", "drained" if request.on else "back in use", paths, printable(request.reason, 100))
            self.say(connection, {"state": "done", "tiles": paths})
            self._advance()
        elif isinstance(request, messages.Stop):
            self._only_admin(connection, "stop the daemon")
            self.say(connection, {"state": "done"})
            self.stopping = True

    def _view(self, uid: int, window: float, platform: str | None) -> bytes:
        """The same for all who ask at the same time, as long as nobody has come or gone."""
        now, ledger = time.monotonic(), self.ledger
        who = (tuple((x, lease.hung) for x, lease in ledger.leases.items()), tuple(map(id, ledger.queue)))
        key = (uid, window, platform, ledger.node.platform, who, tuple(ledger.drained.items()))
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
        return not (self.fixed or self.ledger.holding or self.ledger.queue or self.ledger.drained)

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

    def _known(self, connection: Connection, request: messages.LeaseRequest | messages.Share, kind: Kind) -> tuple[Record, int]:
        """A client: what it says, what the kernel says, and its page, which it has locked."""
        start = alive.start_time(connection.pid)
        page = alive.open_memory(connection.pid, connection.uid, request.page)
        if start is None or page is None or alive.holder(page) != connection.pid:
            if page is not None:
                os.close(page)
            raise UserError("tiles-protocol", f"the daemon cannot see a page that process {connection.pid} has locked",
                            found="not one of our clients; or /proc hides the process, or it is in another pid namespace",
                            fix="run the daemon as root, in the machine's own pid namespace")  # fmt: skip
        record = Record(uuid.uuid4().hex[:12], kind, connection.uid, connection.pid, start, time.time(),
                        command=printable(request.command, 200), label=printable(request.label, 60), page=request.page,
                        stack=request.stack, inode=os.fstat(page).st_ino)  # fmt: skip
        job = job_of(connection.pid, connection.uid)
        if job is not None:
            record.cgroup, record.job, record.step = job.cgroup, job.id, job.step
        return record, page

    def _same_page(self, record: Record) -> Lease | None:
        """What this process has already. A process has one lease, or shares the machine."""
        who = (record.pid, record.start, record.inode)
        return next((x for x in self.ledger.leases.values() if (x.record.pid, x.record.start, x.record.inode) == who), None)

    def _share(self, connection: Connection, request: messages.Share) -> None:
        """A process that takes no tiles is only shown."""
        record, page = self._known(connection, request, "shared")
        theirs = sum(x.record.kind == "shared" and x.record.uid == record.uid for x in self.ledger.leases.values())
        if self._same_page(record) is not None or theirs >= SHARED_PER_USER:
            os.close(page)
        else:
            self._begin(record, page)

    def _ask(self, connection: Connection, request: messages.LeaseRequest) -> None:
        if connection.waiting is not None:
            raise UserError("tiles-protocol", "one request a connection")
        self._drop_ended()
        cpus = _cpus(request.cpus)
        record, page = self._known(connection, request, "exclusive")
        record.request = request.request
        had = self._same_page(record)
        if had is not None and had.record.kind != "shared" and had.record.request == record.request:
            os.close(page)
            self._tell(connection, had, "")  # granted by a daemon that died before it could say so
            return
        wait = self.site.limits.wait_seconds if request.wait is None else request.wait
        wait = max(0.0, min(wait, LONGEST_WAIT))
        since = self.expected.pop((record.pid, record.start), time.monotonic())
        until = (since if request.wait is None else time.monotonic()) + wait
        if self.expected:  # nobody is served before they are back: that must not cost anybody his turn
            until = max(until, self.begun + GRACE_SECONDS + EVERY_SECONDS)
        of = None
        try:
            note = self._take_platform(request.platform)
            whole, text = for_job(request.text)
            of = self.ledger.of_job(record) if whole else None
            if whole and of is None and not record.job:
                raise UserError("tiles-job", "tiles for a job are asked for, but this process is in none",
                                found="no job in its cgroup, and no process above it that keeps one",
                                expected="a process of a job of `tilework job`, or of Slurm with jobs in cgroups",
                                fix="ask without `job`: TILEWORK_TILES=4")  # fmt: skip
            if name := named(text):
                of, text = self.ledger.kept(record, name), ""
                if of is None:
                    raise UserError("tiles-job", f"no tiles are kept under the name {name}",
                                    fix="see `tilework tiles`; tiles are kept by who runs the program")  # fmt: skip
            if request.keeps:
                record.kind, record.job, record.cgroup, whole = "job", printable(request.keeps, 40), "", False
            record.part, record.chosen = request.part, tuple(numbers(request.chosen)) if request.chosen else ()
            ask = request.ask or (parse(text, self.ledger.node) if text else Ask())
            waiting = Waiting(record, ask, until, page, connection, cpus, whole, since=since)
            if of is None:
                self.ledger.wait(waiting)
        except BaseException:
            os.close(page)
            raise
        waiting.note = "; ".join(filter(None, (note, waiting.note)))
        if of is not None:  # its job has tiles already
            self._serve(waiting, of.record.tiles, of)
            return
        connection.waiting = waiting
        self._advance()
        if connection.waiting is not None and connection.sock.fileno() >= 0:
            self._remember_queue()
            self.say(connection, {"state": "waiting", "seconds": wait, "ask": str(waiting.ask),
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
                if member := self.ledger.next_member():
                    self._serve(member[0], member[1].record.tiles, member[1])
                elif served := self.ledger.next_one():
                    self._serve(served[0], tuple(served[1]), None)
                elif not self._again:
                    return
        finally:
            self._advancing = False

    def _serve(self, request: Waiting, tiles: tuple[int, ...], of: Lease | None) -> None:
        """A lease for the next in line; of: his job's, which he joins."""
        record, connection, made = request.record, request.whose, []
        connection.waiting = None
        try:
            if of is None:
                assert not self.ledger.held & set(tiles), f"{tiles} are held already"
                gives = compute(self.ledger.node, tiles)
                holder = replace(record, **_OF_A_JOB, id=uuid.uuid4().hex[:12]) if request.for_job else record
                holder.tiles, holder.platform = tiles, self.ledger.node.platform
                holder.cpus, holder.gpus = tuple(gives["cpus"]), tuple(gives["gpus"])
                if request.for_job:
                    of = self._begin(holder, None)
                    made.append(of)
            elif request.cpus is not None and not request.cpus & set(of.record.cpus):
                raise UserError("tiles-mask", f"this process may not use the CPUs of its job's tiles, {ranges(of.record.cpus)}",
                                found=f"CPUs {ranges(request.cpus)}", fix="ask for others: TILEWORK_TILES=1")  # fmt: skip
            if of is not None:
                record.kind, record.of = "member", of.record.id
                chosen = record.chosen or request.ask.tiles or ()
                if set(chosen) - set(of.record.tiles):
                    raise UserError("tiles-job", f"the job has no {Ask(tiles=chosen)}", found=f"it has {ranges(of.record.tiles)}",
                                    fix="name tiles that the job was given, or none")  # fmt: skip
                record.chosen = () if set(chosen) == set(of.record.tiles) else chosen
            page, request.page = request.page, -1
            made.append(self._begin(record, page))
        except Exception as e:
            for lease in made:
                self._end(lease, "failed")
            if request.page >= 0:
                os.close(request.page)
            if not isinstance(e, UserError):
                log.error("a lease cannot be made: %s", e)
                e = MachineError("tiles-folder", f"{self.folder}: the lease cannot be written", found=printable(str(e), 200),
                                 fix="make room on that file system")  # fmt: skip
            self.refuse(connection, e)
            return
        self.counted.waits += 1
        self.counted.waited_seconds += time.monotonic() - request.since
        if not self._tell(connection, made[-1], request.note):
            for lease in made:
                self._end(lease, "not taken")

    def _tell(self, connection: Connection, lease: Lease, note: str) -> bool:
        holder = self.ledger.leases.get(lease.record.of, lease).record
        which, parts = lease.record.part
        tiles = lease.record.chosen or share_of(holder.tiles, which, parts)
        gives = compute(self.ledger.node, tiles)
        if tiles == holder.tiles:
            gives["cpus"] = holder.cpus  # the node may have another shape by now
        elif not lease.record.chosen and len(holder.tiles) < parts:
            note = "; ".join(filter(None, (note, f"{parts} tasks of the job share {len(holder.tiles)} tiles")))
        return self.say(connection, {"state": "granted", "lease": lease.record.id, "note": note, **gives})

    def _begin(self, record: Record, page: int | None) -> Lease:
        """From here on it is there. What the process had before, with the same page, has ended."""
        try:
            try:
                records.write(self.folder, record)
            except FileNotFoundError:  # somebody has just removed the folder
                self._keep_place()
                records.write(self.folder, record)
        except BaseException:
            if page is not None:
                os.close(page)
            raise
        had = self._same_page(record) if page is not None else None
        if had is not None:
            self._end(had, "released" if had.record.tiles else "took tiles")
        lease = Lease(record, page)
        self._watch(lease)
        if record.kind != "member":
            self.store.began(record)
            self.counted.began[record.kind] += 1
        return lease

    def _watch(self, lease: Lease) -> None:
        self.ledger.leases[lease.record.id] = lease
        if lease.pidfd >= 0:
            self.selector.register(lease.pidfd, selectors.EVENT_READ, lambda _: self._process_ended(lease))

    def _release(self, connection: Connection, id: str) -> None:
        self._drop_ended()
        lease = self.ledger.leases.get(id)
        if lease is not None and lease.record.kind == "job":
            job = job_of(connection.pid, connection.uid)
            if connection.uid and (job is None or (job.cgroup, connection.uid) != (lease.record.cgroup, lease.record.uid)):
                raise UserError("tiles-lease", "the tiles of a job are given back by a process of that job, or by root",
                                found=f"pid {connection.pid} is not in job {lease.record.job}")  # fmt: skip
            if running := [f"pid {member.record.pid}" for member in self.ledger.members(lease)]:
                raise UserError("tiles-in-use", "processes of the job still run on its tiles", found=", ".join(running[:8]),
                                fix="wait for them, or end them")  # fmt: skip
            self._end(lease, "released")
        elif lease is not None:
            raise UserError("tiles-lease", f"lease {id} is not given up", found="its process has its page locked",
                            fix="a process gives up its own lease")  # fmt: skip
        self.say(connection, {"state": "released"})

    def _end(self, lease: Lease, how: str) -> None:
        if self.ledger.leases.pop(lease.record.id, None) is None:
            return
        self._count(lease)  # the page outlives its process, as long as we have it open
        if lease.pidfd >= 0:
            with contextlib.suppress(KeyError):
                self.selector.unregister(lease.pidfd)
        for member in self.ledger.members(lease) if lease.record.kind == "job" else ():
            self._end(member, "its job ended")
        lease.close()
        records.remove(self.folder, lease.record)
        self.store.ended(lease.record, how)
        if lease.record.kind != "member":
            self.counted.ended[lease.record.kind] += 1
        if job := self.ledger.leases.get(lease.record.of):
            job.empty_since = time.time()
        self.used = time.monotonic()
        self._advance()


def _cpus(text: str) -> frozenset[int] | None:
    try:
        return frozenset(numbers(text)) if text else None
    except ValueError:
        raise UserError("tiles-protocol", "not a list of CPUs", found=printable(text, 60), expected="such as 0-3,8") from None
