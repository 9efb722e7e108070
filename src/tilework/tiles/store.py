"""The daemon's memory: drained tiles and the history of leases, in SQLite. Who holds what now is not decided here (see alive.py):
a full disk or a lost file costs history, never a tile."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .records import Record

log = logging.getLogger("tilework.tiles")
_TABLES = """
create table if not exists leases (id text primary key, uid int, pid int, command text, job text, platform text, tiles text,
                                   began real, ended real, how text);
create table if not exists drains (platform text, path text, reason text, since real);
"""
_KEPT_DAYS = 30


class Store:
    def __init__(self, path: Path) -> None:
        self.path, self.trouble, self._purged = path, "", -86400.0
        self._db: sqlite3.Connection | None = None
        try:
            path.touch(0o600)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=0)  # nobody else has business there: never wait
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=normal")
            self._db.executescript(_TABLES)
        except (sqlite3.Error, OSError) as e:
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        if str(error) != self.trouble:
            log.error("%s: the history cannot be written: %s", self.path, error)
        self.trouble = str(error)

    def _do(self, statement: str, *values: object) -> None:
        if self._db is None:
            return
        try:
            self._db.execute(statement, values)
            self.trouble = ""
        except sqlite3.Error as e:
            self._failed(e)

    def still_alive(self, leases: Iterable[str]) -> None:
        """The others ended while no daemon looked."""
        known = list(leases)
        marks = ",".join("?" * len(known))
        self._do(f"update leases set ended=?, how='unknown' where ended is null and id not in ({marks})", time.time(), *known)

    def purge(self, now: float) -> None:
        """Once a day, and at the beginning. now: on the monotonic clock, seconds."""
        if now - self._purged > 86400:
            self._purged = now
            self._do("delete from leases where ended < ?", time.time() - _KEPT_DAYS * 86400)

    def began(self, lease: Record) -> None:
        job, tiles = lease.job or lease.label, ",".join(map(str, lease.tiles))
        self._do("insert or replace into leases values (?,?,?,?,?,?,?,?,null,null)", lease.id, lease.uid, lease.pid,
                 lease.command, job, lease.platform, tiles, lease.since)  # fmt: skip

    def ended(self, lease: Record, how: str) -> None:
        self._do("update leases set ended=?, how=? where id=?", time.time(), how, lease.id)

    def set_drained(self, platform: str, drained: Mapping[str, str]) -> None:
        self._do("delete from drains")
        for path, reason in drained.items():
            self._do("insert into drains values (?,?,?,?)", platform, path, reason, time.time())

    def drained(self) -> tuple[str, dict[str, str]]:
        """(platform, path of a tile -> reason)."""
        if self._db is None:
            return "", {}
        try:
            rows = self._db.execute("select platform, path, reason from drains").fetchall()
            return (rows[0][0] if rows else ""), {path: reason for _, path, reason in rows}
        except sqlite3.Error as e:
            self._failed(e)
            return "", {}

    def history(self, limit: int) -> list[dict[str, Any]]:
        """The last leases, the newest first; `ended` and `how` are None while they live."""
        if self._db is None:
            return []
        try:
            found = self._db.execute("select * from leases order by began desc limit ?", (limit,))
            return [dict(zip((c[0] for c in found.description), row, strict=True)) for row in found.fetchall()]
        except sqlite3.Error as e:
            self._failed(e)
            return []

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
