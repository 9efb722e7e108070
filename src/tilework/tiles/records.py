"""What is written down for the next daemon: a file for each lease and each session that shares the machine, and who waits.

Nobody but the daemon's user can write here. Whether the process of a record is still there is the kernel's word (alive.py)."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import MachineError
from . import alive

log = logging.getLogger("tilework.tiles")
QUEUE = "queue.json"
_NAME = re.compile(r"lease-([0-9]+)-([0-9]+)-[0-9a-f]{12}\.json")

Kind = Literal["exclusive", "shared", "job", "member"]


class Record(msgspec.Struct, eq=False):
    """Of a process that holds tiles (exclusive), shares the machine (shared), or runs on its job's tiles (member); or of a job
    that holds tiles: Slurm's, which is a cgroup, or one that a process keeps, which is that process and its descendants. It may
    have been written by an older or newer version."""

    id: str
    kind: Kind
    uid: int
    pid: int  # of a job: who asked
    start: int  # of the process, in the kernel's ticks: a reused pid is another process
    since: float  # wall clock, seconds
    tiles: tuple[int, ...] = ()
    platform: str = ""
    cpus: tuple[int, ...] = ()  # what the tiles were then: the next daemon may see this node in another shape
    gpus: tuple[int, ...] = ()
    command: str = ""
    label: str = ""  # what the process calls its job: shown, never believed
    page: int = -1  # descriptor numbers in the process
    stack: int = -1
    inode: int = 0  # of the page: another file may have its number by now
    request: str = ""  # the client's name for its request: asked again, it means the same lease
    cgroup: str = ""  # the folder of the job that the process is in
    job: str = ""
    step: str = ""
    of: str = ""  # of a member: the job's lease
    part: tuple[int, int] = (0, 1)  # and which of how many parts of its tiles,
    chosen: tuple[int, ...] = ()  # unless it named some of them


def path_of(folder: Path, record: Record) -> Path:
    return folder / f"lease-{record.pid}-{record.start}-{record.id}.json"


def write(folder: Path, record: Record) -> None:
    """Whole or not at all."""
    _write(path_of(folder, record), msgspec.json.encode(record))


def _write(path: Path, data: bytes) -> None:
    part = path.with_suffix(".part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as f:
            f.write(data)
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def remove(folder: Path, record: Record) -> None:
    with contextlib.suppress(OSError):
        path_of(folder, record).unlink()


def read_all(folder: Path) -> list[Record]:
    """One that cannot be read, of a process that lives, is a reason not to serve: better no daemon than one that gives tiles to
    two."""
    found = []
    for path in sorted(folder.glob("lease-*.json")):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
            if path_of(folder, record) != path:
                raise ValueError("a record of another lease")
            found.append(record)
        except (OSError, ValueError, RecursionError, msgspec.DecodeError) as e:
            if alive.start_time(int(name[1])) == int(name[2]):
                raise MachineError("tiles-folder", f"{path}: the record of a live lease is damaged", found=str(e)[:200],
                                   fix=f"end that session (pid {name[1]}), then remove the file") from e  # fmt: skip
            log.warning("%s is no record of a lease: %s", path, e)
            path.unlink(missing_ok=True)
    for path in folder.glob("*.part"):  # of a daemon that died while it wrote
        path.unlink(missing_ok=True)
    return found


class _Waited(msgspec.Struct):
    pid: int
    start: int
    since: float  # on the machine's monotonic clock, which all processes share


def write_queue(folder: Path, queue: Iterable[tuple[int, int, float]]) -> None:
    """(pid, start, since) of each. What cannot be written costs the order, no more."""
    with contextlib.suppress(OSError):
        _write(folder / QUEUE, msgspec.json.encode([_Waited(*w) for w in queue]))


def read_queue(folder: Path) -> dict[tuple[int, int], float]:
    """(pid, start) -> since when, of the processes that still live."""
    try:
        found = msgspec.json.decode((folder / QUEUE).read_bytes(), type=list[_Waited])
    except (OSError, ValueError, msgspec.DecodeError):
        return {}
    return {(w.pid, w.start): w.since for w in found if alive.start_time(w.pid) == w.start}
