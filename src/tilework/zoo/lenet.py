"""LeNet-5 for 28 x 28 digits, as a training step.   tilework compile tilework.zoo.lenet:build -o out/lenet.pef"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..step import Step


class LeNet(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:  # x: [n, 1, 28, 28]
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)  # [n, 6, 14, 14]
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # [n, 16, 5, 5]
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def build(batch_size: int = 64, lr: float = 0.02, momentum: float = 0.9) -> Step:
    torch.manual_seed(0)
    model = LeNet()
    return Step(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum),
        inputs=(torch.randn(batch_size, 1, 28, 28),),
        targets=(torch.randint(0, 10, (batch_size,)),),
    )
