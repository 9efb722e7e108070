"""The lease of this process. All of its sessions share it; the last one to close gives it back. Its threads are pinned."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable

from ..errors import UserError
from . import client
from .client import Lease
from .topology import asked_platform

_lock = threading.RLock()  # a session may be forgotten, and so let go, in the middle of anything
_held: Lease | None = None
_users = 0
_asked: set[str] = set()  # for this lease; what else was asked for has been told
_before: set[int] = set()  # the CPUs that this process could use before it was pinned; kept by children


def _in_a_child() -> None:
    """A fork of a process with a lease has none. It is pinned as its parent is, until it takes a lease of its own."""
    global _held, _users, _lock
    _held, _users, _lock = None, 0, threading.RLock()
    _asked.clear()


os.register_at_fork(after_in_child=_in_a_child)


def wanted() -> bool:
    """TILEWORK_LEASE=0: sessions take no lease and use the whole machine."""
    return os.environ.get("TILEWORK_LEASE", "1") not in ("0", "off", "no")


def hold(tiles: str | int | None = None, report: Callable[[str], None] | None = None) -> Lease:
    """The process's lease, made if there is none. What the environment says (TILEWORK_TILES) comes before `tiles`."""
    global _held, _users
    say = report or (lambda line: print(f"tilework: {line}", file=sys.stderr, flush=True))
    text = str(os.environ.get("TILEWORK_TILES") or (tiles if tiles is not None else "")).strip()
    with _lock:
        if _held is not None:
            _say_if_other(_held, text, say)
            _users += 1
            return _held
        ranks = _local_ranks()
        if ranks > 1:
            _check_ranks(ranks)
            text = text or f"share:{ranks}"  # by default each would ask for the same chip, and they would wait for each other
        made = client.lease(text or None, command=_command(), job=_job(), platform=asked_platform(), wait=_wait(), report=say)
        try:
            if made.note:
                say(made.note)
            _pin(made, say)
            _show_stacks(made)
        except BaseException:
            made.release()
            raise
        _held, _users = made, 1
        _asked.update((text, ""))
        return made


def _say_if_other(lease: Lease, text: str, say: Callable[[str], None]) -> None:
    """All sessions of a process share its lease: a later wish changes nothing."""
    if text in _asked or text == str(len(lease.tiles)):
        return
    _asked.add(text)
    where = ", ".join(lease.paths[:4]) + (", ..." if len(lease.paths) > 4 else "")
    say(f"tiles={text} has no effect: this process holds {where} already, for all of its sessions")


def _check_ranks(ranks: int) -> None:
    """Ranks wait for each other. If some can never have a tile while others hold theirs, nobody gets on: better nobody begins."""
    usable = sum(t["gpu"] is None and t["drained"] is None for t in client.view(platform=asked_platform())["tiles"])
    if ranks > usable:
        raise UserError("tiles-ranks", "there are more ranks on this node than tiles", found=f"{ranks} ranks, {usable} tiles",
                        expected="a tile for each rank", fix="start fewer ranks, or name a platform whose tiles share "
                        "the cores (TILEWORK_PLATFORM), or TILEWORK_LEASE=0, without leases")  # fmt: skip


def let_go(lease: Lease) -> bool:
    """One session less. The last one releases the tiles and gives the threads their CPUs back: True."""
    global _held, _users
    with _lock:
        if _held is not lease:
            return False
        _users -= 1
        if _users:
            return False
        _held = None
        _asked.clear()
        with contextlib.suppress(ValueError, AttributeError):
            faulthandler.unregister(signal.SIGURG)
        if _before:
            _everywhere(_before)
            _before.clear()
        lease.release()
        return True


def _pin(lease: Lease, say: Callable[[str], None]) -> None:
    """All threads of this process, and all that they will start, run on the lease's CPUs only."""
    could = set(_before) or os.sched_getaffinity(0)
    allowed = could & set(lease.cpus)
    if not allowed:
        say(f"this process may not run on the CPUs of its tiles ({lease.cpus}): it is not pinned")
        return
    _before.update(could)
    _everywhere(allowed)


def _everywhere(cpus: set[int]) -> None:
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            os.sched_setaffinity(int(name), cpus)


def _show_stacks(lease: Lease) -> None:
    """The daemon may ask a hung process for its stack with a signal that is otherwise ignored."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if signal.getsignal(signal.SIGURG) == signal.SIG_DFL:
            faulthandler.register(signal.SIGURG, file=lease.stack, all_threads=True)


def _local_ranks() -> int:
    """Ranks on this node, by whatever launched them; 1 where this process is no rank of anything."""
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    found = next((int(os.environ[n]) for n in names if os.environ.get(n, "").isdecimal()), None)
    return max(1, found if found is not None else _slurm_ranks())


def _slurm_ranks() -> int:
    """Tasks of this job step on this node. A batch script is no step, though it knows how many tasks it could start."""
    node = os.environ.get("SLURM_NODEID", "0")
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not text and (os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID")):
        text = os.environ.get("SLURM_TASKS_PER_NODE", "")
    left = int(node) if node.isdecimal() else 0
    for part in text.split(","):  # such as 2(x3),1: three nodes with two tasks, one with one
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if found is None:
            return 1
        left -= int(found[2] or 1)
        if left < 0:
            return int(found[1])
    return 1


def _command() -> str:
    return shlex.join([os.path.basename(sys.executable) or "python", *sys.argv])[:500]


def _job() -> str:
    return os.environ.get("TILEWORK_JOB") or os.environ.get("SLURM_JOB_ID") or ""


def _wait() -> float | None:
    text = os.environ.get("TILEWORK_WAIT", "")
    if not text:
        return None
    try:
        seconds = float(text)
        if math.isnan(seconds):
            raise ValueError
        return min(max(0.0, seconds), 1e9)
    except ValueError:
        raise UserError("tiles-wait", "TILEWORK_WAIT is not a number of seconds", found=text) from None
