"""What this process has of the machine's tiles. By default nothing: its sessions share the machine, as any process does, and are
only shown. Where tiles are asked for, all sessions of the process share them, and its threads run nowhere else; the last session
to close gives them back."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable

from ..errors import UserError
from ..parallel.environment import launched, ranks_on_node
from . import client
from .asks import SHARED, for_job, named
from .client import Lease
from .page import Page
from .topology import asked_platform

_lock = threading.RLock()  # a session may be forgotten, and so let go, in the middle of anything
_before: set[int] = set()  # the CPUs that this process could use before it was pinned; kept by children


class Held:
    """A page that the daemon reads; and tiles, where some were asked for."""

    def __init__(self, page: Page, stack: int) -> None:
        self.page, self.stack, self.pid = page, stack, os.getpid()
        self.lease: Lease | None = None
        self.users = 0
        self.asked: set[str] = set()  # for this lease; what else was asked for has been told

    def close(self) -> None:
        if self.lease is not None:
            self.lease.release()
        elif self.page.fd >= 0 and self.pid == os.getpid():
            self.page.close()
            os.close(self.stack)


_held: Held | None = None


def _in_a_child() -> None:
    """A fork of a process with a lease has none. It is pinned as its parent is, until it takes a lease of its own."""
    global _held, _lock
    _held, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_in_a_child)


def wanted() -> bool:
    """TILEWORK_LEASE=0: sessions have nothing to do with the daemon: no tiles, and not shown."""
    return os.environ.get("TILEWORK_LEASE", "1") not in ("0", "off", "no")


def hold(tiles: str | int | None = None, report: Callable[[str], None] | None = None) -> Held:
    """For one more session. What the environment says (TILEWORK_TILES) comes before `tiles`; neither: it shares the machine."""
    global _held
    say = report or (lambda line: print(f"tilework: {line}", file=sys.stderr, flush=True))
    text = str(os.environ.get("TILEWORK_TILES") or (tiles if tiles is not None else "")).strip()
    chosen = str(tiles).removeprefix("tiles:") if str(tiles).startswith("tiles:") and for_job(text)[0] else ""
    with _lock:
        held = _held or Held(*client.files())
        try:
            if text in ("", SHARED):
                if _held is None:
                    client.share(held.page, held.stack, command=_command(), label=_label())
            elif held.lease is None:
                _take(held, text, chosen, say)
            else:
                _say_if_other(held.lease, held.asked, text, say)
            if _held is None:
                _show_stacks(held.stack)
        except BaseException:
            if _held is None:
                held.close()
            raise
        _held = held
        held.users += 1
        return held


def one_chip() -> str:
    """What a frontend asks for whose users expect tiles: one chip; of ranks on one node each a share of it, so that all fit."""
    ranks = ranks_on_node()
    return f"share:{ranks}" if ranks > 1 else "chips:1"


def _take(held: Held, text: str, chosen: str, say: Callable[[str], None]) -> None:
    """chosen: of a job's tiles, those that this process names."""
    ranks, own, in_a_job = ranks_on_node(), launched().local_rank, for_job(text)[0] or bool(named(text))
    if ranks > 1 and not in_a_job:
        _check_ranks(ranks)
    part = (own, ranks) if in_a_job and own < ranks else (0, 1)
    could = set(_before) or os.sched_getaffinity(0)
    lease = client.lease(text, command=_command(), label=_label(), platform=asked_platform(), wait=_wait(), cpus=could,
                         part=part, chosen=chosen, report=say, own=(held.page, held.stack))  # fmt: skip
    held.lease = lease
    held.asked |= {text, "", SHARED, str(len(lease.tiles))}
    if held.users == 0:
        held.page.process.restart()  # waiting was no idling
    if lease.note:
        say(lease.note)
    _before.update(could)
    _everywhere(could & set(lease.cpus) or could)  # none of them: a GPU far from where we may run


def _say_if_other(lease: Lease, asked: set[str], text: str, say: Callable[[str], None]) -> None:
    """All sessions of a process share its lease: a later wish changes nothing."""
    if text in asked:
        return
    asked.add(text)
    where = ", ".join(lease.paths[:4]) + (", ..." if len(lease.paths) > 4 else "")
    say(f"tiles={text} has no effect: this process holds {where} already, for all of its sessions")


def _check_ranks(ranks: int) -> None:
    """Ranks wait for each other. If some can never have a tile while others hold theirs, nobody gets on: better nobody begins."""
    usable = sum(t.gpu is None and t.drained is None for t in client.view(platform=asked_platform()).tiles)
    if ranks > usable:
        raise UserError("tiles-ranks", "there are more ranks on this node than tiles", found=f"{ranks} ranks, {usable} tiles",
                        expected="a tile for each rank", fix="start fewer ranks, or name a platform whose tiles share "
                        "the cores (TILEWORK_PLATFORM), or share the machine (TILEWORK_TILES=shared)")  # fmt: skip


def let_go(held: Held) -> bool:
    """One session less. The last one gives the tiles back, and the threads their CPUs: True."""
    global _held
    with _lock:
        if _held is not held:
            return False
        held.users -= 1
        if held.users:
            return False
        _held = None
        with contextlib.suppress(ValueError, AttributeError):
            faulthandler.unregister(signal.SIGURG)
        if held.lease is not None and _before:
            _everywhere(_before)
            _before.clear()
        held.close()
        return True


def _everywhere(cpus: set[int]) -> None:
    """All threads of this process, and all that they will start, run on those CPUs only."""
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            os.sched_setaffinity(int(name), cpus)


def _show_stacks(stack: int) -> None:
    """The daemon may ask a hung process for its stack with a signal that is otherwise ignored."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if signal.getsignal(signal.SIGURG) == signal.SIG_DFL:
            faulthandler.register(signal.SIGURG, file=stack, all_threads=True)


def _command() -> str:
    return shlex.join([os.path.basename(sys.executable) or "python", *sys.argv])[:500]


def _label() -> str:
    """What the environment calls this job: shown, never believed."""
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
