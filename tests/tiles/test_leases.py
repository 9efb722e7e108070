"""Leases with a real daemon and real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import daemon_pid, kill_daemon, leases_when, python_for_all

from tilework.errors import MachineError, UserError
from tilework.tiles import alive, client, holding, messages, place, records
from tilework.tiles.asks import Ask
from tilework.tiles.page import EXEC, IDLE
from tilework.tiles.records import Record
from tilework.tiles.store import Store

HERE = os.getpid()


def tiles_of(process: subprocess.Popen) -> list[int]:
    return [int(t) for t in process.stdout.readline().split()]


def test_a_lease_is_exclusive(run_folder: Path) -> None:
    lease = client.lease(Ask(tiles=(0,)))
    assert lease.tiles == [0] and lease.cpus and lease.num_cores == 1
    with pytest.raises(UserError) as e:
        client.lease(Ask(tiles=(0,)), wait=0)
    assert e.value.id == "tiles-timeout" and f"pid {HERE}" in str(e.value)
    lease.release()
    client.lease(Ask(tiles=(0,)), wait=0).release()
    assert client.view().leases == []


def test_the_next_in_line_gets_it(run_folder: Path, holder) -> None:
    lease = client.lease(Ask(tiles=(0,)))
    waiting = holder("tiles:0")
    leases_when(lambda _: len(client.view().queue) == 1)
    lease.release()
    assert tiles_of(waiting) == [0]
    assert leases_when(lambda found: len(found) == 1)[0].pid == waiting.pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_lease_ends_with_its_process(run_folder: Path, holder, how) -> None:
    process = holder("tiles:0")
    assert tiles_of(process) == [0]
    process.send_signal(how)
    leases_when(lambda found: not found)
    assert not list(run_folder.glob("lease-*"))


def test_children_do_not_keep_it(run_folder: Path) -> None:
    """The holder is killed; a child of it, as of a data loader, lives on."""
    code = ("import os, time\nfrom tilework.tiles import holding\nlease = holding.hold('tiles:0')\n"
            "child = os.fork()\nif not child:\n    time.sleep(30)\n    os._exit(0)\n"
            "print(child, flush=True)\ntime.sleep(30)\n")  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        assert len(client.view().leases) == 1
        process.kill()
        process.wait()
        leases_when(lambda found: not found)
        os.kill(child, 0)  # it does live on
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_leaves_leases_alone(run_folder: Path, holder, how) -> None:
    process = holder("tiles:0")
    assert tiles_of(process) == [0]
    old = daemon_pid(run_folder)
    kill_daemon(run_folder, how)
    with pytest.raises(UserError, match=f"pid {process.pid}"):
        client.lease(Ask(tiles=(0,)), wait=0)  # starts a new daemon, which knows
    assert daemon_pid(run_folder) != old
    found = client.view().leases
    assert [lease.pid for lease in found] == [process.pid] and found[0].held_seconds >= 0
    process.stdin.write("\n")
    process.stdin.flush()  # it releases at a daemon that did not grant it
    leases_when(lambda leases: not leases)


def test_a_process_that_ended_while_there_was_no_daemon(run_folder: Path, holder) -> None:
    process = holder("tiles:0")
    tiles_of(process)
    kill_daemon(run_folder)
    process.kill()
    process.wait()
    assert client.lease(Ask(tiles=(0,)), wait=0).tiles == [0]


def test_a_reused_pid_holds_nothing(run_folder: Path) -> None:
    """A record of a process that is alive, but started at another time; and what a daemon left when it died."""
    client.view()
    kill_daemon(run_folder)
    old = Record("aaaaaaaaaaaa", "exclusive", os.getuid(), HERE, 1, 0.0, (0,), "host", cpus=(0,))
    records.write(run_folder, old)
    (run_folder / "lease-1-1-cccccccccccc.part").write_bytes(b"")
    assert client.lease(Ask(tiles=(0,)), wait=0).tiles == [0]
    assert len(list(run_folder.glob("lease-*"))) == 1, "cleared away"


def test_what_was_released_while_there_was_no_daemon(run_folder: Path) -> None:
    """And the number of its page is another page's by now."""
    lease = client.lease(Ask(tiles=(0,)))
    kill_daemon(run_folder)
    number = lease.page.fd
    lease.release()
    page, stack = client.files()
    assert page.fd == number
    assert client.lease(Ask(tiles=(0,)), wait=0).tiles == [0] and len(client.view().leases) == 1
    page.close()
    os.close(stack)


def test_a_daemon_that_dies_while_somebody_waits(run_folder: Path, holder) -> None:
    first, second = holder("tiles:0"), None
    tiles_of(first)
    second = holder("tiles:0")
    leases_when(lambda _: len(client.view().queue) == 1)
    kill_daemon(run_folder)
    leases_when(lambda _: len(client.view().queue) == 1)  # it asks again, at the new daemon
    first.stdin.write("\n")
    first.stdin.flush()
    assert tiles_of(second) == [0]


def test_many_start_the_daemon_at_once(run_folder: Path, holder) -> None:
    processes = [holder("tiles:1") for _ in range(4)]
    done = set()
    deadline = time.monotonic() + 30
    while len(done) < 4 and time.monotonic() < deadline:
        for lease in leases_when(lambda found: bool(found) or len(done) == 4):
            process = next(p for p in processes if p.pid == lease.pid)
            if process.pid not in done:
                done.add(process.pid)
                process.stdin.write("\n")
                process.stdin.flush()
    assert len(done) == 4
    ours = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"tilework.tiles.service" in (process / "cmdline").read_bytes():
                ours += [process.name] * (str(run_folder).encode() in (process / "environ").read_bytes())
    assert len(ours) == 1


def test_a_full_disk(run_folder: Path) -> None:
    """No room for a lease's files: refused with the reason, and nothing is held. There is room again: it works."""
    if os.geteuid():
        pytest.skip("a small file system can be mounted by root alone")
    run_folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1536k,mode=0755", "tmpfs", str(run_folder)]
    mounted = subprocess.run(words, capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        client.view()
        filler = os.open(run_folder / "filler", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while True:
                os.write(filler, bytes(4096))
        os.close(filler)
        with pytest.raises(MachineError) as e:
            client.lease(Ask(tiles=(0,)), wait=0)
        assert "No space left" in str(e.value) and client.view().leases == []
        (run_folder / "filler").unlink()
        assert client.lease(Ask(tiles=(0,)), wait=0).tiles == [0]
        kill_daemon(run_folder)
    finally:
        subprocess.run(["umount", "-l", str(run_folder)])


def test_history_on_a_full_disk_costs_nothing_but_history(tmp_path: Path) -> None:
    store = Store(tmp_path / "no" / "such" / "folder.db")
    assert store.trouble and store.drained() == ("", {}) and store.history(10) == []


# ---- who may do what ----


def as_nobody(code: str, *words: str) -> subprocess.CompletedProcess:
    python, env = python_for_all()
    return subprocess.run([python, "-c", code, *words], text=True, capture_output=True, timeout=60, user=65534, group=65534,
                          extra_groups=[], env=env)  # fmt: skip


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user can be had by root alone")


@needs_root
def test_another_user_cannot_touch_a_lease(service) -> None:
    lease = client.lease(Ask(tiles=(0,)))
    code = """
import sys
from tilework.tiles import client, messages
from tilework.tiles.asks import Ask
from tilework.tiles.reset import reset
from tilework.errors import UserError
def refused(what):
    try:
        what()
    except UserError as e:
        print(e.id)
with client.talking() as ask:
    refused(lambda: ask(messages.Release(sys.argv[1])))
    refused(lambda: ask(messages.Drain("/", True)))
    refused(lambda: ask(messages.Stop()))
refused(lambda: client.lease(Ask(tiles=(0,)), wait=0))
refused(lambda: reset(client.view(), client.view().tiles[0].path))
"""
    done = as_nobody(code, lease.id)
    assert done.stdout.split() == ["tiles-lease", "tiles-permission", "tiles-permission", "tiles-timeout", "tiles-permission"], (
        done
    )
    assert [x.id for x in client.view().leases] == [lease.id]


@needs_root
def test_one_users_daemon_is_nobody_elses(run_folder: Path, open_folder: Path) -> None:
    """Neither is it talked to, nor is a folder used that others can write to."""
    client.view()  # root's own: nobody else may connect
    code = "from tilework.tiles import client\ntry:\n    client.view()\nexcept Exception as e:\n    print(e.id, e.found)"
    assert as_nobody(code).stdout.startswith("tiles-daemon nothing answers")
    theirs = open_folder / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    link, loose = open_folder / "link", open_folder / "loose"
    link.symlink_to(run_folder)
    loose.mkdir()
    loose.chmod(0o777)
    for folder, why in ((theirs, "it belongs to user 65534"), (link, "not a folder"), (loose, "others can write there")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TILEWORK_RUN", str(folder))
            with pytest.raises(MachineError, match="yours alone") as e:
                client.view()
        assert e.value.id == "tiles-folder" and why in e.value.found


def test_the_place_without_a_variable(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_RUN", raising=False)
    monkeypatch.setattr(place, "INSTALLED", open_folder / "installed")
    monkeypatch.setattr(place, "COMMON", open_folder)
    runtime, other = open_folder / "runtime", open_folder / "other"
    for folder, mode in ((runtime, 0o700), (other, 0o755)):
        folder.mkdir()
        folder.chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert place.run_folder() == runtime / "tilework" and (runtime / "tilework").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))  # others can look in there: not a runtime folder
    own = open_folder / f"tilework-{os.getuid()}"
    if not Path(f"/run/user/{os.getuid()}").exists():
        assert place.run_folder() == own and own.stat().st_mode & 0o777 == 0o700
        # A batch job without the variable was here first: whoever has it finds the same daemon.
        (own / place.SOCKET).touch()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        assert place.run_folder() == own
        own.chmod(0o755)  # what others could have made is not looked at
        assert place.run_folder() == runtime / "tilework"
    (open_folder / "installed").mkdir()
    (open_folder / "installed" / place.SOCKET).touch()
    assert place.run_folder() == open_folder / "installed" and place.is_service(place.run_folder())


@needs_root
def test_without_root_everything_works_for_one_user(run_folder: Path, open_folder: Path) -> None:
    """A daemon, a lease, the tools, draining and a reset, all as a plain user."""
    own = open_folder / "own"
    own.mkdir()
    os.chown(own, 65534, 65534)
    code = """
import os, subprocess, sys
from tilework.tiles import client, holding, messages
from tilework.tiles.reset import reset
child = subprocess.Popen([sys.executable, "-c", "from tilework.tiles import holding; import time; holding.hold('tiles:1'); "
                          "print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
child.stdout.readline()
lease = holding.hold("tiles:0").lease
seen = client.view()
print(seen.daemon.user, len(seen.leases), sorted(os.sched_getaffinity(0)) == lease.cpus)
with client.talking() as ask:
    ask(messages.Drain(seen.tiles[1].path, True, "mine"))
print(reset(client.view(), seen.tiles[1].path)[0]["pid"] == child.pid)
from sambaflow.tools import sntilestat, snconfig
sys.exit(sntilestat.main(["--skip-idle"]) or snconfig.main(["show", "Node", "dynamic"]))
"""
    python, env = python_for_all()
    done = subprocess.run([python, "-c", code], text=True, capture_output=True, timeout=60, user=65534, group=65534,
                          extra_groups=[], env={**env, "TILEWORK_RUN": str(own / "run")})  # fmt: skip
    try:
        assert done.stdout.splitlines()[:2] == ["nobody 2 True", "True"] and done.returncode == 0, done
        assert "nobody python" in done.stdout and "(TILE_1 drained: mine)" in done.stdout
    finally:
        kill_daemon(own / "run")


# ---- clients that misbehave ----


def raw(folder: Path) -> socket.socket:
    client.view()
    return client.connect().sock


@pytest.mark.parametrize(
    "packet",
    [b"", b"\xff" * 100, b"{", b"[]", b'{"type":"lease"}', b'{"type":"nonsense"}', b'{"type":"view","window":"x"}',
     b'{"type":"lease","ask":{"count":"many"}}', b'{"type":"share","more":1}', b"[" * 5000, b'{"type":"share"}',
     b'{"type":"share","page":-1}', b'{"type":"share","page":99999999999999999999}', b'{"type":"lease","cpus":"9-1"}',
     b'{"type":"lease","ask":{"count":-1}}', b'{"type":"lease","ask":{"tiles":[]}}', b'{"type":"drain","path":7}',
     b'{"type":"view","window":1e400}'],
)  # fmt: skip
def test_malformed_packets(run_folder: Path, packet: bytes) -> None:
    connection = raw(run_folder)
    connection.settimeout(0.5)  # a session that only wants to be seen gets no answer
    with contextlib.suppress(OSError):
        connection.send(packet or b"\0")
        reply = connection.recv(65536)
        if reply:
            assert b"refused" in reply or b"waiting" in reply or b"timeout" in reply, reply
    connection.close()
    assert client.view().leases == [], "the daemon goes on"


def test_an_oversized_packet_ends_the_connection(run_folder: Path) -> None:
    connection = raw(run_folder)
    connection.send(b'{"type":"lease","ask":{},"command":"' + b"x" * 60_000 + b'"}')
    assert b"at most" in connection.recv(65536) and connection.recv(65536) == b""
    assert client.view().leases == []


def test_a_page_that_is_not_locked(run_folder: Path) -> None:
    """A lock is what says that a process is there; whoever has none gets nothing."""
    connection = raw(run_folder)
    memory = os.memfd_create("page")
    connection.send(messages.encode(messages.LeaseRequest(ask=Ask(tiles=(0,)), page=memory)))
    assert b"cannot see a page" in connection.recv(65536)
    alive.lock(memory)
    connection.send(messages.encode(messages.LeaseRequest(ask=Ask(tiles=(0,)), page=memory)))
    assert messages.loads(connection.recv(65536))["state"] == "granted" and len(client.view().leases) == 1
    os.close(memory)
    assert client.view().leases == []


def test_a_client_that_does_not_read(run_folder: Path) -> None:
    """Its socket fills up; it is cut off, and nobody else waits for it."""
    connection = raw(run_folder)
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        for _ in range(5000):
            connection.send(messages.encode(messages.Look()))
    assert client.view().leases == []
    connection.close()


# ---- administration ----


def test_drained_tiles_are_given_to_nobody(run_folder: Path, holder) -> None:
    process = holder("tiles:0")
    tiles_of(process)
    path = client.view().tiles[0].path
    with client.talking() as ask:
        assert ask(messages.Drain(path, True, "fan"))["tiles"] == [path]
    seen = client.view()
    assert seen.tiles[0].drained == "fan" and seen.leases[0].pid == process.pid, "who holds it keeps it"
    process.kill()
    process.wait()
    leases_when(lambda found: not found)
    kill_daemon(run_folder)  # drained tiles outlive the daemon
    with pytest.raises(UserError, match="1 drained"):
        client.lease(Ask(tiles=(0,)), wait=0)
    with client.talking() as ask:
        ask(messages.Drain(path, False))
    assert client.lease(Ask(tiles=(0,)), wait=0).tiles == [0]


def test_reset_ends_the_holder(run_folder: Path, holder) -> None:
    from tilework.tiles.reset import reset

    process = holder("tiles:0")
    tiles_of(process)
    seen = client.view()
    assert reset(seen, seen.tiles[0].path)[0]["pid"] == process.pid
    assert process.wait(5) == -signal.SIGTERM
    leases_when(lambda found: not found)
    assert reset(seen, seen.tiles[0].path)[0]["signal"] is None, "a process that has ended"
    with pytest.raises(UserError, match="nobody runs"):
        reset(client.view(), seen.tiles[0].path)


def test_the_processs_lease_is_shared_and_pins(run_folder: Path, monkeypatch) -> None:
    before = os.sched_getaffinity(0)
    said: list[str] = []
    held = holding.hold("tiles:0", said.append)
    assert holding.hold("5", said.append) is held and os.sched_getaffinity(0) == set(held.lease.cpus)
    assert not holding.let_go(held) and os.sched_getaffinity(0) == set(held.lease.cpus)
    assert holding.let_go(held) and os.sched_getaffinity(0) == before
    capped = holding.hold("4096", said.append)
    assert any("4096 tiles asked for; this node has" in line for line in said) and len(capped.lease.tiles) < 4096
    holding.let_go(capped)
    monkeypatch.setenv("TILEWORK_WAIT", "soon")
    with pytest.raises(UserError, match="TILEWORK_WAIT"):
        holding.hold("1")
    assert client.view().leases == client.view().shared == []


def test_the_platform_follows_the_first_asker(run_folder: Path) -> None:
    assert len(client.view(platform="SN30-8").tiles) == 64
    assert client.view().platform == "host", "looking changes nothing"
    lease = client.lease(Ask(tiles=(63,)), platform="SN30-8")
    assert lease.paths == ["/XRDU_3/RDU_1/TILE_7"]
    other = client.lease(Ask(count=1), platform="host")
    assert "platform host asked for; this machine's tiles are SN30-8 (in use)" in other.note
    kill_daemon(run_folder)
    assert client.view().platform == "SN30-8", "leases say what the tiles are"
    lease.release()
    other.release()
    leases_when(lambda found: not found)
    assert client.lease(Ask(count=1), platform="host").note == ""
    assert client.view().platform == "host"


def test_metrics(run_folder: Path) -> None:
    """As Prometheus' own parser reads them: counters are counters and only grow, and no label has a value for each lease."""
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, dict[tuple, float]]:
        with client.talking() as ask:
            text = ask(messages.Metrics())["text"]
        families = list(text_string_to_metric_families(text))
        assert {f.type for f in families} == {"gauge", "counter"} and all(f.documentation for f in families)
        for family in families:
            assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples)
        return {
            f.name + ("_total" if f.type == "counter" else ""): {tuple(sorted(s.labels.items())): s.value for s in f.samples}
            for f in families
        }

    page, stack = client.files()
    client.share(page, stack, command="shared")
    lease = client.lease(Ask(tiles=(0,)), command="exclusive", label="mine")
    slot = lease.page.slot()
    slot.enter(EXEC)
    slot.add_steps(7)
    tile = ("tile", lease.paths[0])
    first = read()
    states = first["tilework_tile_state"]
    assert states[("state", "held"), tile] == 1 and states[("state", "free"), tile] == 0
    assert first["tilework_leases"] == {(("kind", "exclusive"),): 1, (("kind", "job"),): 0, (("kind", "shared"),): 1}
    assert first["tilework_steps_total"][(("kind", "exclusive"),)] == 7
    assert first["tilework_tile_idle_seconds"] == {(tile,): 0.0}
    time.sleep(1.2)  # the daemon shows the same for a second
    slot.enter(IDLE)
    lease.release()
    page.close()
    os.close(stack)
    time.sleep(0.1)
    last = read()
    for name, samples in first.items():
        if name.endswith("_total"):
            assert all(last[name][labels] >= value for labels, value in samples.items()), name
    spent = last["tilework_tile_activity_seconds_total"]
    assert spent[("activity", "exec"), tile] > 1.0, "also of a lease that has ended"
    assert last["tilework_leases_ended_total"][(("kind", "exclusive"),)] == 1 and last["tilework_tile_idle_seconds"] == {}
    labels = {k for samples in last.values() for key in samples for k, _ in key}
    assert labels <= {"tile", "state", "activity", "kind", "user"}


def test_held_but_idle(run_folder: Path) -> None:
    from tilework.tiles import describe

    lease = client.lease(Ask(tiles=(0,)))
    seen = client.view().leases[0]
    for idle, hung, drained, state in ((0.0, False, None, "held"), (10.0, False, None, "held-idle"), (10.0, True, None, "hung"),
                                       (0.0, False, "fan", "draining"), (0.0, True, "fan", "hung")):  # fmt: skip
        seen.idle_seconds, seen.hung = idle, hung
        assert describe._state(seen, drained) == state
    assert describe._state(None, None) == "free" and describe._state(None, "") == "drained"
    lease.release()


def test_the_listener(run_folder: Path, tmp_path: Path) -> None:
    import urllib.error
    import urllib.request

    from tilework.tiles.endpoint import listen

    lease = client.lease(Ask(tiles=(0,)))
    (tmp_path / "token").write_text("0123456789abcdef")
    server = listen("127.0.0.1:0", str(tmp_path / "token"))
    place = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(place + "/metrics", headers=headers))
        right = {"Authorization": "Bearer 0123456789abcdef"}
        body = urllib.request.urlopen(urllib.request.Request(place + "/metrics", headers=right)).read().decode()
        assert "tilework_tile_state" in body
        tiles = json.load(urllib.request.urlopen(urllib.request.Request(place + "/tiles", headers=right)))
        assert tiles["leases"][0]["id"] == lease.id and tiles["tiles"][0]["state"] == "held"
    finally:
        server.shutdown()
    for address, token in (("nowhere", "token"), ("127.0.0.1:0", "none")):
        with pytest.raises(UserError):
            listen(address, str(tmp_path / token))
    with pytest.raises(UserError, match="needs a token"):
        listen("127.0.0.1:0", None)
