"""Batch normalization with the statistics of all ranks: several ranks are eager PyTorch on the joined batch, running statistics
included. Without it each rank has its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import Ranks
from test_ranks_faults import nothing_left_behind
from test_ranks_parity import near
from torch import nn
from training import ROWS, STEPS, data, net

import tilework

pytestmark = pytest.mark.slow

WAYS = [("device", "auto", 1), ("device", "ring", 10), ("host", "ring", 10)]


def compiled(
    folder: Path, model: nn.Module, *, ranks: int = 2, micro: int = 1, everywhere: bool = False, device: str = "cpu"
) -> Path:
    x, y = data()
    rows = ROWS // ranks // micro
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = tilework.Step(model=model, inputs=(x[0, :rows],), targets=(y[0, :rows],), loss=nn.CrossEntropyLoss(),
                         optimizer=optimizer, num_micro_batches=micro)  # fmt: skip
    options = tilework.Options(device=device, programs="fused", num_replicas=2, opt_level=1, sync_batch_norm=everywhere)
    path = folder / f"norm-{ranks}-{micro}-{everywhere}-{device}-{type(model.norm).__name__}.pef"
    tilework.compile(step, path, options=options)
    return path


def eager(micro: int = 1) -> tuple[list[float], dict[str, torch.Tensor]]:
    """On the joined batch; of each micro-batch, both ranks' rows together."""
    model, (x, y), losses = net(norm=True), data(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for i in range(STEPS):
        parts = [torch.cat([half.chunk(micro)[k] for half in torch.arange(ROWS).chunk(2)]) for k in range(micro)]
        found = [nn.functional.cross_entropy(model(x[i, rows]), y[i, rows]) for rows in parts]
        optimizer.zero_grad()
        (sum(found) / micro).backward()
        optimizer.step()
        losses.append(sum(f.item() for f in found) / micro)
    return losses, model.state_dict()


def judge(result: list[dict[str, Any]], which: int, micro: int = 1) -> None:
    cases = [r["cases"][which] for r in result]
    assert all(c["weights"] == cases[0]["weights"] for c in cases)  # running statistics as well
    losses, weights = eager(micro)
    near([sum(each) / len(each) for each in zip(*(c["losses"] for c in cases), strict=True)], losses)
    for name, want in weights.items():
        found = torch.tensor(cases[0]["weights"][name])
        torch.testing.assert_close(found, want.flatten().to(found.dtype), rtol=1e-3, atol=1e-4, msg=name)


def test_statistics_of_all_ranks(ranks: Ranks) -> None:
    paths = {micro: compiled(ranks.folder, net(norm=True), micro=micro, everywhere=True) for micro in (1, 2)}
    paths[0] = compiled(ranks.folder, nn.SyncBatchNorm.convert_sync_batchnorm(net(norm=True)))  # as programs ask for it
    paths[-1] = compiled(ranks.folder, net(norm=True), everywhere=True, device="reference")
    cases = [{"path": str(path), "reduce": reduce, "algorithm": algorithm, "steps": steps}
             for path in paths.values() for reduce, algorithm, steps in WAYS]  # fmt: skip
    result = ranks(2, "train", json.dumps({"cases": cases}))
    for i in range(len(cases)):
        judge(result, i, micro=max(1, list(paths)[i // len(WAYS)]))


def test_statistics_are_each_ranks_own_unless_asked_for(ranks: Ranks) -> None:
    path = compiled(ranks.folder, net(norm=True))
    result = ranks(2, "train", json.dumps({"cases": [{"path": str(path), "reduce": "device", "algorithm": "auto", "steps": 10}]}))
    first, second = (r["cases"][0]["weights"] for r in result)
    assert first["first.weight"] == second["first.weight"]
    assert first["norm.running_mean"] != second["norm.running_mean"]


def test_replicas_of_one_process(tmp_path: Path) -> None:
    model, (x, y) = net(norm=True), data()
    with tilework.parallel.Replicas(compiled(tmp_path, model, everywhere=True), 2) as replicas:
        losses = [sum(r.loss.item() for r in replicas.run(x[i], y[i])) / 2 for i in range(STEPS)]
        replicas.to_host(model)
    expected, weights = eager()
    near(losses, expected)
    torch.testing.assert_close(model.norm.running_var, weights["norm.running_var"], rtol=1e-3, atol=1e-4)


def test_a_rank_that_dies_is_named(ranks: Ranks) -> None:
    """The others wait for it in the middle of a program."""
    path = compiled(ranks.folder, net(norm=True), ranks=4, everywhere=True)
    ranks(4, "fault", path, "die", "device", code=137)
    assert ranks.done is not None
    assert "rank 2" in ranks.done.stderr and "batch normalization (statistics of all replicas)" in ranks.done.stderr
    assert "Traceback" not in ranks.done.stderr
    nothing_left_behind()


def test_alone_it_is_torchs_own(tmp_path: Path) -> None:
    """Images far from zero, where sums of squares would lose everything; float64 decides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 64, 4))
    x, y = torch.randn(4, 3, 8, 8) + 1000, torch.randint(0, 4, (4,))
    step = tilework.Step(model=model, inputs=(x,), targets=(y,), loss=nn.CrossEntropyLoss(),
                         optimizer=torch.optim.SGD(model.parameters(), lr=0.1))  # fmt: skip
    options = tilework.Options(programs="fused", num_replicas=2, opt_level=1, sync_batch_norm=True)
    made = tilework.compile(step, tmp_path / "far.pef", options=options)
    exact = nn.functional.batch_norm(x.double(), None, None, training=True)
    exact_loss = nn.functional.cross_entropy(model[2].double()(exact.flatten(1)), y)
    model.float()
    with tilework.load(made.path) as session:
        assert session.run(x, y).loss.item() == pytest.approx(exact_loss.item(), rel=1e-4)


def test_a_norm_without_tensors_of_its_own_is_refused(tmp_path: Path) -> None:
    model = net(norm=True)
    model.norm = nn.SyncBatchNorm(64, affine=False, track_running_stats=False)
    with pytest.raises(tilework.UserError, match=r"nn\.SyncBatchNorm has neither weights nor running statistics"):
        compiled(tmp_path, model)


def test_nobody_to_share_with() -> None:
    with pytest.raises(tilework.UserError, match="sync_batch_norm: needs num_replicas"):
        tilework.Options(sync_batch_norm=True)
