"""Several replicas in each of several processes are one with the joined batch, and with as many replicas in one process."""

from __future__ import annotations

import json

import pytest
import torch
from launchers import Ranks
from test_ranks_parity import WAYS, judge
from training import STEPS, compile_for, data

import tilework

pytestmark = pytest.mark.slow


def cases(path: object, count: int) -> list[dict[str, object]]:
    return [{"path": str(path), "count": count, "reduce": r, "algorithm": a, "steps": 10} for r, a in WAYS]


def test_replicas_of_several_processes(ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 4, "adamw", 1)
    asked = cases(path, 2)
    result = ranks(2, "spread", json.dumps({"cases": asked}))
    for i, case in enumerate(asked):
        judge(result, i, "adamw")
        assert [r["cases"][i]["ranks"] for r in result] == [[0, 1], [2, 3]] and result[0]["cases"][i]["size"] == 4
        assert result[0]["cases"][i]["nodes"] == [[0, 1, 2, 3]]
        assert result[0]["cases"][i]["natively"] == (case["reduce"] == "device")
    x, y = data()
    with tilework.parallel.Replicas(path, 4, seed=3) as replicas:
        for i in range(0, STEPS, 10):
            replicas.run(x[i : i + 10].flatten(0, 1), y[i : i + 10].flatten(0, 1), num_steps=10)
        alone = {k: v.flatten().tolist() for k, v in replicas.sessions[0].state_dict().items()}
    assert result[0]["cases"][0]["weights"] == alone  # bit for bit


def test_processes_on_several_machines(ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 4, "sgd", 1)
    asked = cases(path, 2)
    result = ranks(2, "spread", json.dumps({"cases": asked, "machines": 2}))
    for i in range(len(asked)):
        judge(result, i, "sgd")
        assert result[1]["cases"][i]["nodes"] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("reduce", ["device", "host"])
def test_a_replica_of_another_process_that_fails(reduce: str, ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 4, "sgd", 1)
    case = {"path": str(path), "count": 2, "reduce": reduce, "algorithm": "ring", "steps": 1}
    ranks(2, "spread", json.dumps({"cases": [case], "fault": 1, "timeout": 20}), code=1)
    assert ranks.done is not None
    assert "rank 1 of 2 failed" in ranks.done.stderr and "out of range" in ranks.done.stderr, ranks.done.stderr
    assert "ranks-lost" in ranks.done.stderr  # what the other process says


def test_as_many_replicas_in_each(ranks: Ranks, tmp_path) -> None:
    program = tmp_path / "uneven.py"
    program.write_text(
        "from tilework.parallel import Replicas, start\n"
        "group = start(timeout=20)\n"
        "Replicas('x.pef', 1 + group.rank, group=group)\n"
    )
    ranks(2, str(program.with_suffix("")), code=1)
    assert ranks.done is not None and "different numbers of replicas" in ranks.done.stderr and "1, 2" in ranks.done.stderr


def test_random_numbers_are_those_of_one_process(ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 4, "sgd", 1, dropout=0.5)
    result = ranks(2, "spread", json.dumps({"cases": cases(path, 2)[:1]}))
    x, y = data()
    with tilework.parallel.Replicas(path, 4, seed=3) as replicas:
        for i in range(0, STEPS, 10):
            replicas.run(x[i : i + 10].flatten(0, 1), y[i : i + 10].flatten(0, 1), num_steps=10)
        for name, want in replicas.sessions[0].state_dict().items():
            torch.testing.assert_close(torch.tensor(result[0]["cases"][0]["weights"][name]), want.flatten())
