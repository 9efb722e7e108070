"""Sessions keep to their tiles, seen from outside: /proc."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tilework
from tilework.tiles import client

TICKS = os.sysconf("SC_CLK_TCK")

WORK = """
import sys, time, torch, tilework
session = tilework.load(sys.argv[1], tiles=sys.argv[2])
x, y = torch.randn(64, 512), torch.randn(64, 512)
busy, rest = float(sys.argv[3]), float(sys.argv[4])
session.run(x, y)
print("ready", torch.get_num_threads(), flush=True)
while True:
    end = time.monotonic() + busy
    while time.monotonic() < end:
        session.run(x, y)
    time.sleep(rest)
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    x, y = torch.randn(64, 512), torch.randn(64, 512)
    path = tmp_path_factory.mktemp("pinning") / "m.pef"
    tilework.compile(tilework.Step(model=model, inputs=(x,), targets=(y,), loss=nn.MSELoss(),
                                   optimizer=torch.optim.SGD(model.parameters(), 1e-3)), path, weights="inside")  # fmt: skip
    return path


def worker(artifact: Path, tiles: str, busy: float, rest: float) -> tuple[subprocess.Popen, int]:
    process = subprocess.Popen([sys.executable, "-c", WORK, str(artifact), tiles, str(busy), str(rest)], stdout=subprocess.PIPE,
                               text=True)  # fmt: skip
    return process, int(process.stdout.readline().split()[1])


def wanted_seconds(pid: int) -> float:
    """Time that the threads ran or stood in line for a CPU."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        ran, stood, _ = map(int, (task / "schedstat").read_text().split())
        total += ran + stood
    return total / 1e9


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def allowed(pid: int) -> set[str]:
    """CPUs that the threads may run on, for every thread."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        text = (task / "status").read_text()
        found.add(next(line.split()[1] for line in text.splitlines() if line.startswith("Cpus_allowed_list:")))
    return found


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_one_of_two_tiles_is_one_core(artifact: Path, run_folder: Path) -> None:
    process, threads = worker(artifact, "tiles:1", 0.5, 0.0)
    try:
        cpus = client.view().tiles[1].cpus
        assert threads == 1 and allowed(process.pid) == {str(cpus[0])}
        begin, before = time.monotonic(), cpu_seconds(process.pid)
        time.sleep(1.0)
        used = (cpu_seconds(process.pid) - before) / (time.monotonic() - begin)
        assert used < 1.1, f"{used:.2f} cores"
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_jobs_keep_out_of_each_others_way(artifact: Path, run_folder: Path) -> None:
    jobs = [worker(artifact, "1", 0.5, 0.0)[0] for _ in range(2)]
    try:
        lists = [allowed(job.pid) for job in jobs]
        assert all(len(x) == 1 for x in lists) and lists[0] != lists[1]
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def test_exec_is_what_the_kernel_says(artifact: Path, run_folder: Path) -> None:
    """Busy for about 60 % of the time on one tile: `exec` beside the CPU time of the process's threads, within 5 points."""
    process, _ = worker(artifact, "1", 0.06, 0.04)
    try:
        time.sleep(0.2)
        seen = client.view(60.0).leases[0].seconds
        begin, before, stood = time.monotonic(), cpu_seconds(process.pid), wanted_seconds(process.pid)
        time.sleep(3.0)
        now = client.view(60.0).leases[0].seconds
        wall = time.monotonic() - begin
        kernel, most = 100 * (cpu_seconds(process.pid) - before) / wall, 100 * (wanted_seconds(process.pid) - stood) / wall
        busy = 100 * (now["exec"] - seen["exec"]) / (sum(now.values()) - sum(seen.values()))
        # Where neighbours stand in the way, a section lasts longer than it computes: by the time that it stood in line.
        assert kernel - 5 < busy < most + 5, (kernel, busy, most)
        assert 15 < busy < 85
        table = json.loads(subprocess.run([sys.executable, "-m", "sambaflow.tools.sntilestat", "--json", "--skip-idle"],
                                          capture_output=True, text=True).stdout)  # fmt: skip
        assert len(table) == 1 and 10 < table[0]["exec"] < 95
    finally:
        process.kill()
        process.wait()


TWO = """
import sys, threading, time, torch, tilework
sessions = [tilework.load(sys.argv[1], tiles=1) for _ in range(2)]
x, y = torch.randn(64, 512), torch.randn(64, 512)
def work(session):
    while True:
        while time.monotonic() % 0.2 < 0.1:
            session.run(x, y)
        time.sleep(0.2 - time.monotonic() % 0.2)
for session in sessions:
    session.run(x, y)
    threading.Thread(target=work, args=(session,), daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


def test_exec_of_two_sessions_is_what_the_kernel_says(artifact: Path, run_folder: Path) -> None:
    """Two threads with a session each, busy in the same half of every 200 ms, on one tile: half, not all of the time."""
    process = subprocess.Popen([sys.executable, "-c", TWO, str(artifact)], stdout=subprocess.PIPE, text=True)
    try:
        process.stdout.readline()
        seen = client.view(60.0).leases[0].seconds
        begin, before = time.monotonic(), cpu_seconds(process.pid)
        time.sleep(2.0)
        about = client.view(2.0).leases[0]
        wall, now = time.monotonic() - begin, about.seconds
        kernel = 100 * (cpu_seconds(process.pid) - before) / wall
        busy = 100 * (now["exec"] - seen["exec"]) / (sum(now.values()) - sum(seen.values()))
        # Where neighbours stand in the way, sections last longer than they compute: half of the time, and the rest of a step.
        assert kernel - 5 < busy < max(kernel + 5, 65), (kernel, busy)
        assert abs(sum(about.shares.values()) - 100) < 0.01 and abs(about.shares["exec"] - busy) < 15
        assert abs(sum(now.values()) - about.held_seconds) < 0.3
    finally:
        process.kill()
        process.wait()


def test_a_session_gives_everything_back(artifact: Path, run_folder: Path) -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with tilework.load(artifact, tiles=1) as session:
        assert len(client.view().leases) == 1 and torch.get_num_threads() == 1
        other = tilework.load(artifact)
        assert len(client.view().leases) == 1
    assert len(client.view().leases) == 1, "the other session holds it still"
    del other
    import gc

    gc.collect()
    assert client.view().leases == [] and os.sched_getaffinity(0) == before and torch.get_num_threads() == threads
    with pytest.raises(tilework.UserError):
        tilework.load("none.pef")
    assert client.view().leases == []
    assert session.page is not None
