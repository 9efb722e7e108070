"""Each test has a folder of its own for leases, and a daemon of its own that ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import daemon_pid, kill_daemon

from tilework.tiles import client


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
    for name in ("TILEWORK_PLATFORM", "TILEWORK_SITE", "TILEWORK_TILES", "TILEWORK_WAIT", "TILEWORK_JOB", "SF_RNT_TILE_AFFINITY",
                 "OMP_NUM_THREADS"):  # fmt: skip
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
