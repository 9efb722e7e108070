"""The steps that the tests of this folder train: models, data, and how artifacts of them are called."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

import tilework

ROWS, STEPS = 16, 20  # of the joined batch
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


class Net(nn.Module):
    """More than one bucket, where buckets are made small; parameters of two types of layers."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 64), nn.Linear(64, 33), nn.Linear(33, 5)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.dropout(torch.relu(self.norm(self.first(x)))))))


def net(**settings: object) -> Net:
    torch.manual_seed(0)
    return Net(**settings)  # type: ignore[arg-type]


def data() -> tuple[Tensor, Tensor]:
    """Of all steps: [STEPS, ROWS, ...]."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, ROWS, 12, generator=g), torch.randint(0, 5, (STEPS, ROWS), generator=g)


def compile_for(
    folder: Path,
    ranks: int,
    rule: str,
    micro: int,
    *,
    device: str = "cpu",
    shards: int = 1,
    grad_norm: bool = False,
    **settings: object,
) -> Path:
    """The artifact of one rank's share of the batch; of one rank alone, without replicas."""
    model, (x, y) = net(**settings), data()
    rows = ROWS // ranks // micro
    step = tilework.Step(
        model=model, inputs=(x[0, :rows],), targets=(y[0, :rows],), loss=nn.CrossEntropyLoss(), clip_norm=1.0,
        optimizer=OPTIMIZERS[rule](model.parameters()), num_micro_batches=micro,
    )  # fmt: skip
    options = tilework.Options(device=device, programs="fused", num_replicas=2 if ranks > 1 else 1, opt_level=1,
                               num_shards=shards, grad_norm=grad_norm)  # fmt: skip
    path = folder / f"{'norm-' if grad_norm else ''}{rule}-{micro}-of-{ranks}-{shards}{'-'.join(settings)}.pef"
    tilework.compile(step, path, options=options)
    return path


def share(ranks: int, rank: int) -> tuple[Tensor, Tensor]:
    x, y = data()
    rows = ROWS // ranks
    own = slice(rank * rows, (rank + 1) * rows)
    return x[:, own].contiguous(), y[:, own].contiguous()


def trained(
    session: tilework.Session, x: Tensor, y: Tensor, steps_per_call: int, norms: list[float] | None = None
) -> list[float]:
    """The loss of each step; and the norm of its gradients, where a list for them is given."""
    losses: list[float] = []
    for i in range(0, STEPS, steps_per_call):
        now = slice(i, i + steps_per_call)
        result = session.run(x[now].flatten(0, 1), y[now].flatten(0, 1), num_steps=steps_per_call)
        losses += result.losses.reshape(steps_per_call, -1).mean(1).tolist()
        if norms is not None:
            norms += session.grad_norms(steps_per_call).tolist()
    return losses


def tell(rank: int, **facts: object) -> None:
    Path(f"told-{rank}.json").write_text(json.dumps({"rank": rank, **facts}))
