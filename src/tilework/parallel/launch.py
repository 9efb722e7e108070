"""Several ranks of one command on this machine: what `tilework launch` does. The first rank that fails decides the exit code; the
others are stopped soon after."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from ..errors import UserError

STOPPED = 76  # group.py's: a rank that stopped because another failed, and is not the cause
_PDEATHSIG = 1  # prctl
GRACE = 5.0  # seconds that ranks have to stop by themselves, then again after SIGTERM


def launch(
    command: Sequence[str],
    num_ranks: int,
    *,
    tag: str | None = "[{rank}] ",
    environment: Callable[[int], dict[str, str]] = lambda rank: {},
    failed: Callable[[int, int], None] | None = None,
    stops: bool = True,
    speaks: Callable[[int], bool] = lambda rank: True,
) -> int:
    """Runs `num_ranks` copies of the command, and returns the exit code of the one that failed first; 0 where all went well. The
    ranks end with this process, however it ends.

    tag           what lines of output begin with; {rank} and {stream} (stdout, stderr) are filled in. None: they are passed on
                  as they are.
    environment   more variables of a rank.
    failed        called with the rank and its exit code (minus a signal's number) for each that fails, instead of a last line.
    stops         the others are stopped where one fails; False: they go on, and the highest exit code is returned.
    speaks        whether a rank's output is shown."""
    if num_ranks < 1:
        raise UserError("ranks-launched", "the number of ranks", found=str(num_ranks), expected="1 or more")
    prctl = ctypes.CDLL(None).prctl  # looked up here: a child that has just been forked must not

    def die_with_us() -> None:
        prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    key, ranks = secrets.token_hex(12), list[subprocess.Popen[bytes]]()
    readers: list[threading.Thread] = []
    try:
        for rank in range(num_ranks):
            env = {
                **os.environ,
                "TILEWORK_RANK": str(rank), "TILEWORK_WORLD_SIZE": str(num_ranks), "TILEWORK_LOCAL_RANK": str(rank),
                "TILEWORK_LOCAL_SIZE": str(num_ranks), "TILEWORK_LAUNCH": key, "PYTHONUNBUFFERED": "1",
                # Not the C++ stacks of lost connections: we say it in a line.
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
                **environment(rank),
            }  # fmt: skip
            pipe = subprocess.DEVNULL if not speaks(rank) else subprocess.PIPE if tag is not None else None
            ranks.append(
                subprocess.Popen(list(command), env=env, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL if rank else None,
                                 preexec_fn=die_with_us)
            )  # fmt: skip
            if tag is not None and pipe == subprocess.PIPE:
                for name, source in (("stdout", ranks[-1].stdout), ("stderr", ranks[-1].stderr)):
                    words = (source, getattr(sys, name), tag.format(rank=rank, stream=name))
                    readers.append(threading.Thread(target=_copy, args=words, daemon=True))
                    readers[-1].start()
    except OSError as e:
        _stop(ranks, signal.SIGKILL)
        raise UserError("ranks-launched", f"{command[0]} could not be started", found=e.strerror or str(e)) from None

    def pass_on(number: int, _: object) -> None:
        if number != signal.SIGINT or not from_terminal():  # which has told the ranks as well
            _stop(ranks, number)

    before = {s: signal.signal(s, pass_on) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        code = _wait(ranks, failed, stops)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for reader in readers:
        reader.join(1.0)
    return code


def from_terminal() -> bool:
    """Does a Ctrl-C in this process's terminal reach everything in its process group by itself?"""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _wait(ranks: Sequence[subprocess.Popen[bytes]], tell: Callable[[int, int], None] | None, stops: bool) -> int:
    left, failed, stopped, deadline, asked = list(ranks), list[tuple[int, int]](), set[int](), 0.0, 0
    while left:
        for each in [r for r in left if r.poll() is not None]:
            left.remove(each)
            if each.returncode:
                failed.append((ranks.index(each), each.returncode))
                deadline = deadline or time.monotonic() + GRACE
                if tell is not None:
                    tell(*failed[-1])
        if failed and stops and time.monotonic() > deadline and asked < 2:
            stopped |= {ranks.index(r) for r in left}
            _stop(left, (signal.SIGTERM, signal.SIGKILL)[asked])
            asked, deadline = asked + 1, time.monotonic() + GRACE / 2
        time.sleep(0.02)
    if not failed:
        return 0
    if not stops:
        return max(128 - code if code < 0 else code for _, code in failed)
    cause = [(r, c) for r, c in failed if c != STOPPED and r not in stopped] or failed
    rank, code = cause[0]
    said = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    if tell is None:
        print(f"tilework: rank {rank} {said}", file=sys.stderr, flush=True)
    return 128 - code if code < 0 else code


def _stop(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for each in ranks:
        if each.poll() is None:
            each.send_signal(number)


_lines = threading.Lock()


def _copy(source: IO[bytes] | None, target: IO[str], tag: str) -> None:
    for line in source or ():
        with _lines:
            target.write(tag + line.decode(errors="replace"))
            target.flush()
