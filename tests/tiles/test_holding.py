"""The lease of a process: ranks on a node, later wishes, and what goes wrong half-way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilework.errors import UserError
from tilework.parallel.environment import ranks_on_node
from tilework.runtime.leasing import Footing
from tilework.tiles import client, holding
from tilework.tiles.page import Page

RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "SLURM_NODEID", "SLURM_STEP_ID",
         "SLURM_STEPID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")  # fmt: skip


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"MPI_LOCALNRANKS": "5"}, 5),
        ({"PMI_LOCAL_SIZE": "6"}, 6),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x3),7", "SLURM_NODEID": "3"}, 7),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x999999999)", "SLURM_NODEID": "9999"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "1"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x", "SLURM_NODEID": "0"}, 1),
        ({"SLURM_TASKS_PER_NODE": "8"}, 1),  # a batch script, which may start 8 tasks and is none of them
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_STEP_ID": "0"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun under srun
    ],
    ids=str,
)
def test_ranks_on_this_node(environment: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_on_node() == ranks


def test_more_ranks_than_tiles(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is refused at once: some would hold tiles and wait for others that can have none."""
    tiles = len([t for t in client.view().tiles if t.gpu is None])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(tiles + 1))
    for asked in ("1", "all"):
        with pytest.raises(UserError, match="more ranks"):
            holding.hold(asked, lambda _: None)
    with pytest.raises(UserError) as e:
        holding.hold(holding.one_chip(), lambda _: None)
    assert e.value.id == "tiles-ranks" and f"{tiles + 1} ranks, {tiles} tiles" in str(e.value)
    assert client.view().leases == []
    monkeypatch.setenv("TILEWORK_PLATFORM", "SN10-8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    lease = holding.hold(holding.one_chip(), lambda _: None)
    assert len(lease.lease.tiles) == 1
    holding.let_go(lease)


def test_a_later_wish_is_told_that_it_has_no_effect(run_folder: Path) -> None:
    said: list[str] = []
    lease = holding.hold("tiles:0", said.append)
    for same in (None, "tiles:0", "1", 1, "shared"):
        assert holding.hold(same, said.append) is lease
    assert said == []
    for other in ("all", 2, "all"):
        assert holding.hold(other, said.append) is lease
    assert len(said) == 2 and "tiles=all has no effect" in said[0] and lease.lease.paths[0] in said[0], "each wish once"
    for _ in range(9):
        released = holding.let_go(lease)
    assert released and client.view().leases == []
    again = holding.hold("tiles:0", said.append)
    assert holding.hold("all", said.append) is again and len(said) == 3
    holding.let_go(again)
    assert holding.let_go(again)


def test_a_session_that_cannot_begin_holds_nothing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)

    def fails(page: Page) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Page, "slot", fails)
    with pytest.raises(OSError, match="Too many"):
        Footing("1")
    assert client.view().leases == [] and os.sched_getaffinity(0) == before


def test_a_fork_has_a_page_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without leases, too: a session of a child must not count in its parent's."""
    mine = Footing(leased=False)
    child = os.fork()
    if not child:
        code = 1
        try:
            inherited = mine.page._page.slot()
            inherited.enter(1)
            own = Footing(leased=False)
            own.page.enter(1)
            code = 0 if own.page._page.read().state == 1 and mine.page._page.read().state == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine.page._page.read().state == 0
    mine.close()
