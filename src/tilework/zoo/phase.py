"""Phase retrieval in three dimensions: an encoder with two decoders that sees only the size of a diffraction pattern, and
learns an object that scatters so, without being told the object (in the manner of AutoPhaseNN; Yao et al., 2021).

tilework compile tilework.zoo.phase:build --set size=small -o out/phase.pef
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
    size: int = 64  # of every side of the pattern; the object fills half of it
    features: int = 32  # channels of the first level
    depth: int = 3
    batch_size: int = 16


SIZES = {
    "tiny": Config(size=8, features=4, depth=2, batch_size=4),
    "small": Config(size=32, features=16, depth=3, batch_size=8),
    "full": Config(),
}


def _double(inside: int, outside: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers += [nn.Conv3d(channels, outside, 3, padding=1), nn.LeakyReLU(0.01), nn.BatchNorm3d(outside)]
    return nn.Sequential(*layers)


class PhaseNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        widths = [c.features * 2**level for level in range(c.depth)]
        self.encoder = nn.ModuleList(_double(i, o) for i, o in zip([1, *widths], widths, strict=False))
        turns = list(reversed(widths))
        self.amplitude = nn.ModuleList(_double(i, max(i // 2, 1)) for i in turns[:-1])
        self.phase = nn.ModuleList(_double(i, max(i // 2, 1)) for i in turns[:-1])
        self.amplitude_head = nn.Conv3d(widths[0], 1, 3, padding=1)
        self.phase_head = nn.Conv3d(widths[0], 1, 3, padding=1)

    def forward(self, pattern: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, 1, s, s, s], sizes of the scattered wave -> the same of the object that was found; its amplitude and phase"""
        x = pattern
        for level in self.encoder:
            x = F.max_pool3d(level(x), 2)
        amplitude, phase = x, x
        for level, other in zip(self.amplitude, self.phase, strict=True):
            amplitude = level(F.interpolate(amplitude, scale_factor=2.0))
            phase = other(F.interpolate(phase, scale_factor=2.0))
        amplitude = torch.sigmoid(self.amplitude_head(amplitude))  # [n, 1, s / 2, ...]
        phase = torch.pi * torch.tanh(self.phase_head(phase))
        return scattered(amplitude, phase, pattern.shape[-1]), amplitude, phase


def scattered(amplitude: Tensor, phase: Tensor, size: int) -> Tensor:
    """|Fourier transform| of the object in the middle of an empty box of `size`."""
    left = (size - amplitude.shape[-1]) // 2
    right = size - amplitude.shape[-1] - left
    box = (left, right) * 3
    real, imaginary = F.pad(amplitude * phase.cos(), box), F.pad(amplitude * phase.sin(), box)
    wave = torch.fft.fftn(torch.complex(real, imaginary), dim=(-3, -2, -1), norm="ortho")
    return torch.sqrt(wave.real**2 + wave.imag**2 + 1e-12)


class PatternLoss(nn.Module):
    def forward(self, found: tuple[Tensor, Tensor, Tensor], pattern: Tensor) -> Tensor:
        return (found[0] - pattern).abs().sum() / pattern.sum()


def build(
    size: str = "tiny", batch_size: int | None = None, lr: float = 2e-3, precision: Any = "float32", **changes: Any
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = PhaseNet(config)
    pattern, target = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=PatternLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        inputs=(pattern,),
        targets=(target,),
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Config, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Patterns of ellipsoids with a slowly changing phase: [n, 1, s, s, s], as input and as what to scatter like."""
    c, g = config, generator(seed)
    axis = torch.linspace(-1, 1, c.size // 2)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))  # [3, s/2, s/2, s/2]
    radius = (0.5 + 0.4 * torch.rand(rows, 3, generator=g)).view(rows, 3, 1, 1, 1)
    amplitude = ((grid / radius).pow(2).sum(1) < 1).float().unsqueeze(1)
    slope = torch.randn(rows, 3, generator=g).view(rows, 3, 1, 1, 1)
    phase = (slope * grid).sum(1, keepdim=True)
    pattern = scattered(amplitude, phase, c.size)
    return pattern, pattern.clone()
