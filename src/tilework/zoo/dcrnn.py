"""DCRNN (Li et al., 2017): traffic on a road network, by a recurrent network whose products are walks along the roads.

tilework compile tilework.zoo.dcrnn:build --set size=small -o out/dcrnn.pef
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..step import Step
from .common import chosen, examples, generator


@dataclass(frozen=True)
class Config:
    num_sensors: int = 207  # METR-LA
    num_features: int = 2  # speed, time of day
    units: int = 64
    num_layers: int = 2
    num_walks: int = 2  # steps along the roads and against them
    history: int = 12
    horizon: int = 12
    batch_size: int = 64


SIZES = {
    "tiny": Config(num_sensors=6, units=8, num_layers=1, history=4, horizon=3, batch_size=4),
    "small": Config(num_sensors=30, units=32, history=8, horizon=6, batch_size=16),
    "full": Config(),
}


class Diffusion(nn.Module):
    """A linear layer over a node's features and those that random walks bring to it."""

    def __init__(self, inside: int, outside: int, num_walks: int) -> None:
        super().__init__()
        self.num_walks = num_walks
        self.linear = nn.Linear(inside * (2 * num_walks + 1), outside)

    def forward(self, x: Tensor, walks: tuple[Tensor, Tensor]) -> Tensor:  # [n, sensors, inside]
        seen = [x]
        for walk in walks:
            now = x
            for _ in range(self.num_walks):
                now = walk @ now
                seen.append(now)
        return self.linear(torch.cat(seen, dim=-1))


class Cell(nn.Module):
    """A gated recurrent unit with diffusion in place of its products."""

    def __init__(self, inside: int, units: int, num_walks: int) -> None:
        super().__init__()
        self.gates = Diffusion(inside + units, 2 * units, num_walks)
        self.candidate = Diffusion(inside + units, units, num_walks)

    def forward(self, x: Tensor, state: Tensor, walks: tuple[Tensor, Tensor]) -> Tensor:
        reset, update = torch.sigmoid(self.gates(torch.cat((x, state), -1), walks)).chunk(2, dim=-1)
        new = torch.tanh(self.candidate(torch.cat((x, reset * state), -1), walks))
        return update * state + (1 - update) * new


class DCRNN(nn.Module):
    def __init__(self, config: Config, roads: Tensor) -> None:
        super().__init__()
        c = config
        self.config = c
        self.register_buffer("along", roads / roads.sum(1, keepdim=True))
        self.register_buffer("against", roads.T / roads.T.sum(1, keepdim=True))
        sizes = [c.num_features, *[c.units] * (c.num_layers - 1)]
        self.encoder = nn.ModuleList(Cell(s, c.units, c.num_walks) for s in sizes)
        self.decoder = nn.ModuleList(Cell(s, c.units, c.num_walks) for s in [1, *sizes[1:]])
        self.head = nn.Linear(c.units, 1)

    def forward(self, seen: Tensor) -> Tensor:  # [n, history, sensors, features] -> speeds [n, horizon, sensors, 1]
        walks = (self.along, self.against)
        states = [seen.new_zeros(len(seen), self.config.num_sensors, self.config.units) for _ in self.encoder]
        for time in range(self.config.history):
            x = seen[:, time]
            for layer, cell in enumerate(self.encoder):
                x = states[layer] = cell(x, states[layer], walks)
        x, found = seen.new_zeros(len(seen), self.config.num_sensors, 1), []
        for _ in range(self.config.horizon):
            for layer, cell in enumerate(self.decoder):
                x = states[layer] = cell(x, states[layer], walks)
            x = self.head(x)
            found.append(x)
        return torch.stack(found, dim=1)


def road_network(num_sensors: int) -> Tensor:
    """Sensors on a plane; the weight of a road falls with its length. The same for all seeds."""
    places = torch.rand(num_sensors, 2, generator=generator(12345))
    distance = torch.cdist(places, places)
    weights = torch.exp(-((distance / distance.std()) ** 2))
    return torch.where(weights > 0.1, weights, 0.0)


def build(
    size: str = "tiny", batch_size: int | None = None, lr: float = 0.01, precision: Any = "float32", **changes: Any
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = DCRNN(config, road_network(config.num_sensors))
    seen, coming = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=nn.L1Loss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=lr, eps=1e-3),
        inputs=(seen,),
        targets=(coming,),
        clip_norm=5.0,
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Config, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Waves of the day's traffic that spread along the roads.
    (seen [n, history, sensors, features], coming [n, horizon, sensors, 1])"""
    c, g = config, generator(seed)
    roads = road_network(c.num_sensors)
    spread = roads / roads.sum(1, keepdim=True)
    length = c.history + c.horizon
    start = torch.rand(rows, 1, generator=g)
    time = (start + torch.arange(length) / 48) % 1  # parts of a day
    speed = torch.randn(rows, c.num_sensors, generator=g)
    course = []
    for at in range(length):
        tide = torch.sin(2 * torch.pi * time[:, at : at + 1])
        speed = 0.9 * speed @ spread.T + 0.3 * tide
        course.append(speed)
    speeds = torch.stack(course, dim=1).unsqueeze(-1)
    features = [speeds, *[time[:, :, None, None].expand_as(speeds)] * (c.num_features - 1)]
    whole = torch.cat(features, dim=-1)
    return whole[:, : c.history].contiguous(), speeds[:, c.history :].contiguous()
