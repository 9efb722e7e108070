"""The model: a feed-forward network followed by logistic regression. The loss is part of it."""

import torch
from torch import nn


class FFNLogReg(nn.Module):
    def __init__(self, num_features: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(num_features, hidden_size), nn.ReLU())
        self.logreg = nn.Linear(hidden_size, num_classes)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.logreg(self.ffn(inputs))
        return self.criterion(out, targets), out
