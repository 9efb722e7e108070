"""A Fourier neural operator (Li et al., 2020): from a field at one time to the field at a later one.

tilework compile tilework.zoo.fno:build --set size=small -o out/fno.pef
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
    grid: int = 64  # points of a side
    modes: int = 12  # lowest frequencies that are mixed, in each direction
    width: int = 32
    num_layers: int = 4
    batch_size: int = 20


SIZES = {
    "tiny": Config(grid=16, modes=4, width=8, num_layers=2, batch_size=4),
    "small": Config(grid=32, modes=8, width=16, batch_size=16),
    "full": Config(),
}


class Spectral(nn.Module):
    """Mixes the channels of each low frequency by a complex matrix of its own. Complex numbers are pairs of real ones, in the
    last dimension: optimizers and files need not know others, and the products are native code."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.low = nn.Parameter(torch.rand(width, width, modes, modes, 2) / width**2)
        self.high = nn.Parameter(torch.rand(width, width, modes, modes, 2) / width**2)

    def forward(self, x: Tensor) -> Tensor:  # [n, width, grid, grid]
        m, grid = self.modes, x.shape[-1]
        waves = torch.view_as_real(torch.fft.rfft2(x, norm="ortho"))  # [n, width, grid, grid / 2 + 1, 2]
        top = mixed(waves[:, :, :m, :m], self.low)
        bottom = mixed(waves[:, :, grid - m :, :m], self.high)
        between = waves.new_zeros(x.shape[0], x.shape[1], grid - 2 * m, m, 2)
        kept = F.pad(torch.cat((top, between, bottom), dim=2), (0, 0, 0, grid // 2 + 1 - m))
        return torch.fft.irfft2(torch.view_as_complex(kept), s=(grid, grid), norm="ortho")


def mixed(waves: Tensor, weights: Tensor) -> Tensor:
    """[n, inside, x, y, 2] by [inside, outside, x, y, 2]: a product over channels for each frequency."""
    (a, b), (c, d) = waves.unbind(-1), weights.unbind(-1)

    def product(left: Tensor, right: Tensor) -> Tensor:
        return torch.einsum("nixy,ioxy->noxy", left, right)

    return torch.stack((product(a, c) - product(b, d), product(a, d) + product(b, c)), dim=-1)


class FNO(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        axis = torch.linspace(0, 1, c.grid)
        self.places: Tensor
        self.register_buffer("places", torch.stack(torch.meshgrid(axis, axis, indexing="ij")), persistent=False)
        self.lift = nn.Conv2d(3, c.width, 1)
        self.spectral = nn.ModuleList(Spectral(c.width, c.modes) for _ in range(c.num_layers))
        self.pointwise = nn.ModuleList(nn.Conv2d(c.width, c.width, 1) for _ in range(c.num_layers))
        self.fc1 = nn.Conv2d(c.width, 128, 1)
        self.fc2 = nn.Conv2d(128, 1, 1)

    def forward(self, field: Tensor) -> Tensor:  # [n, 1, grid, grid] -> the same, later
        x = torch.cat((field, self.places.expand(len(field), -1, -1, -1)), dim=1)
        x = self.lift(x)
        for number, (spectral, pointwise) in enumerate(zip(self.spectral, self.pointwise, strict=True)):
            x = spectral(x) + pointwise(x)
            if number + 1 < len(self.spectral):
                x = F.gelu(x)
        return self.fc2(F.gelu(self.fc1(x)))


class RelativeL2(nn.Module):
    def forward(self, found: Tensor, true: Tensor) -> Tensor:
        distance = (found - true).flatten(1).norm(dim=1)
        return (distance / true.flatten(1).norm(dim=1)).mean()


def build(
    size: str = "tiny", batch_size: int | None = None, lr: float = 2e-3, precision: Any = "float32", **changes: Any
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = FNO(config)
    before, after = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=RelativeL2(),
        optimizer=torch.optim.Adam(model.parameters(), lr=lr, weight_decay=1e-4),
        inputs=(before,),
        targets=(after,),
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Config, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Smooth random fields, drifted and diffused for a while (solved exactly), then squashed. ([n, 1, g, g] each)"""
    c, g = config, generator(seed)
    kx = torch.fft.fftfreq(c.grid, 1 / c.grid).view(-1, 1)
    ky = torch.fft.rfftfreq(c.grid, 1 / c.grid).view(1, -1)
    k2 = kx**2 + ky**2
    noise = torch.fft.rfft2(torch.randn(rows, 1, c.grid, c.grid, generator=g))
    before = torch.fft.irfft2(noise * 4 / (k2 + 4), s=(c.grid, c.grid))
    drift = torch.exp(-2j * torch.pi * (0.2 * kx + 0.1 * ky))
    after = torch.fft.irfft2(torch.fft.rfft2(before) * drift * torch.exp(-0.02 * k2), s=(c.grid, c.grid))
    return before, torch.tanh(2 * after)
