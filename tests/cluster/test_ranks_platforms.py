"""Ranks on tiles: four of them on a virtual node with 32 tiles, each with a lease of its own; and many, on a device that computes
nothing."""

from __future__ import annotations

import json

import pytest
from launchers import FULL, Ranks
from training import compile_for


@pytest.mark.slow
def test_ranks_have_tiles_of_their_own(ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 4, "sgd", 1)
    own = {"TMPDIR": str(ranks.folder), "XDG_RUNTIME_DIR": str(ranks.folder)}  # a daemon of this test's own
    result = ranks(4, "leased", path, TILEWORK_LEASE="1", TILEWORK_PLATFORM="SN10-8", TILEWORK_TILES="4", **own)
    tiles = [set(r["tiles"]) for r in result]
    assert [len(t) for t in tiles] == [4] * 4 and len(set.union(*tiles)) == 16, tiles
    assert len({json.dumps(r["weights"]) for r in result}) == 1
    assert all(r["reduce"] > 0 for r in result)  # its column in the tile table


@pytest.mark.skipif(not FULL, reason="32 processes: make test-full")
def test_many_ranks_on_the_null_device(ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 2, "sgd", 1, device="null")
    case = {"path": str(path), "reduce": "host", "algorithm": "ring", "steps": 1, "of": 2}
    result = ranks(32, "many", path, json.dumps(case), OMP_NUM_THREADS="1")
    assert [r["rank"] for r in result] == list(range(32)) and all(r["steps"] == 20 for r in result)
