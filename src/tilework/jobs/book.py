"""The queue's book: every job and its state, in SQLite, in a folder that nobody but its user can read.

Whoever changes a job's state says which state it has now, in one transaction. So a job is begun once and ends once, whoever is
killed in between.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MachineError, UserError
from .spec import ENDED, Job, Spec, State

_TABLES = """
create table if not exists jobs (
  id integer primary key autoincrement, state text not null, spec blob not null, labels blob not null, submitted real not null,
  started real, ended real, exit_code int, reason text not null default '', tiles text not null default '',
  output text not null default '', error text not null default '', runs int not null default 0,
  pid int, start int, boot text, cancelled int not null default 0);
create index if not exists jobs_by_state on jobs (state, id);
create table if not exists environments (job integer primary key, environment blob not null);
"""
_COLUMNS = "id, state, spec, labels, submitted, started, ended, exit_code, reason, tiles, output, error, runs"
KEPT_SECONDS, KEPT_JOBS = 30 * 86400, 20_000  # finished jobs, with their logs
_BUSY_SECONDS = 20.0
_specs, _labels = msgspec.json.Decoder(Spec), msgspec.json.Decoder(dict[str, str])


def state_folder() -> Path:
    """TILEWORK_JOBS, or below the user's state folder. A home may be shared by several machines: each has a queue of its own."""
    own = os.environ.get("TILEWORK_JOBS")
    base = Path(own) if own else Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tilework" / "jobs"
    return (base / socket.gethostname()).absolute()


def boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


class Supervised(msgspec.Struct, frozen=True):
    """A job that some process is at: it waits for the job's tiles, or runs it."""

    id: int
    state: State
    pid: int
    start: int
    boot: str
    spec: Spec


class Book:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise UserError("job-folder", f"{folder}: the folder of jobs must be yours alone",
                                found=f"user {found.st_uid}, mode {found.st_mode & 0o777:o}",
                                fix=f"chmod 700 {folder}, or set TILEWORK_JOBS")  # fmt: skip
            if not (folder / "book.db").exists():
                with self.change() as db:
                    db.execute("pragma journal_mode=wal")
                    db.executescript(_TABLES)
        except OSError as e:
            raise self._broken(e) from e

    def _broken(self, error: Exception) -> MachineError:
        return MachineError("job-book", f"{self.folder}: the jobs' book cannot be read or written", found=str(error),
                            fix="make room on that file system, or set TILEWORK_JOBS to another folder")  # fmt: skip

    @contextmanager
    def change(self, *, for_good: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction. The connection is closed afterwards: it must not live through a fork. for_good: it outlives the
        machine, which costs some milliseconds; otherwise it outlives all processes."""
        try:
            old = os.umask(0o077)
            try:
                db = sqlite3.connect(self.folder / "book.db", timeout=_BUSY_SECONDS, isolation_level=None)
            finally:
                os.umask(old)
            try:
                db.execute(f"pragma synchronous={'full' if for_good else 'normal'}")
                if (self.folder / "book.db").stat().st_size:
                    db.execute("begin immediate")
                yield db
                if db.in_transaction:
                    db.execute("commit")
            finally:
                db.close()
        except sqlite3.Error as e:
            raise self._broken(e) from e

    @contextmanager
    def look(self) -> Iterator[sqlite3.Connection]:
        try:
            db = sqlite3.connect(self.folder / "book.db", timeout=_BUSY_SECONDS, isolation_level=None)
            try:
                yield db
            finally:
                db.close()
        except sqlite3.Error as e:
            raise self._broken(e) from e

    # ---- what users do ----

    def add(self, spec: Spec, *, pid: int | None = None, start: int | None = None) -> int:
        """pid, start: of a process that is at it already."""
        environment = spec.environment if spec.environment is not None else dict(os.environ)
        plain = msgspec.structs.replace(spec, environment=None, labels={})
        with self.change() as db:
            made = db.execute(
                "insert into jobs (state, spec, labels, submitted, pid, start, boot) values ('PENDING',?,?,?,?,?,?)",
                (msgspec.json.encode(plain), msgspec.json.encode(spec.labels), time.time(), pid, start, boot() if pid else None),
            )
            db.execute("insert into environments values (?,?)", (made.lastrowid, msgspec.json.encode(environment)))
            assert made.lastrowid is not None
            return made.lastrowid

    def jobs(self, *, ended: bool = True, limit: int | None = None) -> list[Job]:
        """The newest last."""
        where = "" if ended else f"where state not in ({','.join(repr(s) for s in ENDED)})"
        with self.look() as db:
            rows = db.execute(f"select {_COLUMNS} from jobs {where} order by id desc limit ?", (limit or -1,)).fetchall()
        return [_job(row) for row in reversed(rows)]

    def job(self, id: int | str) -> Job:
        if str(id).isdecimal():
            with self.look() as db:
                row = db.execute(f"select {_COLUMNS} from jobs where id=?", (int(id),)).fetchone()
            if row is not None:
                return _job(row)
        raise UserError("job-unknown", f"there is no job {id}", fix="tilework job list shows those that there are")

    def set_labels(self, id: int, labels: dict[str, str]) -> None:
        with self.change(for_good=False) as db:
            db.execute("update jobs set labels=? where id=?", (msgspec.json.encode(labels), id))

    def ask_to_end(self, id: int) -> None:
        with self.change() as db:
            db.execute("update jobs set cancelled=1 where id=?", (id,))

    # ---- what supervisors do ----

    def environment(self, id: int) -> dict[str, str]:
        with self.look() as db:
            row = db.execute("select environment from environments where job=?", (id,)).fetchone()
        return msgspec.json.decode(row[0], type=dict[str, str]) if row else {}

    def is_cancelled(self, id: int) -> bool:
        with self.look() as db:
            return bool(db.execute("select cancelled from jobs where id=?", (id,)).fetchone()[0])

    def supervise(self, id: int, pid: int, start: int) -> None:
        """A process is at it from now on."""
        with self.change(for_good=False) as db:
            db.execute("update jobs set pid=?, start=?, boot=? where id=? and state='PENDING'", (pid, start, boot(), id))

    def leave(self, id: int, pid: int) -> None:
        """Nobody is at it any more; it waits on."""
        with self.change(for_good=False) as db:
            db.execute("update jobs set pid=null where id=? and pid=? and state='PENDING'", (id, pid))

    def why(self, id: int, reason: str) -> None:
        with self.change(for_good=False) as db:
            db.execute("update jobs set reason=? where id=? and state='PENDING'", (reason, id))

    def begin(self, id: int, pid: int, start: int, *, tiles: str, output: str, error: str) -> bool:
        """From here on it has been run, whatever happens. False: somebody else has begun or ended it."""
        with self.change() as db:
            done = db.execute(
                "update jobs set state='RUNNING', pid=?, start=?, boot=?, started=?, tiles=?, output=?, error=?, reason='', "
                "runs=runs+1 where id=? and state='PENDING' and cancelled=0",
                (pid, start, boot(), time.time(), tiles, output, error, id),
            )
            return done.rowcount == 1

    def end(self, id: int, state: State, *, was: Sequence[State], exit_code: int | None = None, reason: str = "") -> bool:
        """False: it was in none of those states, so it has ended already."""
        marks = ",".join("?" * len(was))
        with self.change() as db:
            done = db.execute(
                f"update jobs set state=?, exit_code=?, reason=?, ended=?, pid=null where id=? and state in ({marks})",
                (state, exit_code, reason, time.time(), id, *was),
            )
            if done.rowcount == 1:
                db.execute("delete from environments where job=?", (id,))
            return done.rowcount == 1

    def again(self, id: int, reason: str) -> bool:
        """Into the queue once more, at the end of a run that was not its fault."""
        with self.change() as db:
            return db.execute("update jobs set state='PENDING', reason=?, started=null, pid=null where id=? and state='RUNNING'",
                              (reason, id)).rowcount == 1  # fmt: skip

    # ---- what the keeper does ----

    def supervised(self) -> list[Supervised]:
        with self.look() as db:
            rows = db.execute("select id, state, pid, start, boot, spec from jobs "
                              "where state in ('PENDING', 'RUNNING') and pid is not null").fetchall()  # fmt: skip
        return [Supervised(id, state, pid, start, boot, _specs.decode(spec)) for id, state, pid, start, boot, spec in rows]

    def waiting(self) -> list[tuple[int, Spec, str, bool]]:
        """(id, spec, reason, cancelled) of jobs that nobody is at, in the order of their arrival."""
        with self.look() as db:
            rows = db.execute(
                "select id, spec, reason, cancelled from jobs where state='PENDING' and pid is null order by id"
            ).fetchall()
        return [(id, _specs.decode(spec), reason, bool(cancelled)) for id, spec, reason, cancelled in rows]

    def states(self, ids: Sequence[int]) -> dict[int, State]:
        with self.look() as db:
            marks = ",".join("?" * len(ids))
            return dict(db.execute(f"select id, state from jobs where id in ({marks})", tuple(ids)).fetchall())

    def forget_old(self) -> list[int]:
        """Which finished jobs are no longer kept."""
        marks = ",".join(repr(s) for s in ENDED)
        with self.change() as db:
            newest = db.execute("select coalesce(max(id), 0) from jobs").fetchone()[0]
            gone = [row[0] for row in db.execute(f"select id from jobs where state in ({marks}) and (ended < ? or id < ?)",
                                                 (time.time() - KEPT_SECONDS, newest - KEPT_JOBS))]  # fmt: skip
            db.executemany("delete from jobs where id=?", [(id,) for id in gone])
        return gone


def _job(row: Sequence[Any]) -> Job:
    id, state, spec, labels, submitted, started, ended, exit_code, reason, tiles, output, error, runs = row
    full = _specs.decode(spec)
    if labels != b"{}":
        full = msgspec.structs.replace(full, labels=_labels.decode(labels))
    return Job(id=str(id), spec=full, state=state, reason=reason, exit_code=exit_code, submitted=submitted, started=started,
               ended=ended, tiles=tiles, output=output, error=error, runs=runs)  # fmt: skip
