"""What a daemon finds when it begins, and what may happen to its folder meanwhile: no live lease is ever passed over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import daemon_pid, kill_daemon, leases_when, python_for_all

from tilework.errors import MachineError, UserError
from tilework.tiles import alive, client
from tilework.tiles.asks import Ask, parse
from tilework.tiles.place import Place
from tilework.tiles.records import Record
from tilework.tiles.topology import detect, taken_up

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen]]:
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def record(node, tiles: tuple[int, ...], numbers: tuple[int, ...] | None = None, **more) -> Record:
    cpus = tuple(sorted({cpu for i in tiles for cpu in node.tiles[i].cpus}))
    fields = {"id": "0" * 12, "kind": "exclusive", "tiles": numbers or tiles, "uid": 0, "pid": 1, "start": 1,
              "platform": node.platform, "since": 0.0, "cpus": cpus}  # fmt: skip
    return Record(**{**fields, **more})


def test_a_live_lease_keeps_its_cores_whatever_the_node_looks_like_now() -> None:
    host, other = detect("host"), detect("SN30-8")
    cpu = host.tiles[1].cpus[0]
    assert taken_up(host, record(host, (1,))) == (1,)
    for lease in (record(host, (1,)), record(host, (1,), platform="lab")):  # of another platform, or of one that is gone
        taken = taken_up(other, lease)
        assert set(taken) == {t.index for t in other.tiles if cpu in t.cpus} != set()
    assert taken_up(host, record(host, (1,), platform="lab")) == (1,)
    assert taken_up(host, record(host, (1,), numbers=(99,))) == (1,)  # the number means nothing any more
    assert taken_up(host, record(host, (0,), cpus=(cpu,))) == (1,)  # nor here: the site file was changed


def test_what_is_opened_for_a_client_is_a_memory_file_of_his(tmp_path: Path) -> None:
    """He names a number; behind it may be anything, also something that only root may open."""
    with open("/dev/shm/tilework-test-secret", "w") as f:
        f.write("secret")
    numbers = []
    try:
        for path in ("/dev/shm/tilework-test-secret", "/dev/null", "/", "/proc/self/environ"):
            numbers += [os.open(path, os.O_PATH), os.open(path, os.O_RDONLY)]
        numbers += os.pipe()
        numbers.append(memory := os.memfd_create("page"))
        found = {number: alive.open_memory(os.getpid(), os.geteuid(), number) for number in numbers}
        assert [number for number, fd in found.items() if fd is not None] == [memory]
        assert alive.open_memory(os.getpid(), os.geteuid() + 1, memory) is None
        assert alive.open_memory(os.getpid(), os.geteuid(), memory, inode=1) is None
        os.close(found[memory])
    finally:
        os.unlink("/dev/shm/tilework-test-secret")
        for number in numbers:
            os.close(number)


def test_the_folder_vanishes(run_folder: Path, holder: Callable[..., subprocess.Popen]) -> None:
    """As when a login manager tidies up after its owner: the daemon lives, its leases too, and nobody begins a second one."""
    process = holder("tiles:1")
    assert process.stdout.readline() == "1\n"
    pid = daemon_pid(run_folder)
    shutil.rmtree(run_folder)
    with pytest.raises(UserError, match="in time"):
        client.lease(Ask(tiles=(1,)), wait=0.1)
    assert daemon_pid(run_folder) == pid == client.view().daemon.pid
    leases_when(lambda _: list(run_folder.glob("lease-*.json")) != [])
    kill_daemon(run_folder)
    with pytest.raises(UserError, match="in time"):
        client.lease(Ask(tiles=(1,)), wait=0.1)
    assert daemon_pid(run_folder) != pid
    process.stdin.write("\n")
    process.stdin.flush()
    client.lease(Ask(tiles=(1,)), wait=5).release()


def test_the_folder_vanishes_while_somebody_asks(run_folder: Path) -> None:
    client.view()
    with client.talking():  # a connection from before
        shutil.rmtree(run_folder)
        client.lease(Ask(tiles=(1,)), wait=5).release()


def test_a_record_of_a_newer_version(run_folder: Path, holder: Callable[..., subprocess.Popen]) -> None:
    process = holder("tiles:1")
    process.stdout.readline()
    path = next(run_folder.glob("lease-*.json"))
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "colour": "blue"}))
    kill_daemon(run_folder)
    with pytest.raises(UserError, match="in time"):
        client.lease(Ask(tiles=(1,)), wait=0)


def test_a_damaged_record_of_a_live_lease(run_folder: Path, holder: Callable[..., subprocess.Popen]) -> None:
    """Better no daemon than one that gives its tiles away."""
    process = holder("tiles:1")
    process.stdout.readline()
    path = next(run_folder.glob("lease-*.json"))
    path.write_text(path.read_text()[:-20])
    kill_daemon(run_folder)
    with pytest.raises(MachineError, match="record of a live lease is damaged"):
        client.view()
    process.kill()
    process.wait()
    assert client.view().leases == []


@root
def test_a_process_that_becomes_another_user(run_folder: Path, started: list[subprocess.Popen]) -> None:
    code = (
        "import os; from tilework.tiles import client; x = client.lease('tiles:1'); os.setuid(65534); print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    started.append(process)
    process.stdout.readline()
    kill_daemon(run_folder)
    assert [lease.pid for lease in client.view().leases] == [process.pid]


def test_a_place_that_cannot_be_kept_for_a_while(tmp_path: Path) -> None:
    """A failure leaves everything as it was, and the next try may go well."""
    folder = tmp_path / "run"
    folder.mkdir(0o700)
    place = Place(folder, everybody=False)
    try:
        assert place.take() and place.keep()
        shutil.rmtree(folder)
        (folder / "daemon.lock").mkdir(parents=True)
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(OSError):
                place.keep()
        assert len(os.listdir("/proc/self/fd")) == open_before
        (folder / "daemon.lock").rmdir()
        assert not place.keep() and place.keep()
        assert len(os.listdir("/proc/self/fd")) == open_before
    finally:
        place.leave()


def test_a_client_stopped_while_it_starts_the_daemon(run_folder: Path, started: list[subprocess.Popen]) -> None:
    code = """
import os, signal
from tilework.tiles import client, place
listen = place.listen
def stop(folder):
    print("at the gate", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return listen(folder)
place.listen = stop
client.view()
"""
    stopped = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    started.append(stopped)
    assert stopped.stdout.readline() == b"at the gate\n"
    client.view()
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(10) == 0


def test_a_request_right_after_a_restart(run_folder: Path, holder: Callable[..., subprocess.Popen]) -> None:
    """While one who waited has not come back, nobody is served; that costs nobody what is free."""
    first, second = holder("tiles:0"), holder("tiles:0")
    leases_when(lambda _: len(client.view().queue) == 1)
    waiting = client.view().queue[0].pid
    os.kill(waiting, signal.SIGSTOP)
    try:
        kill_daemon(run_folder)
        client.lease(Ask(tiles=(1,)), wait=0).release()
    finally:
        os.kill(waiting, signal.SIGCONT)
    assert {first.poll(), second.poll()} == {None}


def test_the_order_of_those_who_wait_outlives_the_daemon(run_folder: Path, holder: Callable[..., subprocess.Popen]) -> None:
    mine = client.lease(Ask(tiles=(0,)))
    waiting = []
    for i in range(5):
        waiting.append(holder("tiles:0").pid)
        leases_when(lambda _, count=i + 1: len(client.view().queue) == count)
    for _ in range(3):
        kill_daemon(run_folder)
        leases_when(lambda _: len(client.view().queue) == 5)
        assert [w.pid for w in client.view().queue] == waiting
    assert client.view().queue[0].waited_seconds > client.view().queue[4].waited_seconds
    kill_daemon(run_folder)
    mine.release()  # while no daemon runs: the first of the queue is next, not the first to come back
    assert leases_when(lambda found: len(found) == 1)[0].pid == waiting[0]


def test_ranges_of_tiles() -> None:
    for text in ("0-60000," * 3000 + "1", "0-4000000000", ",".join(["1"] * 5000)):
        with pytest.raises(UserError, match="which tiles"):
            parse(text, detect("host"))
    assert parse("99999", detect("host")).count == 99999  # capped later, with a line that says so


@root
def test_a_user_with_a_very_large_number(service, run_folder: Path, started: list[subprocess.Popen]) -> None:
    python, env = python_for_all()
    code = "from tilework.tiles import client; mine = client.lease(); print('held', flush=True); input()"
    process = subprocess.Popen([python, "-c", code], user=3_000_000_000, group=65534, extra_groups=[], env=env, cwd="/",
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    started.append(process)
    assert process.stdout.readline() == "held\n"
    kill_daemon(run_folder)
    service()
    assert [lease.uid for lease in client.view().leases] == [3_000_000_000]


def test_the_daemon_is_nobodys_child_and_bound_to_no_core(run_folder: Path) -> None:
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        client.view()
    finally:
        os.sched_setaffinity(0, cpus)
    pid = daemon_pid(run_folder)
    assert os.sched_getaffinity(pid) == cpus or len(cpus) == 1
    assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_site_file_named_from_here(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.toml").write_text('platform = "SN10-8"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWORK_SITE", "site.toml")
    assert client.view().platform == "SN10-8"


def test_somebody_has_the_daemons_place(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """He cannot be made to serve; but he is named."""
    run_folder.mkdir(0o700)
    code = f"""
import fcntl
f = open({str(run_folder / "daemon.lock")!r}, "w")
fcntl.lockf(f, fcntl.LOCK_EX)
print(flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        with pytest.raises(MachineError, match="no daemon serves") as e:
            client.view()
        assert f"pid {process.pid} has its place" in str(e.value)
    finally:
        process.kill()
        process.wait()
