"""Each test has a folder of its own for leases, and a daemon of its own that ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilework.tiles import client, place

ROOT = Path(__file__).parents[2]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may pass through; pytest's own belong to the tester alone."""
    with tempfile.TemporaryDirectory(prefix="tilework-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def run_folder(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = open_folder / "run"
    monkeypatch.setenv("TILEWORK_RUN", str(folder))
    monkeypatch.setenv("TILEWORK_LEASE", "1")
    for name in ("TILEWORK_PLATFORM", "TILEWORK_SITE", "TILEWORK_TILES", "TILEWORK_WAIT", "TILEWORK_JOB", "SF_RNT_TILE_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tilework.tiles.site.PLACES", ())
    yield folder
    kill_daemon(folder)


@pytest.fixture
def service(run_folder: Path) -> Iterator[Callable[[], subprocess.Popen]]:
    """service(): starts root's daemon for everybody, as systemd does; called again, it starts the next one."""
    run_folder.mkdir()
    run_folder.chmod(0o755)
    started: list[subprocess.Popen] = []

    def start() -> subprocess.Popen:
        for old in started:
            old.wait(10)
        words = [sys.executable, "-m", "tilework.tiles.service"]
        with open(run_folder.parent / "service.log", "ab") as log:
            started.append(subprocess.Popen(words, cwd="/", stderr=log))
        until = time.monotonic() + 30
        while daemon_pid(run_folder) != started[-1].pid or not client.answers(run_folder):
            assert time.monotonic() < until and started[-1].poll() is None, (run_folder.parent / "service.log").read_text()
            time.sleep(0.01)
        return started[-1]

    start()
    yield start
    for process in started:
        process.kill()
        process.wait()


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


@pytest.fixture
def holder(run_folder: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """holder("4"): another process that leases those tiles ("": shares the machine), says so, and holds them until it is told."""
    started = []

    def start(tiles: str, **env: str) -> subprocess.Popen:
        code = (
            "import sys, os\n"
            "from tilework.tiles import holding\n"
            "held = holding.hold(sys.argv[1])\n"
            "print(*(held.lease.tiles if held.lease else ['shared']), flush=True)\n"
            "sys.stdin.readline()\n"
            "holding.let_go(held)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code, tiles], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, **env})  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def leases_when(condition: Callable[[list], bool], seconds: float = 30.0) -> list:
    """The leases, once they are as expected; the test fails where that takes too long."""
    until = time.monotonic() + seconds
    while True:
        leases = client.view().leases
        if condition(leases):
            return leases
        assert time.monotonic() < until, leases
        time.sleep(0.02)
