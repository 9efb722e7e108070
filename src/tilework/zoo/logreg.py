"""Logistic regression on 28 x 28 digits.   tilework compile tilework.zoo.logreg:build -o out/logreg.pef"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..step import Step


class LogReg(nn.Module):
    """The loss is computed inside forward, as programs for dataflow machines like to have it."""

    def __init__(self, num_features: int = 784, num_classes: int = 10) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(num_features, num_classes)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = self.lin_layer(inputs.flatten(1))
        return self.criterion(out, targets), out


def build(batch_size: int = 1, lr: float = 0.001) -> Step:
    torch.manual_seed(0)
    model = LogReg()
    return Step(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        inputs=(torch.randn(batch_size, 784), torch.randint(0, 10, (batch_size,))),
    )
