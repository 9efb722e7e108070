"""What several tests of this folder do with daemons, leases and other users."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilework.tiles import client, place

ROOT = Path(__file__).parents[2]


def daemon_pid(folder: Path) -> int | None:
    """The daemon's pid: who has locked its place."""
    return place.process_at(folder)


def kill_daemon(folder: Path, how: int = signal.SIGKILL) -> None:
    pid = daemon_pid(folder)
    if pid is None:
        return
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        signal.pidfd_send_signal(fd, how)
        import select

        select.select([fd], [], [], 10)
        os.close(fd)


def python_for_all() -> tuple[str, dict[str, str]]:
    """A Python of our version that other users may run, and the environment in which it finds this Tilework."""
    import msgspec

    sources = [ROOT / "src", *ROOT.glob("frontends/*/src"), Path(msgspec.__file__).parents[1]]
    packages = os.pathsep.join(map(str, sources))
    env = {**os.environ, "PYTHONPATH": packages, "HOME": "/nonexistent"}
    for python in (sys.executable, "/usr/bin/python3"):
        probe = [python, "-c", "import sys, msgspec, tilework.tiles.client; print(sys.version_info[:2])"]
        with contextlib.suppress(OSError):
            done = subprocess.run(probe, capture_output=True, text=True, user=65534, group=65534, extra_groups=[], env=env)
            if done.stdout.strip() == str(sys.version_info[:2]):
                return python, env
    pytest.skip("no Python here that another user may run")


def leases_when(condition: Callable[[list], bool], seconds: float = 30.0) -> list:
    """The leases, once they are as expected; the test fails where that takes too long."""
    until = time.monotonic() + seconds
    while True:
        leases = client.view().leases
        if condition(leases):
            return leases
        assert time.monotonic() < until, leases
        time.sleep(0.02)
