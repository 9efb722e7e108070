"""Tiles kept under a name: who runs on them, who may not, and when they are free again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import kill_daemon, leases_when

from tilework.errors import UserError
from tilework.tiles import client
from tilework.tiles.asks import is_name, named
from tilework.tiles.keep import keep, kept, let_go

HOLDS = """
import sys
from tilework.errors import TileworkError
from tilework.tiles import holding
try:
    held = holding.hold(sys.argv[1], lambda _: None)
    print(*held.lease.tiles, flush=True)
    sys.stdin.read()
except TileworkError as e:
    print(e.id, flush=True)
"""


def holds(ask: str) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS, ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def test_programs_run_on_the_tiles(run_folder: Path) -> None:
    keep("mine", "1")
    try:
        lease = kept("mine")
        assert lease is not None and lease.kind == "job" and len(lease.tiles) == 1 and lease.label == "mine"
        process, said = holds("of:mine")
        assert said == " ".join(map(str, lease.tiles))
        with pytest.raises(UserError, match="kept under the name mine already"):
            keep("mine", "1")
        with pytest.raises(UserError, match="did not become free"):
            client.lease(f"tiles:{lease.tiles[0]}", wait=0.0)
        kill_daemon(run_folder)  # the next one finds the tiles kept, and who runs on them
        other, said = holds("of:mine")
        assert said == " ".join(map(str, lease.tiles))
        for each in (process, other):
            each.communicate("")
    finally:
        let_go("mine")
    assert leases_when(lambda leases: not leases) == []
    assert kept("mine") is None


def test_names_that_nobody_keeps(run_folder: Path) -> None:
    assert kept("mine") is None
    process, said = holds("of:mine")
    process.communicate("")
    assert said == "tiles-job"
    with pytest.raises(UserError, match="no tiles are kept under the name mine"):
        let_go("mine")


def test_what_is_not_free_is_not_waited_for(run_folder: Path) -> None:
    held = client.lease("all")
    try:
        with pytest.raises(UserError, match="did not become free") as caught:
            keep("mine", "1")
        assert str(os.getpid()) in str(caught.value)
    finally:
        held.release()


@pytest.mark.parametrize(("text", "name"), [
    ("of:mine", "mine"), ("of:a.b-c_1", "a.b-c_1"), ("of:12", ""), ("of:", ""), ("of:a b", ""), ("of:../x", ""), ("job:4", ""),
    ("of:" + "a" * 41, ""), ("4", ""),
])  # fmt: skip
def test_names(text: str, name: str) -> None:
    assert named(text) == name and is_name(name) == bool(name)
