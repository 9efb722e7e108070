"""The lease of this process. All of its sessions share it; the last one to close gives it back. Its threads are pinned."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable

from ..errors import UserError
from . import client
from .asks import Ask, parse
from .client import Lease
from .topology import asked_platform, detect

_lock = threading.Lock()
_held: Lease | None = None
_users = 0
_before: dict[int, set[int]] = {}  # thread -> the CPUs it could run on


def wanted() -> bool:
    """TILEWORK_LEASE=0: sessions take no lease and use the whole machine."""
    return os.environ.get("TILEWORK_LEASE", "1") not in ("0", "off", "no")


def hold(tiles: str | int | Ask | None = None, report: Callable[[str], None] | None = None) -> Lease:
    """The process's lease, made if there is none. What the environment says (TILEWORK_TILES) comes before `tiles`."""
    global _held, _users
    with _lock:
        if _held is not None and _held.pid == os.getpid():
            _users += 1
            return _held
        text = os.environ.get("TILEWORK_TILES") or tiles
        ask = text if isinstance(text, Ask) else Ask() if text is None else parse(str(text), detect())
        say = report or (lambda line: print(f"tilework: {line}", file=sys.stderr, flush=True))
        made = client.lease(ask, command=_command(), job=_job(), platform=asked_platform(), wait=_wait(), report=say)
        if made.note:
            say(made.note)
        _held, _users = made, 1
        _pin(made, say)
        _show_stacks(made)
        return made


def let_go(lease: Lease) -> bool:
    """One session less. The last one releases the tiles and gives the threads their CPUs back: True."""
    global _held, _users
    with _lock:
        if _held is not lease or lease.pid != os.getpid():
            return False
        _users -= 1
        if _users:
            return False
        _held = None
        with contextlib.suppress(ValueError, AttributeError):
            faulthandler.unregister(signal.SIGURG)
        for thread, cpus in _before.items():
            with contextlib.suppress(OSError):  # a thread that has ended
                os.sched_setaffinity(thread, cpus)
        _before.clear()
        lease.release()
        return True


def _pin(lease: Lease, say: Callable[[str], None]) -> None:
    """All threads of this process, and all that they will start, run on the lease's CPUs only."""
    allowed = os.sched_getaffinity(0) & set(lease.cpus)
    if not allowed:
        say(f"this process may not run on the CPUs of its tiles ({lease.cpus}): it is not pinned")
        return
    _before.clear()
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            _before[int(name)] = os.sched_getaffinity(int(name))
            os.sched_setaffinity(int(name), allowed)


def _show_stacks(lease: Lease) -> None:
    """The daemon may ask a hung process for its stack with a signal that is otherwise ignored."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if signal.getsignal(signal.SIGURG) == signal.SIG_DFL:
            faulthandler.register(signal.SIGURG, file=lease.stack, all_threads=True)


def _command() -> str:
    return shlex.join([os.path.basename(sys.executable) or "python", *sys.argv])[:500]


def _job() -> str:
    return os.environ.get("TILEWORK_JOB") or os.environ.get("SLURM_JOB_ID") or ""


def _wait() -> float | None:
    text = os.environ.get("TILEWORK_WAIT", "")
    if not text:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:
        raise UserError("tiles-wait", "TILEWORK_WAIT is not a number of seconds", found=text) from None
