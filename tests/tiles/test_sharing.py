"""Sessions that ask for no tiles: they start at once, take nothing from anybody, and are shown. And CPU masks, with real
processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from daemons import kill_daemon, leases_when
from torch import nn

import tilework
from sambaflow.samba.affinity import tiles_asked
from tilework.errors import UserError
from tilework.tiles import client, holding, messages
from tilework.tiles.asks import Ask
from tilework.tiles.view import SessionView

CPUS = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(CPUS) < 2, reason="needs two cores")

TRAIN = """
import os, sys, time, torch, tilework
session = tilework.load(sys.argv[1])
x, y = torch.randn(8, 16), torch.randn(8, 4)
count = 0
while count < int(sys.argv[2]):
    session.run(x, y)
    count += 1
    if count == 1:
        print("began", sorted(os.sched_getaffinity(0)), flush=True)
print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    path = tmp_path_factory.mktemp("sharing") / "m.pef"
    step = tilework.Step(model=model, inputs=(torch.randn(8, 16),), targets=(torch.randn(8, 4),), loss=nn.MSELoss(),
                         optimizer=torch.optim.SGD(model.parameters(), 1e-3))  # fmt: skip
    tilework.compile(step, path, weights="inside", options=tilework.Options(device="reference"))
    return path


@pytest.fixture
def train(artifact: Path, run_folder: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """train(steps): a training script, without a word about tiles."""
    started: list[subprocess.Popen] = []

    def start(steps: int = 10**9, **env: str) -> subprocess.Popen:
        words = [sys.executable, "-c", TRAIN, str(artifact), str(steps)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, **env}))  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def shared_when(condition: Callable[[list[SessionView]], bool]) -> list[SessionView]:
    until = time.monotonic() + 20
    while not condition(found := client.view().shared):
        assert time.monotonic() < until, found
        time.sleep(0.02)
    return found


def test_two_training_scripts_at_once(train) -> None:
    """The second runs from beginning to end while the first one trains. Both are shown; neither is pinned."""
    first = train()
    assert first.stdout.readline() == f"began {CPUS}\n"
    second = train(50)
    assert second.stdout.readline() == f"began {CPUS}\n" and second.wait(60) == 0
    assert first.poll() is None and second.stderr.read() == ""
    third = train()
    third.stdout.readline()
    found = shared_when(lambda found: len(found) == 2 and all(x.steps for x in found))
    assert {x.pid for x in found} == {first.pid, third.pid} and client.view().leases == []
    assert all(x.command.startswith("python -c") and x.user and sum(x.shares.values()) == pytest.approx(100) for x in found)
    first.kill()
    first.wait()
    assert [x.pid for x in shared_when(lambda found: len(found) == 1)] == [third.pid]


def test_who_shares_takes_no_tile(train, holder) -> None:
    """Nor does it wait for one, where others hold all of them."""
    every = holder("all")
    every.stdout.readline()
    script = train()
    assert script.stdout.readline() == f"began {CPUS}\n"
    shared_when(lambda found: [x.pid for x in found] == [script.pid])
    every.stdin.write("\n")
    every.stdin.flush()
    leases_when(lambda found: not found)
    assert client.lease("all", wait=0).tiles == [t.index for t in detect_cpu_tiles()]


def detect_cpu_tiles() -> list:
    from tilework.tiles.topology import detect

    return [t for t in detect("host").tiles if t.gpu is None]


def test_a_daemon_that_is_killed_finds_it_again(train, run_folder: Path) -> None:
    script = train()
    script.stdout.readline()
    before = shared_when(lambda found: len(found) == 1)[0]
    for how in (signal.SIGKILL, signal.SIGTERM):
        kill_daemon(run_folder, how)
        assert script.poll() is None
        after = client.view().shared  # starts the next one
        assert [(x.id, x.pid, x.since) for x in after] == [(before.id, script.pid, before.since)]
    kill_daemon(run_folder)
    script.kill()
    script.wait()
    assert client.view().shared == [] and not list(run_folder.glob("lease-*"))


def test_its_end_is_seen_without_a_word(run_folder: Path) -> None:
    held = holding.hold()
    assert [x.pid for x in shared_when(bool)] == [os.getpid()]
    kill_daemon(run_folder)
    assert holding.let_go(held)  # while no daemon runs
    assert client.view().shared == []


def test_it_does_not_wait_for_the_daemon(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts the daemon goes on before it is up: here it never is, until later."""
    asked: list[tuple] = []
    run = client._run
    monkeypatch.setattr(client, "_run", lambda folder, listener, said: asked.append((folder, os.dup(listener), os.dup(said))))
    held = holding.hold()
    assert len(asked) == 1
    monkeypatch.undo()
    monkeypatch.setenv("TILEWORK_RUN", str(run_folder))
    run(*asked[0])  # now it begins, and finds who was there before it
    for fd in asked[0][1:]:
        os.close(fd)
    assert [x.pid for x in shared_when(bool)] == [os.getpid()]
    holding.let_go(held)


@pytest.mark.parametrize("trouble", ["site", "folder", "no shell", "stopped"])
def test_no_daemon_is_no_reason_to_fail(train, run_folder: Path, tmp_path: Path, trouble: str) -> None:
    env, pid = {}, 0
    if trouble == "site":
        (tmp_path / "site.toml").write_text("nonsense")
        env = {"TILEWORK_SITE": str(tmp_path / "site.toml")}
    elif trouble == "folder":
        env = {"TILEWORK_RUN": "/proc/nothing/here"}
    elif trouble == "no shell":
        run_folder.mkdir(0o700)
        (run_folder / "start.lock").mkdir()
    else:
        pid = client.view().daemon.pid
        os.kill(pid, signal.SIGSTOP)
    try:
        script = train(20, **env)
        assert script.stdout.readline() == f"began {CPUS}\n" and script.wait(60) == 0 and script.stderr.read() == ""
    finally:
        if pid:
            os.kill(pid, signal.SIGCONT)


def test_tiles_can_be_asked_for_later(run_folder: Path, artifact: Path) -> None:
    """A process that shares, and then asks: one line in the table, and the times of its sessions go on."""
    first = tilework.load(artifact)
    shared_when(bool)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    first.run(x, y)
    second = tilework.load(artifact, tiles="tiles:0")
    view = client.view()
    assert view.shared == [] and [x.pid for x in view.leases] == [os.getpid()]
    assert view.leases[0].steps == 1 and os.sched_getaffinity(0) == set(view.tiles[0].cpus)
    second.run(x, y)
    leases_when(lambda found: found[0].steps == 2)
    second.close()
    assert len(client.view().leases) == 1, "as long as any session of the process is open"
    first.close()
    assert client.view().leases == client.view().shared == [] and sorted(os.sched_getaffinity(0)) == CPUS


def test_who_asks_and_is_refused_shares_nothing(run_folder: Path, artifact: Path) -> None:
    client.view()
    with pytest.raises(UserError, match="which tiles"):
        tilework.load(artifact, tiles="some")
    assert client.view().leases == client.view().shared == []


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "measure", "test"])
def test_every_verb_that_runs_takes_tiles(run_folder: Path, artifact: Path, verb: str) -> None:
    words = {"run": ["--steps", "2"], "measure": ["--seconds", "0.01"], "test": []}[verb]

    def ran(*more: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "tilework", verb, str(artifact), *words, *more], capture_output=True, text=True
        )
        assert done.returncode == 0, done
        with client.talking() as ask:
            return [x["tiles"] for x in ask(messages.History(9))["leases"] if x["tiles"]]

    assert ran("--tiles", "1") == ["0"]
    assert ran() == ["0"], "none without"


def test_frontends_whose_users_expect_tiles(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiles_asked(Namespace(), "none.pef") == "chips:1"
    assert tiles_asked(Namespace(num_tiles=3), "none.pef") == "3"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert tiles_asked(Namespace(), "none.pef") == "share:2"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    held = holding.hold(tiles_asked(Namespace(), "none.pef"), lambda _: None)
    assert len(client.view().leases) == 1
    holding.let_go(held)
    monkeypatch.setenv("TILEWORK_TILES", "shared")
    held = holding.hold(tiles_asked(Namespace(), "none.pef"))
    assert held.lease is None
    holding.let_go(held)


# ---- CPU masks ----

CONFINED = """
import os, sys
from tilework.errors import UserError
from tilework.tiles import client, holding
for text in sys.argv[1:]:
    try:
        held = holding.hold(text, lambda line: None)
        print(*held.lease.cpus, "on", *sorted(os.sched_getaffinity(0)), flush=True)
        holding.let_go(held)
    except UserError as e:
        print(e.id, "|", e.summary, "|", e.found, flush=True)
"""


def confined(cpus: str, *asks: str, **env: str) -> list[str]:
    words = ["taskset", "-c", cpus, sys.executable, "-c", CONFINED, *asks]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, **env})
    assert done.returncode == 0, done
    return done.stdout.splitlines()


@two_cores
def test_a_process_confined_to_one_cpu(run_folder: Path) -> None:
    """It gets the tile of that CPU; what can never lie there is refused at once, by name."""
    one = CPUS[1]
    tile = next(t.index for t in detect_cpu_tiles() if t.cpus == (one,))
    lines = confined(str(one), "1", f"tiles:{tile}", "chips:1", "2", "tiles:0", "all", "share:1")
    assert lines[:2] == [f"{one} on {one}"] * 2
    for line, what in zip(lines[2:5], ("1 chip", "2 tiles", "tile 0"), strict=True):
        assert line.startswith(f"tiles-mask | {what} cannot lie on the CPUs") and f"CPUs {one} (taskset" in line
    assert lines[5:] == [f"{one} on {one}"] * 2, "what is there"


@two_cores
def test_a_confined_process_beside_others(run_folder: Path, holder) -> None:
    """It waits for its own tile, and leaves others alone; who is not confined takes the rest."""
    one = CPUS[1]
    tile = next(t.index for t in detect_cpu_tiles() if t.cpus == (one,))
    mine = client.lease(Ask(tiles=(tile,)))
    assert confined(str(one), "1", TILEWORK_WAIT="0")[0].startswith("tiles-timeout")
    mine.release()
    assert confined(str(one), "1", TILEWORK_WAIT="0") == [f"{one} on {one}"]


@two_cores
def test_a_confined_process_on_virtual_tiles(run_folder: Path) -> None:
    """They share the cores in a fixed way: it gets those of its own core, and knows how many there are."""
    one = CPUS[1]
    own = [i for i, t in enumerate(client.view(platform="SN10-8").tiles) if t.cpus == (one,)]
    lines = confined(str(one), "4", "chips:1", str(len(own)), str(len(own) + 1), "tiles:0", TILEWORK_PLATFORM="SN10-8")
    assert lines[:3] == [f"{one} on {one}"] * 3
    assert all(line.startswith("tiles-mask") for line in lines[3:]) and f"tiles {own[0]}-{own[-1]}" in lines[3]


@two_cores
def test_the_default_of_a_frontend_fits_into_any_mask(run_folder: Path) -> None:
    """Half of the only chip is better than a refusal: nobody said that it must be a whole one."""
    one = str(CPUS[1])
    code = "from tilework.tiles import client; print(*client.lease().cpus)"
    done = subprocess.run(["taskset", "-c", one, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{one}\n", done
