"""Models, options, and the same training in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import poptorch


class Classifier(nn.Module):
    """forward(x, labels) -> (output, loss), as most programs have it."""

    def __init__(self, features: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(features, classes)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        out = self.fc(x)
        return out if labels is None else (out, self.loss(out, labels))


def options(d: int = 1, g: int = 1, r: int = 1, mode: Any = None, period: int | None = None) -> poptorch.Options:
    found = poptorch.Options()
    found.deviceIterations(d).replicationFactor(r).showCompilationProgressBar(False)
    found.Training.gradientAccumulation(g)
    if mode is not None:
        found.outputMode(mode, period)
    return found


def data(rows: int, features: int = 4, classes: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, features, generator=g), torch.randint(classes, (rows,), generator=g)


def eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, d: int, g: int, r: int, *, mean: bool = True,
    after: Callable[[], Any] = lambda: None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Outputs and losses of every micro-batch, in the order of dimension 0: [d][g][r]."""
    outs, losses = [], []
    for xs, ys in zip(x.chunk(d), y.chunk(d), strict=True):
        optimizer.zero_grad()
        for a, b in zip(xs.chunk(g * r), ys.chunk(g * r), strict=True):
            out, loss = model(a, b)
            (loss / (g * r) if mean else loss).backward()
            outs.append(out.detach())
            losses.append(loss.detach())
        after()
        optimizer.step()
    return outs, losses


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def same(a: nn.Module, b: nn.Module, tolerance: float = 2e-6) -> None:
    for (name, p), (_, q) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def trained(opts: poptorch.Options | None = None, model: nn.Module | None = None, optimizer: Any = None) -> Any:
    """(executor, model) of the classifier."""
    model = model or Classifier()
    executor = poptorch.trainingModel(model, opts or options(), optimizer or poptorch.optim.SGD(model.parameters(), lr=0.1))
    return executor, model


def mse(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)
