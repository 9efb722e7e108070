"""What somebody else, or bad luck, could do to leases."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from daemons import daemon_pid, kill_daemon, leases_when, python_for_all

from tilework.errors import MachineError, TileworkError, UserError
from tilework.tiles import alive, client, holding, messages
from tilework.tiles.asks import Ask

HERE = os.getpid()


def ask(connection: socket.socket, tiles: tuple[int, ...], **more: object) -> int:
    """The page of the request: as long as it is open, it is meant."""
    page = os.memfd_create("page")
    alive.lock(page)
    connection.send(messages.encode(messages.LeaseRequest(ask=Ask(tiles=tiles), page=page, **more)))  # type: ignore[arg-type]
    return page


def test_a_client_that_closes_its_ears_gives_nobody_a_tile_twice(run_folder: Path, holder) -> None:
    """One of several who are served at once cannot be told. What it was to get goes on to the next, and to nobody else."""
    mine = client.lease(Ask(tiles=(0, 1)))
    deaf = client.connect().sock
    page = ask(deaf, (0,))
    deaf.recv(65536)  # "waiting"
    deaf.shutdown(socket.SHUT_RD)
    others = [holder("tiles:1"), holder("0-1")]
    leases_when(lambda _: len(client.view().queue) == 3)
    mine.release()
    leases = leases_when(lambda found: len(found) == 1)
    time.sleep(0.5)
    leases = client.view().leases
    taken = [i for lease in leases for i in lease.tiles]
    assert len(taken) == len(set(taken)) and leases[0].pid in [p.pid for p in others]
    deaf.close()
    os.close(page)


def test_the_umask_of_whoever_starts_it(run_folder: Path, holder) -> None:
    before = os.umask(0o000)
    try:
        process = holder("tiles:0")
        process.stdout.readline()
    finally:
        os.umask(before)
    assert stat.S_IMODE(run_folder.stat().st_mode) == 0o700
    for name in ("lease-*.json", "daemon.sock", "daemon.lock"):
        assert stat.S_IMODE(next(run_folder.glob(name)).stat().st_mode) == 0o600, name


@pytest.mark.parametrize(
    "content",
    ["[" * 60_000, "{}", '{"id":"x"}', "null", '{"id":"aaaaaaaaaaaa","tiles":["0"]}', "\0" * 100],
    ids=["deep", "empty", "short", "null", "wrong", "zeros"],
)
def test_damaged_records(run_folder: Path, content: str) -> None:
    """Of a process that is not there any more."""
    client.view()
    kill_daemon(run_folder)
    (run_folder / "lease-1-2-aaaaaaaaaaaa.json").write_text(content)
    assert client.lease(Ask(tiles=(0,)), wait=0).tiles == [0]


def test_what_others_wrote_does_not_reach_the_terminal(run_folder: Path) -> None:
    lease = client.lease(Ask(tiles=(0,)), command="[/x] \x1b]0;PWNED\x07\x1b[2J\n/XRDU_9/RDU_9/TILE_9 \udcff", label="\x1b[31m")
    tools = [["sambaflow.tools.sntilestat"], ["tilework.cli.main", "tiles"], ["tilework.cli.main", "top", "--once"]]
    for words in tools:
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        assert done.returncode == 0 and "\x1b" not in done.stdout and "\n/XRDU_9" not in done.stdout, done
    lease.release()


def test_drained_tiles_and_a_large_request_keep_nobody_waiting(run_folder: Path) -> None:
    path = client.view().tiles[1].path
    with client.talking() as say:
        say(messages.Drain(path, True))
    greedy = client.connect().sock
    page = ask(greedy, (0, 1), wait=1e9)
    assert b"waiting" in greedy.recv(65536)
    assert client.lease(Ask(tiles=(0,)), wait=2).tiles == [0]
    with pytest.raises(UserError, match="1 drained"):
        client.lease(Ask(tiles=(1,)), wait=0)
    # Another platform would give the same core another name.
    with client.talking() as say:
        assert say(messages.Look(platform="SN10-8"))["platform"] == "host"
    greedy.close()
    os.close(page)


def test_a_daemon_that_is_stopped(run_folder: Path, monkeypatch) -> None:
    """Clients say so after a while; a process that ends is not held up."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 1.0)
    lease = client.lease(Ask(tiles=(0,)))
    pid = daemon_pid(run_folder)
    os.kill(pid, signal.SIGSTOP)
    try:
        for question in (client.view, lambda: client.lease(Ask(tiles=(1,)), wait=1)):
            with pytest.raises(MachineError, match="does not answer"):
                question()
        lease.release()
    finally:
        os.kill(pid, signal.SIGCONT)
    leases_when(lambda found: not found)


def test_a_fork_of_a_holder(run_folder: Path) -> None:
    """The child takes and gives back a lease of its own; the parent's pinning and lease stay as they are."""
    before = os.sched_getaffinity(0)
    lease = holding.hold("tiles:0").lease
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            own = holding.hold("tiles:1", lambda _: None)
            pinned = sorted(os.sched_getaffinity(0)) == own.lease.cpus
            holding.let_go(own)
            os.write(write, json.dumps([own.lease.tiles, pinned, os.sched_getaffinity(0) == before]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert json.loads(os.read(read, 1000)) == [[1], True, True]
    os.close(read)
    assert os.sched_getaffinity(0) == set(lease.cpus) and [x.pid for x in client.view().leases] == [HERE]
    assert holding.let_go(holding._held) and os.sched_getaffinity(0) == before


def test_threads_that_started_under_a_lease_are_free_afterwards(run_folder: Path) -> None:
    import threading

    before, end = os.sched_getaffinity(0), threading.Event()
    lease = holding.hold("tiles:0")
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert os.sched_getaffinity(thread.native_id) == set(lease.lease.cpus)
    holding.let_go(lease)
    assert os.sched_getaffinity(thread.native_id) == before
    end.set()
    thread.join()


@pytest.mark.parametrize("text", ["0-99999999999", "7-3", "5000000", "0-5000", "chips:99999999"])
def test_wild_wishes(run_folder: Path, text: str) -> None:
    try:
        lease = client.lease(text, wait=0)
        assert lease.note
        lease.release()
    except TileworkError as e:
        assert e.id == "tiles-ask"


def test_a_site_file_that_is_wrong_is_named(run_folder: Path, tmp_path: Path, monkeypatch) -> None:
    site = tmp_path / "site.toml"
    site.write_text("[limits]\nhung = 1\n")
    monkeypatch.setenv("TILEWORK_SITE", str(site))
    with pytest.raises(MachineError, match=r"site\.toml:2: .*unknown field"):
        client.view()


def descriptors(pid: int | str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_nothing_piles_up(run_folder: Path) -> None:
    """Leases, refusals and time-outs, hundreds of them: neither side keeps a descriptor."""
    client.view()
    pid = client.view().daemon.pid
    before = descriptors("self"), descriptors(pid)
    for _ in range(200):
        lease = client.lease(Ask(tiles=(0,)))
        with pytest.raises(UserError, match="tiles-timeout"):
            client.lease(Ask(tiles=(0,)), wait=0)
        lease.release()
    with pytest.raises(UserError):
        client.lease("nonsense", wait=0)
    greedy, mine = client.connect().sock, client.lease(Ask(tiles=(0,)))
    for _ in range(10):  # the same connection asks again and again
        page = ask(greedy, (0,), wait=0.0)
        while b"timeout" not in greedy.recv(65536):
            pass
        os.close(page)
    assert descriptors(pid) < before[1] + 15
    greedy.close()
    mine.release()
    del mine, lease
    client.view()
    assert descriptors("self") <= before[0] + 4 and descriptors(pid) <= before[1] + 4


def test_many_sessions_have_slots_of_their_own() -> None:
    from tilework.tiles.page import EXEC, IDLE, NUM_SLOTS, Page

    page = Page()
    slots = [page.slot() for _ in range(NUM_SLOTS + 10)]
    for slot in slots:
        slot.enter(EXEC)
    for slot in slots:
        slot.enter(IDLE)
    assert page.read().state == IDLE and page.read().stuck == 0
    page.close()


def test_waiting_is_not_idling(run_folder: Path, holder) -> None:
    mine = client.lease(Ask(tiles=(0,)))
    other = holder("tiles:0")
    leases_when(lambda _: len(client.view().queue) == 1)
    time.sleep(1.2)
    mine.release()
    other.stdout.readline()
    assert client.view().leases[0].seconds["idle"] < 1.0


def test_a_fork_leaves_the_page_alone(run_folder: Path) -> None:
    lease = holding.hold("tiles:0")
    slot = lease.page.slot()
    slot.set_bytes(7)
    slot.add_steps(3)
    child = os.fork()
    if not child:
        slot.add_steps(100)
        slot.enter(1)
        slot.close()
        os._exit(0)
    os.waitpid(child, 0)
    found = lease.page.read()
    assert (found.steps, found.num_bytes, found.state) == (3, 7, 0)
    holding.let_go(lease)


def test_a_platform_is_not_inherited(run_folder: Path) -> None:
    client.lease(Ask(count=1), platform="SN30-8").release()
    assert client.view().platform == "host" and client.lease(Ask(count=1)).paths[0].endswith("/tile_0")
    assert client.view().platform == "host"


def test_drained_tiles_keep_their_platform(run_folder: Path) -> None:
    lease = client.lease(Ask(count=1), platform="SN30-8")
    path = "/XRDU_3/RDU_1/TILE_3"
    with client.talking() as say:
        say(messages.Drain(path, True, "fan"))
    lease.release()
    kill_daemon(run_folder)
    seen = client.view()
    assert seen.platform == "SN30-8" and [t.path for t in seen.tiles if t.drained] == [path]


def test_ranks_of_one_node_fit_beside_each_other(run_folder: Path, holder) -> None:
    several = len(client.view().tiles) > 1
    if not several:
        pytest.skip("needs two tiles")
    ranks = [holder("share:2", LOCAL_WORLD_SIZE="2") for _ in range(2)]
    assert all(rank.stdout.readline().strip() for rank in ranks)
    assert len(client.view().leases) == 2


def test_the_socket_is_put_back(run_folder: Path) -> None:
    """Whether somebody removed it, or has another one under its name."""
    pid = client.view().daemon.pid
    (run_folder / "daemon.sock").unlink()
    assert client.view().daemon.pid == pid
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        (run_folder / "daemon.sock").unlink()
        other.bind(str(run_folder / "daemon.sock"))
        assert client.view().daemon.pid == pid


def test_long_requests_and_long_answers(run_folder: Path, tmp_path: Path, monkeypatch) -> None:
    site = tmp_path / "site.toml"
    site.write_text('platform = "big"\n[shape]\ntitle = "big"\nboards = 16\nchips = 8\ntiles = 8\n')
    monkeypatch.setenv("TILEWORK_SITE", str(site))
    lease = client.lease(",".join(map(str, range(1024))), wait=0)
    seen = client.view()
    assert len(lease.tiles) == 1024 and len(msgspec.json.encode(seen)) > messages.LARGEST_REPLY and len(seen.tiles) == 1024
    with pytest.raises(UserError, match="at most 32768 bytes"):
        client.lease("tiles:" + "1," * 20_000 + "1", wait=0)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user can be had by root alone")


@needs_root
def test_another_user_cannot_stand_in_the_way(service, run_folder: Path) -> None:
    """Nothing in the service's folder can be opened but its socket; nor can anything be put there."""
    client.lease(Ask(tiles=(0,)))
    python, env = python_for_all()
    code = """
import glob, os, sys
for path in glob.glob(sys.argv[1] + "/*") + [sys.argv[1] + "/mine"]:
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        try:
            os.open(path, flags)
            print("opened", os.path.basename(path))
        except OSError:
            pass
"""
    done = subprocess.run([python, "-c", code, str(run_folder)], user=65534, group=65534, extra_groups=[], text=True, env=env,
                          capture_output=True)  # fmt: skip
    assert done.stdout == done.stderr == "" and done.returncode == 0, done


@needs_root
def test_another_user_cannot_pretend(service, run_folder: Path) -> None:
    """A page of another process, or a file that only root may read, is nobody's page; many processes that share are too many."""
    mine = client.lease(Ask(tiles=(0,)))
    python, env = python_for_all()
    code = """
import os, resource, sys
from tilework.tiles import client, messages
from tilework.errors import TileworkError
for number in (int(sys.argv[2]), os.open("/etc/hostname", os.O_RDONLY), -1):
    connection = client.connect()
    connection.send(messages.LeaseRequest("tiles:1", page=number))
    print(messages.loads(connection.receive()).get("id"))
page, stack = client.files()
for _ in range(3):  # the same page is one process
    client.share(page, stack, command="x")
print(len(client.view().shared), client.view().shared[0].user)
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
many = [client.files() for _ in range(520)]
for files in many:
    client.share(*files, command="many")
print(len(client.view().shared))
"""
    done = subprocess.run([python, "-c", code, str(run_folder), str(mine.page.fd)], user=65534, group=65534, extra_groups=[],
                          text=True, env=env, capture_output=True)  # fmt: skip
    assert done.stdout.splitlines() == ["tiles-protocol"] * 3 + ["1 nobody", "512"], done
    assert client.view().shared == [] and [x.pid for x in client.view().leases] == [HERE]


@needs_root
def test_a_flood_of_requests_from_another_user(service) -> None:
    """Many connections that ask for views all the time: others still get leases."""
    client.view()
    python, env = python_for_all()
    code = """
import time
from tilework.tiles import client, messages
connections = [client.connect().sock for _ in range(100)]
print("ready", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    for c in connections:
        try:
            c.send(messages.encode(messages.Look()))
            c.recv(200000)
        except OSError:
            pass
"""
    flood = subprocess.Popen(
        [python, "-c", code], user=65534, group=65534, extra_groups=[], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        assert flood.stdout.readline() == "ready\n"
        for _ in range(10):
            client.lease(Ask(tiles=(0,)), wait=5).release()
        assert flood.poll() is None
    finally:
        flood.kill()
        flood.wait()


def test_locks_are_what_they_seem(tmp_path: Path) -> None:
    path = tmp_path / "x"
    own = os.open(path, os.O_RDWR | os.O_CREAT)
    child = os.fork()
    if not child:
        alive.lock(os.open(path, os.O_RDWR))
        time.sleep(30)
        os._exit(0)
    try:
        until = time.monotonic() + 5
        while alive.holder(own) is None and time.monotonic() < until:
            time.sleep(0.01)
        assert alive.holder(own) == child
        with pytest.raises(OSError):
            alive.lock(own)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert alive.holder(own) is None
    os.close(own)
