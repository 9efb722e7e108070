"""Programs on which Tilework was wrong once: what fuzzing found, made small. Beside each, what was wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilework
from tilework.artifact.random import next_seed
from tilework.capture.seeded import seeded

pytestmark = pytest.mark.slow

N, B, SEED = 8, 4, 5


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.randn(N, N) * 0.4) for _ in range(2))
        self.lin = nn.Linear(N, N)
        self.emb = nn.Embedding(10, N)

    def peak(self, z: Tensor) -> Tensor:
        return z.amax(1).mean() + z.logsumexp(1).mean()


class EmbeddingBesideExpand(Base):
    """The gradient of the embedding went to wrong rows: an atomic addition in a transposed tile had its index changed twice."""

    def forward(self, x, y):
        a = x * self.p.diagonal()
        a = a[:, :1].expand(B, N) * a
        return (a + self.emb(y)).abs().sum() * 0.05


class TiesOfOneValue(Base):
    """amax's gradient was split over ties that were none: the compared values were computed twice, and rounded differently."""

    def forward(self, x, y):
        a = self.lin(x)
        return self.peak(F.gelu(torch.stack([a, a], 2).amax(2)))


class IndexedThenCumsum(Base):
    """As in EmbeddingBesideExpand; before it was made small, this one also wrote outside its memory."""

    def forward(self, x, y):
        a = (x @ self.p)[..., [(503 + 3 * k) % N for k in range(N)]]
        return self.peak(a.log_softmax(-1).cumsum(1) * 0.3)


class IndexedThenAttention(Base):
    """As in EmbeddingBesideExpand."""

    def forward(self, x, y):
        a = (x @ (self.p @ self.q))[..., [(438 + 3 * k) % N for k in range(N)]]
        b = F.interpolate(a[:, None], scale_factor=2, mode="linear")[:, 0, ::2]
        return self.peak(F.scaled_dot_product_attention(b[None, None], a[None, None], a[None, None], is_causal=True)[0, 0])


class LastDimensionIndexed(Base):
    """As in EmbeddingBesideExpand."""

    def forward(self, x, y):
        k = self.lin(x)[..., [3, 5, 7]]
        return ((k @ k.transpose(-1, -2)) ** 2).mean()


class LastDimensionSelected(Base):
    """As in EmbeddingBesideExpand."""

    def forward(self, x, y):
        k = self.lin(x).index_select(-1, torch.tensor([3, 5, 7]))
        return ((k @ k.transpose(-1, -2)) ** 2).mean()


class OneKeyHead(nn.Module):
    """As in EmbeddingBesideExpand: attention whose keys and values are taken by list indices."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(N, 48, bias=False)

    def forward(self, x, y):
        z = self.l(x[:, None].expand(B, 16, N) * torch.linspace(0.5, 1.5, 16)[:, None]).view(B, 16, 6, 8)
        q, k, v = (t.transpose(1, 2) for t in (z[..., :-2, :], z[..., [-2], :], z[..., [-1], :]))
        return (F.scaled_dot_product_attention(q, k.reshape(B, 1, 16, 8), v.reshape(B, 1, 16, 8), is_causal=True) ** 2).mean()


class DropoutInCheckpoint(Base):
    """Backward computed the block again with another mask, from torch's own random numbers: aten.bernoulli was in the graph."""

    def forward(self, x, y):
        return checkpoint(lambda t: F.dropout(torch.tanh(t @ self.p), 0.5), x, use_reentrant=False).square().mean()


class OneElementIndexedTwice(nn.Module):
    """The compile ended in an assertion of Inductor (index.is_vec): an atomic addition whose index is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(N, 1))

    def forward(self, x, y):
        v = (x[:1] @ self.p).tanh()[:, [0, 0]]
        return F.layer_norm(v, (2,), eps=1e-2).square().mean() + v.sum(1, keepdim=True).tanh().mean()


class RoundTrip(Base):
    """float16 and back rounded nothing: Inductor keeps such values in float32 unless it is told to emulate casts."""

    def forward(self, x, y):
        return ((x * self.p[0]).half().float() * 7).sum() + ((x * self.q[0]).to(torch.bfloat16).float() * 7).sum()


class TransposedIntoLoss(Base):
    """The reference device stopped: a kernel's result had other strides than the graph says, and a view of it came next."""

    def forward(self, x, y):
        return F.mse_loss(self.lin(x).view(2, 2, N).transpose(0, 1), x.view(2, 2, N).cos())


class SumReadTooEarly(nn.Module):
    """The gradient of the indexing was read before it was added up: a loop that Inductor sizes anew forgot what it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(33, 1) * 0.3)

    def forward(self, x, y):
        v = (self.p @ x.unsqueeze(-1).mT).softmax(-1) @ x.unsqueeze(-1)  # B, 33, 1
        twice = v[..., [0, 0]]
        rows = (F.dropout(v, 0.2) + F.dropout(v, 0.5)) * 0.125
        loss = F.silu(twice).abs().mean() + F.silu(twice).flatten().logsumexp(0) * 0.1 + rows.square().mean()
        return F.cross_entropy(rows.flatten(1), y) + loss + (twice * (torch.rand(2) > 0.3)).mean()


FOUND = [EmbeddingBesideExpand, TiesOfOneValue, IndexedThenCumsum, IndexedThenAttention, LastDimensionIndexed,
         LastDimensionSelected, OneKeyHead, DropoutInCheckpoint, OneElementIndexedTwice, RoundTrip,
         TransposedIntoLoss, SumReadTooEarly]  # fmt: skip


def relative(found: Tensor, expected: Tensor, scale: float) -> float:
    return float((found.detach() - expected.detach()).abs().max()) / max(scale, 1e-6)


def called(block, *values, use_reentrant):
    return block(*values)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("model", FOUND, ids=lambda m: m.__name__)
def test_found(model: type[nn.Module], device: str, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    for seed in range(3):  # one compile: only the numbers differ
        torch.manual_seed(seed)
        made, x, y = model(), torch.randn(B, N), torch.randint(0, 10, (B,))
        twin = copy.deepcopy(made)
        step = tilework.Step(model=made, inputs=(x, y), optimizer=torch.optim.SGD(made.parameters(), lr=0.05))
        tilework.compile(step, tmp_path / "found.pef", options=tilework.Options(device=device), weights="inside", verify=False)
        # checkpointing must not change a number: the twin simply calls the block
        with seeded(torch.tensor(next_seed(SEED, 0))), patch.dict(globals(), checkpoint=called):
            loss = twin(x, y)
            loss.backward()
        before = {k: p.detach().clone() for k, p in twin.named_parameters()}
        torch.optim.SGD(twin.parameters(), lr=0.05).step()
        grads = {k: p.grad for k, p in twin.named_parameters() if p.grad is not None}
        largest = max(float(g.abs().max()) for g in grads.values())
        for fused in (True, False):
            with tilework.load(tmp_path / "found.pef", seed=SEED) as session:
                result = session.run(x, y, keep_gradients=not fused)
                way = f"{'fused' if fused else 'by section'}, seed {seed}"
                assert relative(result.loss, loss, max(1.0, float(loss.detach().abs()))) <= 1e-5, f"loss, {way}"
                for name, wanted in twin.named_parameters():
                    moved, expected = session.state_dict()[name] - before[name], wanted - before[name]
                    assert relative(moved, expected, 0.05 * largest) <= 1e-4, f"{name}, {way}"
                for name, gradient in ({} if fused else session.gradients()).items():
                    assert relative(gradient, grads[name], largest) <= 1e-5, f"gradient of {name}, {way}"
