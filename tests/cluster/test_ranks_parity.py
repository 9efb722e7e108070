"""Several ranks are one with the joined batch, and eager PyTorch on it: every place of reduction, both algorithms, loops, micro-
batches, clipping by the global norm. First step to 1e-5, the losses of 20 steps to 1e-3."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from launchers import FULL, IN_FULL, Ranks
from torch import nn
from training import OPTIMIZERS, STEPS, compile_for, data, net, share, trained

import tilework

WAYS = [("device", "auto"), ("device", "ring"), ("host", "ring"), ("host", "hierarchical")]


def eager(rule: str, norms: list[float] | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, (x, y), losses = net(), data(), []
    optimizer = OPTIMIZERS[rule](model.parameters())
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[i]), y[i])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norms is not None:
            norms.append(norm.item())
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def near(found: list[float], expected: list[float]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found == pytest.approx(expected, rel=1e-3)


def judge(result: list[dict[str, Any]], which: int, rule: str) -> None:
    """All ranks have the same weights, bit for bit; their mean loss and their weights are eager's on the joined batch."""
    cases = [r["cases"][which] for r in result]
    assert all(c["weights"] == cases[0]["weights"] for c in cases)
    losses, weights = eager(rule)
    near([sum(each) / len(each) for each in zip(*(c["losses"] for c in cases), strict=True)], losses)
    for name, want in weights.items():
        torch.testing.assert_close(torch.tensor(cases[0]["weights"][name]), want.flatten(), rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("count", "rule"),
    [
        (2, "adamw"),
        pytest.param(2, "sgd", marks=IN_FULL),
        pytest.param(4, "sgd", marks=pytest.mark.slow),
        pytest.param(4, "adamw", marks=IN_FULL),
    ],
)
def test_ranks_are_one_with_the_joined_batch(count: int, rule: str, ranks: Ranks) -> None:
    paths = {micro: compile_for(ranks.folder, count, rule, micro) for micro in (1, 2)}
    cases = [
        {"path": str(path), "reduce": reduce, "algorithm": algorithm, "steps": steps}
        for (micro, path), (reduce, algorithm), steps in ((p, w, s) for p in paths.items() for w in WAYS for s in (1, 10))
        if micro == 1 or steps == 10 or FULL
    ]
    result = ranks(count, "train", json.dumps({"cases": cases}))
    assert [r["rank"] for r in result] == list(range(count)) and result[0]["launcher"] == "tilework"
    for i, case in enumerate(cases):
        assert result[0]["cases"][i]["natively"] == (case["reduce"] == "device")
        judge(result, i, rule)


def test_one_artifact_at_any_number_of_ranks(ranks: Ranks) -> None:
    """Compiled for two: alone it trains as itself."""
    path = compile_for(ranks.folder, 2, "sgd", 1)
    with tilework.load(path, seed=3) as session:
        losses = trained(session, *share(2, 0), 10)
    case = {"path": str(path), "reduce": "device", "algorithm": "auto", "steps": 10, "of": 2}
    (result,) = ranks(1, "train", json.dumps({"cases": [case]}))
    assert result["cases"][0]["losses"] == losses and not result["cases"][0]["natively"]


@pytest.mark.parametrize("launcher", ["mpich", "openmpi", "torchrun"])
def test_launchers(launcher: str, ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 2, "sgd", 1)
    cases = [{"path": str(path), "reduce": r, "algorithm": "auto", "steps": 10} for r in ("device", "host")]
    result = ranks(2, "train", json.dumps({"cases": cases}), launcher=launcher)
    assert [r["launcher"] for r in result] == [{"mpich": "pmi"}.get(launcher, launcher)] * 2
    for i in range(2):
        judge(result, i, "sgd")


@pytest.mark.slow
def test_reduced_while_the_backward_pass_goes_on(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buckets and small pieces: the courier carries each as soon as it is complete, and the numbers are the same."""
    from tilework.compiler import build

    monkeypatch.setattr(build, "BUCKET_BYTES", 4096)
    model, (x, y) = net(), data()
    step = tilework.Step(model=model, inputs=(x[0, :8],), targets=(y[0, :8],), loss=nn.CrossEntropyLoss(), clip_norm=1.0,
                         optimizer=OPTIMIZERS["adamw"](model.parameters()))  # fmt: skip
    options = tilework.Options(programs="fused", num_replicas=2, opt_level=1, piece_size=4)
    made = tilework.compile(step, ranks.folder / "pieces.pef", options=options)
    manifest = tilework.read_artifact(made.path).manifest
    completes = manifest.programs["accumulate"].completes
    assert len(manifest.buckets) > 2 and completes == sorted(completes) and completes[0] < completes[-1]
    cases = [{"path": str(made.path), "reduce": "device", "algorithm": a, "steps": s, "overlap": True}
             for a in ("auto", "ring") for s in (1, 10)]  # fmt: skip
    result = ranks(2, "train", json.dumps({"cases": cases}))
    for i in range(len(cases)):
        judge(result, i, "adamw")


@pytest.mark.slow
def test_sharded_optimizer_state(ranks: Ranks) -> None:
    """Each rank keeps a part of Adam's state; the numbers are those of ranks that keep all of it."""
    paths = {micro: compile_for(ranks.folder, 2, "adamw", micro, shards=3) for micro in (1, 2)}
    assert {"opt_0", "opt_1", "opt_2", "opt_rest"} <= set(tilework.read_artifact(paths[1]).manifest.programs)
    cases = [{"path": str(path), "reduce": reduce, "algorithm": algorithm, "steps": 10, "shard": shard}
             for path in paths.values() for reduce, algorithm in WAYS for shard in (True, False)]  # fmt: skip
    result = ranks(2, "train", json.dumps({"cases": cases}))
    for i, case in enumerate(cases):
        judge(result, i, "adamw")
        if case["shard"]:
            assert result[0]["cases"][i]["weights"] == result[0]["cases"][i + 1]["weights"]
            (kept, total), (other, _) = (r["cases"][i]["kept"] for r in result)
            assert 0 < kept < total and kept + other == total
            assert result[0]["cases"][i]["state"] == result[1]["cases"][i]["state"]  # gathered


@pytest.mark.slow
def test_the_norm_of_the_gradients(ranks: Ranks) -> None:
    """On every rank that of the reduced gradients: what eager PyTorch has for the joined batch, before clipping."""
    paths = {micro: compile_for(ranks.folder, 2, "adamw", micro, shards=2, grad_norm=True) for micro in (1, 2)}
    ways = (("device", 10, False), ("host", 1, False), ("host", 10, True))
    cases = [{"path": str(path), "reduce": reduce, "algorithm": "auto", "steps": steps, "shard": shard}
             for path in paths.values() for reduce, steps, shard in ways]  # fmt: skip
    result = ranks(2, "train", json.dumps({"cases": cases}))
    expected: list[float] = []
    eager("adamw", expected)
    for i in range(len(cases)):
        judge(result, i, "adamw")
        one, other = (r["cases"][i]["norms"] for r in result)
        assert one == other
        near(one, expected)
