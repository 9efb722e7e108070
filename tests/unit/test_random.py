"""The random numbers: statistics of the mask, independence between sites, steps and neighbours, the same everywhere."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tilework.artifact.random import bits, keep_mask, next_seed, normal, uniform
from tilework.capture.seeded import seeded

N = 200_000


def seed_of(step: int) -> torch.Tensor:
    return torch.tensor(next_seed(42, step))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_mask_keeps_the_right_share(p: float) -> None:
    kept = keep_mask((N,), seed_of(0), 0, torch.tensor(p, dtype=torch.float64)).double().mean().item()
    assert abs(kept - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / N)


def test_share_is_right_at_every_site_and_step() -> None:
    """Binomial spread over 200 masks: neither biased nor too regular."""
    p = torch.tensor(0.3, dtype=torch.float64)
    shares = torch.stack([keep_mask((5000,), seed_of(s), site, p).double().mean() for s in range(20) for site in range(10)])
    z = (shares - 0.7) / math.sqrt(0.21 / 5000)
    assert abs(z.mean().item()) < 4 / math.sqrt(200)
    assert 0.8 < z.std().item() < 1.2


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return abs(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item())


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 8, 16, 64, 256, 1024])
def test_neighbours_are_independent(lag: int) -> None:
    u = uniform((N,), seed_of(3), 1)
    assert correlation(u[:-lag], u[lag:]) < 5 / math.sqrt(N)


def test_sites_and_steps_are_independent() -> None:
    base = uniform((N,), seed_of(0), 0)
    for other in (
        uniform((N,), seed_of(0), 1),
        uniform((N,), seed_of(1), 0),
        uniform((N,), torch.tensor(next_seed(43, 0)), 0),
    ):
        assert correlation(base, other) < 5 / math.sqrt(N)
        assert not torch.equal(base, other)


def test_every_bit_is_balanced() -> None:
    x = bits((N,), seed_of(5), 2)
    assert x.min() >= 0 and x.max() < 2**32
    for bit in range(32):
        assert abs(((x >> bit) & 1).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(N), bit


def test_uniform_and_normal_have_their_distributions() -> None:
    u, n = uniform((N,), seed_of(0), 0).double(), normal((N,), seed_of(0), 0).double()
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert abs(n.mean()) < 0.02 and abs(n.std() - 1) < 0.01 and abs((n**4).mean() - 3) < 0.1


def test_eager_dropout_takes_the_mask_and_scales() -> None:
    x = torch.ones(1000)
    with seeded(seed_of(0)) as random:
        y = F.dropout(x, 0.25)
    mask = keep_mask((1000,), seed_of(0), 0, torch.tensor(0.25, dtype=torch.float64))
    assert torch.equal(y != 0, mask)
    assert torch.allclose(y[mask], torch.tensor(1 / 0.75))
    assert [s.p for s in random.sites] == [0.25]


def test_channel_dropout_drops_whole_channels() -> None:
    with seeded(seed_of(0)):
        y = F.dropout2d(torch.ones(8, 16, 5, 5), 0.5)
    per_channel = (y != 0).flatten(2).float().mean(-1)
    assert set(per_channel.unique().tolist()) == {0.0, 1.0}


def test_evaluation_drops_nothing() -> None:
    x = torch.randn(50)
    with seeded(seed_of(0)) as random:
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
    assert not random.sites
