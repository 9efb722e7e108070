"""Replicas inside one process are one with the joined batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_ranks_parity import eager, near
from training import STEPS, compile_for, data, net

import tilework


@pytest.mark.parametrize("count", [2, 4])
def test_replicas_in_one_process(count: int, tmp_path: Path) -> None:
    path = compile_for(tmp_path, count, "adamw", 1)
    x, y = data()
    losses, weights = eager("adamw")
    with tilework.parallel.Replicas(path, count) as replicas:
        found = []
        for i in range(0, STEPS, 5):
            results = replicas.run(x[i : i + 5].flatten(0, 1), y[i : i + 5].flatten(0, 1), num_steps=5)
            found += torch.stack([r.losses for r in results]).mean(0).tolist()
        near(found, losses)
        states = [s.state_dict() for s in replicas.sessions]
        for name, want in weights.items():
            assert all(torch.equal(s[name], states[0][name]) for s in states)
            torch.testing.assert_close(states[0][name], want, rtol=1e-3, atol=1e-4)
        with pytest.raises(tilework.UserError, match="cannot be divided"):
            replicas.run(x[0][:3], y[0][:3])


def test_a_replica_that_fails(tmp_path: Path) -> None:
    path = compile_for(tmp_path, 2, "sgd", 1)
    x, y = data()
    with tilework.parallel.Replicas(path, 2, timeout=10) as replicas:
        wrong = y[0].clone()
        wrong[-1] = 99  # in the second replica's share
        with pytest.raises(tilework.UserError, match="out of range"):
            replicas.run(x[0], wrong)


def test_an_update_without_the_others_is_refused(tmp_path: Path) -> None:
    """Section by section, the ranks stay together or somebody says so."""
    model, (x, y) = net(), data()
    step = tilework.Step(model=model, inputs=(x[0, :8],), targets=(y[0, :8],), loss=torch.nn.CrossEntropyLoss(),
                         optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    path = tmp_path / "sections.pef"
    tilework.compile(step, path, options=tilework.Options(num_replicas=2, opt_level=1))
    with tilework.parallel.Replicas(path, 2) as replicas:
        replicas.run(x[0], y[0], sections=["fwd", "bwd", "reduce", "opt"])
        states = [s.state_dict() for s in replicas.sessions]
        assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
        with pytest.raises(tilework.UserError, match="drift apart"):
            replicas.run(x[0], y[0], sections=["fwd", "bwd", "opt"])
