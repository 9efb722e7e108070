"""ResNet with bottleneck blocks (He et al., 2015; stride on the 3 x 3 convolution, as in version 1.5), as a training step.

tilework compile tilework.zoo.resnet:build --set size=small -o out/resnet.pef
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..step import Step
from .common import chosen, examples, generator


@dataclass(frozen=True)
class Config:
    blocks: tuple[int, ...] = (3, 4, 6, 3)  # of each stage; (3, 4, 6, 3) is ResNet-50
    width: int = 64  # channels inside the blocks of the first stage
    num_classes: int = 1000
    image_size: int = 224
    batch_size: int = 256


SIZES = {
    "tiny": Config(blocks=(1, 1), width=8, num_classes=4, image_size=32, batch_size=8),
    "small": Config(blocks=(2, 2, 2, 2), width=16, num_classes=10, image_size=64, batch_size=32),
    "full": Config(),
}


class Bottleneck(nn.Module):
    EXPANSION = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * self.EXPANSION
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outside, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outside)
        nn.init.zeros_(self.bn3.weight)  # each block begins as the identity
        self.downsample = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            if stride != 1 or inside != outside
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + skip)


class ResNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, config.width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(config.width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages, inside = [], config.width
        for number, count in enumerate(config.blocks):
            width = config.width * 2**number
            blocks = []
            for block in range(count):
                blocks.append(Bottleneck(inside, width, stride=2 if number > 0 and block == 0 else 1))
                inside = width * Bottleneck.EXPANSION
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.fc = nn.Linear(inside, config.num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:  # [n, 3, s, s] -> logits [n, num_classes]
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3)))


def build(
    size: str = "tiny",
    batch_size: int | None = None,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    precision: Any = "float32",
    **changes: Any,
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = ResNet(config)
    images, labels = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay),
        inputs=(images,),
        targets=(labels,),
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Any, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy stripes; the class is their direction and width. (images [n, 3, s, s], labels int64 [n])"""
    g = generator(seed)
    labels = torch.randint(0, config.num_classes, (rows,), generator=g)
    part = labels.float() / config.num_classes  # 0 to 1
    angle, waves = torch.pi * part, 2 + 3 * (part * 7 % 1)
    axis = torch.linspace(-1, 1, config.image_size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    turned = x * angle.cos().view(-1, 1, 1) + y * angle.sin().view(-1, 1, 1)
    phase = 2 * torch.pi * torch.rand(rows, 1, 1, generator=g)
    stripes = torch.sin(2 * torch.pi * waves.view(-1, 1, 1) * turned + phase).unsqueeze(1)
    return stripes + 0.5 * torch.randn(rows, 3, config.image_size, config.image_size, generator=g), labels
