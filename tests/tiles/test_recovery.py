"""What a daemon finds when it begins, and what may happen to its folder meanwhile: no live lease is ever passed over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import daemon_pid, kill_daemon, leases_when, python_for_all
from tilework.errors import MachineError, UserError
from tilework.tiles import client, locks, messages, recovery, reset
from tilework.tiles.asks import Ask, parse
from tilework.tiles.ledger import Lease
from tilework.tiles.seat import Seat, _abstract
from tilework.tiles.topology import detect

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
CHURN = """
import fcntl, os, sys, time
fds = [os.open(f"{sys.argv[1]}-{i}", os.O_RDWR | os.O_CREAT) for i in range(60)]
while True:
    for kind in (fcntl.LOCK_EX, fcntl.LOCK_UN):
        for fd in fds:
            fcntl.flock(fd, kind)
        time.sleep(0.002)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen]]:
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_a_lock_is_seen_in_the_kernels_list_while_others_come_and_go(tmp_path: Path, started: list[subprocess.Popen]) -> None:
    """One reading of the list misses one in twenty here."""
    code = f"import fcntl; f = open({str(tmp_path / 'mine')!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); input()"
    started += [subprocess.Popen([sys.executable, "-c", CHURN, str(tmp_path / f"{k}")]) for k in range(3)]
    started.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE))
    path, until = tmp_path / "mine", time.monotonic() + 10
    while locks.holder_of(path) is None:
        assert time.monotonic() < until
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert locks.holder_of(path) == started[-1].pid
    started[-1].kill()
    started[-1].wait()
    assert locks.holder_of(path) is None


def record(node, tiles: tuple[int, ...], numbers: tuple[int, ...] | None = None, **more) -> Lease:
    cpus = tuple(sorted({cpu for i in tiles for cpu in node.tiles[i].cpus}))
    fields = {"id": "0" * 12, "tiles": numbers or tiles, "uid": 0, "pid": 1, "start": 1, "command": "", "job": "",
              "platform": node.platform, "since": 0.0, "cpus": cpus}  # fmt: skip
    return Lease(**{**fields, **more})


def test_a_live_lease_keeps_its_cores_whatever_the_node_looks_like_now() -> None:
    host, other = detect("host"), detect("SN30-8")
    cpu = host.tiles[1].cpus[0]
    assert recovery.taken_up(host, record(host, (1,))) == (1,)
    for lease in (record(host, (1,)), record(host, (1,), platform="lab")):  # of another platform, or of one that is gone
        taken = recovery.taken_up(other, lease)
        assert set(taken) == {t.index for t in other.tiles if cpu in t.cpus} != set()
    assert recovery.taken_up(host, record(host, (1,), platform="lab")) == (1,)
    assert recovery.taken_up(host, record(host, (1,), numbers=(99,))) == (1,)  # the number means nothing any more
    assert recovery.taken_up(host, record(host, (0,), cpus=(cpu,))) == (1,)  # nor here: the site file was changed


@root
def test_a_forged_record_takes_nobodys_lease_away(run_folder: Path, started: list[subprocess.Popen]) -> None:
    """It may claim a tile that is held. Then the tile is free when both have ended."""
    mine = client.lease(Ask(tiles=(1,)))
    code = """
import fcntl, json, os, sys
from tilework.tiles import locks
folder, pid = sys.argv[1], os.getpid()
os.umask(0)
fd = os.open(f"{folder}/lease-000000000000.lock", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(fd, fcntl.LOCK_SH)
record = dict(id="0" * 12, tiles=[1], uid=os.getuid(), pid=pid, start=locks.start_time(pid), command="forged", job="",
              platform="host", since=1.0, cpus=json.loads(sys.argv[2]))
with open(f"{folder}/lease-000000000000.json", "w") as f:
    json.dump(record, f)
print("done", flush=True)
input()
"""
    python, env = python_for_all()
    words = [python, "-c", code, str(run_folder), json.dumps(mine.cpus)]
    forger = subprocess.Popen(words, user=65534, group=65534, extra_groups=[], env=env, cwd="/", stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    started.append(forger)
    assert forger.stdout.readline() == "done\n"
    kill_daemon(run_folder)
    assert sorted(lease["pid"] for lease in client.view()["leases"]) == sorted([os.getpid(), forger.pid])
    forger.kill()
    forger.wait()
    leases_when(lambda found: [lease["pid"] for lease in found] == [os.getpid()])
    with pytest.raises(UserError, match="in time"):
        client.lease(Ask(tiles=(1,)), wait=0)
    mine.release()


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
        node = detect("host")
        mine = record(node, (0,), pid=os.getpid(), uid=os.geteuid())
        found = {number: recovery.memory_of(mine, number) for number in numbers}
        assert [number for number, fd in found.items() if fd is not None] == [memory]
        assert recovery.memory_of(record(node, (0,), pid=os.getpid(), uid=os.geteuid() + 1), memory) is None
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
    assert daemon_pid(run_folder) == pid == client.view()["daemon"]["pid"]
    leases_when(lambda _: list(run_folder.glob("lease-*.json")) != [])
    kill_daemon(run_folder)  # the next one cannot see that lock; it knows the process
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


@pytest.mark.parametrize("change", ["older", "newer"])
def test_a_record_of_another_version(run_folder: Path, holder: Callable[..., subprocess.Popen], change: str) -> None:
    process = holder("tiles:1")
    process.stdout.readline()
    path = next(run_folder.glob("lease-*.json"))
    data = json.loads(path.read_text())
    data = {k: v for k, v in data.items() if k not in ("cpus", "gpus")} if change == "older" else {**data, "colour": "blue"}
    path.write_text(json.dumps(data))
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
    assert client.view()["leases"] == []


@root
def test_a_process_that_becomes_another_user(run_folder: Path, started: list[subprocess.Popen]) -> None:
    code = (
        "import os; from tilework.tiles import client; x = client.lease('tiles:1'); os.setuid(65534); print(flush=True); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    started.append(process)
    process.stdout.readline()
    kill_daemon(run_folder)
    assert [(lease["pid"], lease["uid"]) for lease in client.view()["leases"]] == [(process.pid, 65534)]


def test_a_seat_that_cannot_be_kept_for_a_while(tmp_path: Path) -> None:
    """A failure leaves everything as it was, and the next try may go well."""
    folder = tmp_path / "run"
    folder.mkdir()
    seat = Seat(folder)
    try:
        assert seat.take()
        seat.show()
        assert seat.keep()
        shutil.rmtree(folder)
        (folder / "daemon.lock").mkdir(parents=True)
        open_before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(OSError):
                seat.keep()
        assert len(os.listdir("/proc/self/fd")) == open_before
        (folder / "daemon.lock").rmdir()
        assert not seat.keep() and seat.keep()
        assert len(os.listdir("/proc/self/fd")) == open_before
    finally:
        seat.leave()
        seat.listener.close()


def test_names_of_folders_do_not_meet(tmp_path: Path) -> None:
    names = {_abstract(tmp_path / f"{'x' * 200}{i}") for i in range(3)}
    assert len(names) == 3 and all(len(name) < 100 for name in names)


def test_somebody_took_the_daemons_name(run_folder: Path) -> None:
    """Anybody could. Where the folder is as it was left, the daemon begins without it."""
    client.view()
    kill_daemon(run_folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as squatter:
        squatter.bind(_abstract(run_folder))
        client.lease(Ask(tiles=(1,)), wait=5).release()


def test_a_client_stopped_while_it_starts_the_daemon(run_folder: Path, started: list[subprocess.Popen]) -> None:
    code = """
import os, signal
from tilework.tiles import client
answers = client.answers
def stop(folder):
    client.answers = answers
    print("at the gate", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return answers(folder)
client.answers = stop
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
    leases_when(lambda _: len(client.view()["queue"]) == 1)
    waiting = client.view()["queue"][0]["pid"]
    os.kill(waiting, signal.SIGSTOP)
    try:
        kill_daemon(run_folder)
        client.lease(Ask(tiles=(1,)), wait=0).release()
    finally:
        os.kill(waiting, signal.SIGCONT)
    assert {first.poll(), second.poll()} == {None}


def test_an_impostor_is_not_believed(run_folder: Path) -> None:
    """Anybody may write daemon.address in a shared folder. Who has the daemon's lock is the daemon."""
    client.view()
    pid = daemon_pid(run_folder)
    code = """
import os, socket, sys
os.chdir(sys.argv[1])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("impostor")
listener.listen(100)
print("done", flush=True)
while True:
    with open("daemon.address", "w") as f:
        f.write("impostor")
"""
    impostor = subprocess.Popen(
        [sys.executable, "-c", code, str(run_folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert impostor.stdout.readline() == "done\n"
    try:
        assert all(client.view()["daemon"]["pid"] == pid for _ in range(50))
    finally:
        impostor.kill()
        impostor.wait()
        os.kill(pid, signal.SIGKILL)  # by its number: its name is not there any more


def test_reset_ends_only_who_holds_a_lease(run_folder: Path) -> None:
    """A daemon that lies must not make root end somebody's process."""
    client.view()
    victim = subprocess.Popen(["sleep", "60"])
    try:
        lie = {"id": "0" * 12, "pid": victim.pid, "start": locks.start_time(victim.pid), "user": "x", "command": "x"}
        seen = {"tiles": [{"path": "/XRDU_0/RDU_0/TILE_0", "lease": lie["id"]}], "leases": [lie]}
        with pytest.raises(UserError, match="cannot be shown to hold"):
            reset.reset(seen, "/XRDU_0/RDU_0/TILE_0")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
    for path in ("", "/"):
        with pytest.raises(UserError, match="no tile named"):
            reset.reset(seen, path)


def test_the_order_of_those_who_wait_outlives_the_daemon(run_folder: Path, holder: Callable[..., subprocess.Popen]) -> None:
    mine = client.lease(Ask(tiles=(0,)))
    waiting = []
    for i in range(5):
        waiting.append(holder("tiles:0").pid)
        leases_when(lambda _, count=i + 1: len(client.view()["queue"]) == count)
    for _ in range(3):
        kill_daemon(run_folder)
        leases_when(lambda _: len(client.view()["queue"]) == 5)
        assert [w["pid"] for w in client.view()["queue"]] == waiting
    assert client.view()["queue"][0]["waited_seconds"] > client.view()["queue"][4]["waited_seconds"]
    kill_daemon(run_folder)
    mine.release()  # while no daemon runs: the first of the queue is next, not the first to come back
    assert leases_when(lambda found: len(found) == 1)[0]["pid"] == waiting[0]


def test_a_client_that_was_stopped_asks_again(run_folder: Path, holder: Callable[..., subprocess.Popen]) -> None:
    mine = client.lease(Ask(tiles=(0,)))
    process = holder("tiles:0")
    leases_when(lambda _: len(client.view()["queue"]) == 1)
    os.kill(process.pid, signal.SIGSTOP)
    mine.release()
    leases_when(lambda found: len(found) == 1)  # offered
    leases_when(lambda found: not found, 8.0)  # not taken
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdout.readline() == "0\n"


def test_a_range_of_tiles_costs_nothing() -> None:
    begin = time.monotonic()
    for text in ("0-60000," * 3000 + "1", "0-4000000000", ",".join(["1"] * 5000)):
        with pytest.raises(UserError, match="which tiles"):
            parse(text, detect("host"))
    assert time.monotonic() - begin < 0.5
    assert parse("99999", detect("host")).count == 99999  # capped later, with a line that says so


@root
def test_a_user_with_a_very_large_number(run_folder: Path, started: list[subprocess.Popen]) -> None:
    python, env = python_for_all()
    client.view()
    code = "from tilework.tiles import client; mine = client.lease(); print('held', flush=True); input()"
    process = subprocess.Popen([python, "-c", code], user=3_000_000_000, group=65534, extra_groups=[], env=env, cwd="/",
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    started.append(process)
    assert process.stdout.readline() == "held\n"
    kill_daemon(run_folder)
    assert [lease["uid"] for lease in client.view()["leases"]] == [3_000_000_000]


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
    assert client.view()["platform"] == "SN10-8"


def test_somebody_has_the_daemons_place(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """He cannot be made to serve; but he is named."""
    monkeypatch.setattr(client, "START_SECONDS", 1.0)
    run_folder.mkdir()
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


def test_views_do_not_get_dearer(run_folder: Path) -> None:
    leases = [client.lease(Ask(tiles=(i,)), platform="SN30-8") for i in range(4)]
    with client.talking() as say:

        def seconds(count: int) -> float:
            begin = time.monotonic()
            for _ in range(count):
                say(messages.View(2.0))
            return (time.monotonic() - begin) / count

        first = min(seconds(200) for _ in range(3))
        seconds(8000)
        assert min(seconds(200) for _ in range(3)) < 3 * first + 1e-3
    for lease in leases:
        lease.release()
