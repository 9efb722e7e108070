"""BraggNN (Liu et al., 2020): where the center of a diffraction peak lies, as a training step.

tilework compile tilework.zoo.braggnn:build --set size=full -o out/braggnn.pef
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
    patch_size: int = 11  # pixels of a side, around the peak
    channels: int = 64
    widths: tuple[int, ...] = (64, 32, 16, 8)  # of the fully connected layers
    batch_size: int = 512


SIZES = {
    "tiny": Config(channels=16, widths=(16, 8), batch_size=16),
    "small": Config(channels=32, widths=(32, 16, 8), batch_size=128),
    "full": Config(),
}


class NonLocal(nn.Module):
    """Every pixel looks at every other one (Wang et al., 2018)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inside = channels // 2
        self.theta = nn.Conv2d(channels, inside, 1)
        self.phi = nn.Conv2d(channels, inside, 1)
        self.g = nn.Conv2d(channels, inside, 1)
        self.out = nn.Conv2d(inside, channels, 1)

    def forward(self, x: Tensor) -> Tensor:  # [n, channels, h, w]
        theta, phi, g = (part(x).flatten(2) for part in (self.theta, self.phi, self.g))
        attention = torch.softmax(theta.transpose(1, 2) @ phi, dim=-1)  # [n, hw, hw]
        seen = (g @ attention.transpose(1, 2)).view(len(x), -1, *x.shape[2:])
        return x + self.out(seen)


class BraggNN(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.conv1 = nn.Conv2d(1, c.channels, 3)
        self.nonlocal_block = NonLocal(c.channels)
        self.conv2 = nn.Conv2d(c.channels, c.channels // 2, 3)
        self.conv3 = nn.Conv2d(c.channels // 2, c.channels // 8, 3)
        inside = c.channels // 8 * (c.patch_size - 6) ** 2
        sizes = [inside, *c.widths]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(sizes, c.widths, strict=False))
        self.head = nn.Linear(c.widths[-1], 2)

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, patch, patch] -> [n, 2], the center as parts of the patch
        x = self.nonlocal_block(self.conv1(x))
        x = F.leaky_relu(self.conv2(F.leaky_relu(x, 0.01)), 0.01)
        x = F.leaky_relu(self.conv3(x), 0.01).flatten(1)
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.01)
        return self.head(x)


def build(
    size: str = "tiny", batch_size: int | None = None, lr: float = 1e-3, precision: Any = "float32", **changes: Any
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = BraggNN(config)
    patches, centers = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        inputs=(patches,),
        targets=(centers,),
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Config, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Peaks of two different widths, turned, with noise. (patches [n, 1, p, p] in [0, 1], centers [n, 2] in [0, 1])"""
    c, g = config, generator(seed)
    centers = 0.3 + 0.4 * torch.rand(rows, 2, generator=g)
    widths = 0.08 + 0.1 * torch.rand(rows, 2, generator=g)
    angle = torch.pi * torch.rand(rows, generator=g)
    axis = (torch.arange(c.patch_size) + 0.5) / c.patch_size
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    dx, dy = x - centers[:, 0].view(-1, 1, 1), y - centers[:, 1].view(-1, 1, 1)
    cos, sin = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1)
    along, across = dx * cos + dy * sin, dy * cos - dx * sin
    peak = torch.exp(-0.5 * ((along / widths[:, :1, None]) ** 2 + (across / widths[:, 1:, None]) ** 2))
    return (peak + 0.03 * torch.randn(peak.shape, generator=g)).unsqueeze(1), centers
