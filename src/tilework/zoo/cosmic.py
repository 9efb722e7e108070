"""A residual network that labels the pixels of a neutrino detector's three wire planes, in the manner of CosmicTagger.

Each plane sees the same particles from another angle. All planes go down and up through one U-shaped network with shared
weights; at the bottom, the planes are joined, so that each sees the others.

tilework compile tilework.zoo.cosmic:build --set size=small -o out/cosmic.pef
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..step import Step
from .common import chosen, examples, generator

PLANES, CLASSES = 3, 3  # background, cosmic ray, neutrino


@dataclass(frozen=True)
class Config:
    height: int = 640  # time
    width: int = 1024  # wires
    filters: int = 16  # channels of the first level; each level below has twice as many
    depth: int = 5
    blocks: int = 2  # residual blocks of each level
    batch_size: int = 8


SIZES = {
    "tiny": Config(height=32, width=32, filters=4, depth=2, blocks=1, batch_size=2),
    "small": Config(height=128, width=128, filters=8, depth=3, blocks=1, batch_size=4),
    "full": Config(),
}


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.bn2(self.conv2(F.leaky_relu(self.bn1(self.conv1(x))))) + x)


def _blocks(channels: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(Residual(channels) for _ in range(count)))


class CosmicTagger(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        widths = [c.filters * 2**level for level in range(c.depth + 1)]
        self.first = nn.Conv2d(1, c.filters, 5, padding=2)
        self.levels = nn.ModuleList(_blocks(w, c.blocks) for w in widths[:-1])
        self.down = nn.ModuleList(nn.Conv2d(w, 2 * w, 2, stride=2) for w in widths[:-1])
        self.between = nn.Conv2d(PLANES * widths[-1], PLANES * widths[-1], 1)
        self.bottom = _blocks(PLANES * widths[-1], c.blocks)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.merged = nn.ModuleList(_blocks(w, c.blocks) for w in reversed(widths[:-1]))
        self.last = nn.Conv2d(c.filters, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:  # [n, planes, h, w] -> logits [n, planes, classes, h, w]
        n, planes, height, width = image.shape
        x = self.first(image.reshape(n * planes, 1, height, width))
        kept = []
        for level, down in zip(self.levels, self.down, strict=True):
            x = level(x)
            kept.append(x)
            x = F.leaky_relu(down(x))
        joined = x.reshape(n, planes * x.shape[1], *x.shape[2:])
        x = self.bottom(F.leaky_relu(self.between(joined))).reshape(x.shape)
        for up, merged, skip in zip(self.up, self.merged, reversed(kept), strict=True):
            x = merged(up(x) + skip)
        return self.last(x).reshape(n, planes, CLASSES, height, width)


def balanced_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Of every pixel; a class weighs as much as the others, however few its pixels are."""
    flat = labels.flatten()
    counts = F.one_hot(flat, CLASSES).sum(0)
    weights = flat.numel() / (CLASSES * (counts + 1).float())
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").flatten()
    return (losses * weights[flat]).mean()


def build(
    size: str = "tiny", batch_size: int | None = None, lr: float = 1e-3, precision: Any = "float32", **changes: Any
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = CosmicTagger(config)
    images, labels = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=balanced_cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        inputs=(images,),
        targets=(labels,),
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Config, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Long straight tracks are cosmic rays, a short and bright one is the neutrino.
    (images [n, planes, h, w], labels int64 [n, planes, h, w])"""
    c, g = config, generator(seed)
    y = torch.linspace(0, 1, c.height).view(-1, 1)
    x = torch.linspace(0, 1, c.width).view(1, -1)
    shape = (rows, PLANES, 1, 1)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=g)

    labels = torch.zeros(rows, PLANES, c.height, c.width, dtype=torch.int64)
    images = 0.1 * torch.randn(rows, PLANES, c.height, c.width, generator=g)
    thick = 1.5 / min(c.height, c.width)
    for _ in range(2):
        on = (y - uniform(0, 1) - uniform(-1, 1) * (x - 0.5)).abs() < thick
        labels[on] = 1
        images += on * uniform(0.5, 1.0)
    center_x, center_y, length = uniform(0.2, 0.8), uniform(0.2, 0.8), uniform(0.1, 0.2)
    slope = uniform(-0.5, 0.5)
    on = ((x - center_x).abs() < length) & ((y - center_y - slope * (x - center_x)).abs() < 1.5 * thick)
    labels[on] = 2
    images += on * uniform(1.5, 2.0)
    return images, labels
