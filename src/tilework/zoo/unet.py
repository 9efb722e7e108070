"""U-Net for images and for volumes (Ronneberger et al., 2015; Çiçek et al., 2016), as a training step.

tilework compile tilework.zoo.unet:build --set size=small -o out/unet.pef
tilework compile tilework.zoo.unet:build --set size=tiny --set dims=3 -o out/unet3d.pef
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
    dims: int = 2  # 2: images, 3: volumes
    in_channels: int = 3
    out_channels: int = 1  # 1: a mask by sigmoid
    init_features: int = 32  # channels of the first level; each level below has twice as many
    depth: int = 4  # levels below the first
    image_size: int = 256  # of every side; divisible by 2 ** depth
    batch_size: int = 16


SIZES = {
    "tiny": Config(init_features=4, depth=2, image_size=16, batch_size=4),
    "small": Config(init_features=16, depth=3, image_size=64, batch_size=16),
    "full": Config(image_size=256, batch_size=256),
}

_CONV = {2: nn.Conv2d, 3: nn.Conv3d}
_UP = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}


def _double(dims: int, inside: int, outside: int) -> nn.Sequential:
    """Twice: convolution, normalization, ReLU."""
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers += [_CONV[dims](channels, outside, 3, padding=1, bias=False), _NORM[dims](outside), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        widths = [c.init_features * 2**level for level in range(c.depth + 1)]
        self.down = nn.ModuleList(_double(c.dims, i, o) for i, o in zip([c.in_channels, *widths], widths[:-1], strict=False))
        self.pool = _POOL[c.dims](2)
        self.bottom = _double(c.dims, widths[-2], widths[-1])
        self.up = nn.ModuleList(_UP[c.dims](2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(_double(c.dims, 2 * w, w) for w in reversed(widths[:-1]))
        self.head = _CONV[c.dims](widths[0], c.out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:  # [n, in_channels, s, s (, s)] -> logits [n, out_channels, s, s (, s)]
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for up, join, skip in zip(self.up, self.join, reversed(kept), strict=True):
            x = join(torch.cat((skip, up(x)), dim=1))
        return self.head(x)


def dice_and_cross_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy of each pixel, and how much the whole of each mask overlaps: small objects count too."""
    found = logits.sigmoid().flatten(1)
    true = mask.flatten(1)
    dice = (2 * (found * true).sum(1) + 1) / (found.sum(1) + true.sum(1) + 1)
    return F.binary_cross_entropy_with_logits(logits, mask) + 1 - dice.mean()


def build(
    size: str = "tiny", batch_size: int | None = None, lr: float = 1e-3, precision: Any = "float32", **changes: Any
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = UNet(config)
    images, masks = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=dice_and_cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        inputs=(images,),
        targets=(masks,),
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Config, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noisy pictures of one bright ball each; the mask is the ball. (images [n, c, s, ...], masks [n, 1, s, ...])"""
    c, g = config, generator(seed)
    ones = (1,) * c.dims
    axis = torch.linspace(0, 1, c.image_size)
    grid = torch.meshgrid(*[axis] * c.dims, indexing="ij")
    center = 0.25 + 0.5 * torch.rand(rows, c.dims, generator=g)
    radius = (0.1 + 0.15 * torch.rand(rows, generator=g)).view(rows, *ones)
    distance = sum((grid[d] - center[:, d].view(rows, *ones)) ** 2 for d in range(c.dims))
    mask = (distance < radius**2).float().unsqueeze(1)  # type: ignore[union-attr]
    color = 0.5 + torch.rand(rows, c.in_channels, *ones, generator=g)
    noise = 0.5 * torch.randn(rows, c.in_channels, *[c.image_size] * c.dims, generator=g)
    return mask * color + noise, mask.expand(-1, c.out_channels, *[-1] * c.dims).contiguous()
