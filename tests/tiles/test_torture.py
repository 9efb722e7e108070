"""Hundreds of short leases, with kill -9 of clients and of the daemon at random: of one user, whose processes start the daemon
again themselves; and of two users of root's service, which is started again as systemd does it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import kill_daemon, leases_when, python_for_all

from tilework.tiles import client

pytestmark = pytest.mark.slow

FULL = os.environ.get("TILEWORK_FULL") == "1"
OPERATIONS = 10_000 if FULL else 500
WORKERS = 8


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("of", ["one user", "two users"])
def test_torture(run_folder: Path, open_folder: Path, of: str, request: pytest.FixtureRequest) -> None:
    random.seed(7)
    python, env, users, serve = None, dict(os.environ), [None], None
    if of == "two users":
        if os.geteuid():
            pytest.skip("other users can be had by root alone")
        python, env = python_for_all()
        users, serve = [65534, 1], request.getfixturevalue("service")
    check = open_folder / "check"
    check.mkdir()
    check.chmod(0o777)
    for name in ("log", *(f"tile-{i}" for i in range(32))):
        (check / name).touch()
        (check / name).chmod(0o666)
    worker = str(Path(__file__).parent / "torture_worker.py")
    client.view()

    def start(number: int) -> subprocess.Popen:
        user = users[number % len(users)]
        as_user = {"user": user, "group": user, "extra_groups": []} if user is not None else {}
        words = [python or sys.executable, worker, str(check), str(number), "60"]
        with open(open_folder / "stderr", "ab") as said:
            return subprocess.Popen(words, env={**env, "PYTHONDONTWRITEBYTECODE": "1"}, cwd="/", stderr=said, **as_user)

    number, killed, daemons = WORKERS, 0, 0
    processes = [start(i) for i in range(WORKERS)]
    begin = time.monotonic()
    next_daemon = begin + 0.5
    while True:
        lines = (check / "log").read_text().splitlines()
        if sum(line.startswith("done") for line in lines) >= OPERATIONS and killed > 5 and daemons > 0:
            break
        said = (open_folder / "stderr").read_text()
        assert not said, said[-2000:]
        assert time.monotonic() - begin < OPERATIONS * 0.15, f"{len(lines)} operations, then nothing"
        time.sleep(0.05)
        if random.random() < 0.3:
            random.choice(processes).kill()
            killed += 1
        if time.monotonic() > next_daemon:
            kill_daemon(run_folder)
            if serve is not None:
                serve()
            daemons += 1
            next_daemon = time.monotonic() + random.uniform(1.0, 3.0)
        for i, process in enumerate(processes):
            if process.poll() is not None:
                processes[i] = start(number)
                number += 1
    for process in processes:
        process.kill()
        process.wait()
    lines = (check / "log").read_text().splitlines()
    waits = sorted(float(line.split()[1]) for line in lines if line.startswith("done"))
    print(f"{len(waits)} leases, {killed} clients and {daemons} daemons killed; longest wait {waits[-1]:.1f} s")
    assert not [line for line in lines if line.startswith("twice")], "two processes held one tile at once"
    assert not [line for line in lines if line.startswith("starved")], "somebody starved"
    assert not [line for line in lines if line.startswith("trouble")], lines
    leases_when(lambda found: not found)  # every tile is free again
    kill_daemon(run_folder)
    if serve is not None:
        serve()
    assert client.view().leases == []
    assert not list(run_folder.glob("lease-*"))
