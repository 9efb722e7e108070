"""Uno: how a tumor responds to two drugs, from gene expression, drug descriptors and doses (Xia et al., 2018).

One tower for each kind of feature, shared by both drugs; then residual layers over all of them.

tilework compile tilework.zoo.uno:build --set size=small -o out/uno.pef
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
    num_genes: int = 942
    num_descriptors: int = 5270
    tower: tuple[int, ...] = (1000, 1000, 1000)
    dense: tuple[int, ...] = (1000, 1000, 1000, 1000, 1000)
    dropout: float = 0.0
    batch_size: int = 512


SIZES = {
    "tiny": Config(num_genes=24, num_descriptors=40, tower=(16, 16), dense=(32, 32), batch_size=16),
    "small": Config(num_genes=942, num_descriptors=1000, tower=(200, 200), dense=(200, 200, 200), batch_size=128),
    "full": Config(),
}


class Tower(nn.Module):
    def __init__(self, inside: int, widths: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip([inside, *widths], widths, strict=False))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), self.dropout, self.training)
        return x


class Uno(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.genes = Tower(c.num_genes, c.tower, c.dropout)
        self.drug = Tower(c.num_descriptors, c.tower, c.dropout)
        inside = 3 * c.tower[-1] + 2
        self.dense = nn.ModuleList(nn.Linear(i, o) for i, o in zip([inside, *c.dense], c.dense, strict=False))
        self.head = nn.Linear(c.dense[-1], 1)
        self.dropout = c.dropout

    def forward(self, genes: Tensor, drug1: Tensor, drug2: Tensor, dose1: Tensor, dose2: Tensor) -> Tensor:
        """[n, num_genes], [n, num_descriptors] twice, [n, 1] twice -> growth [n, 1]"""
        x = torch.cat((self.genes(genes), self.drug(drug1), self.drug(drug2), dose1, dose2), dim=1)
        for layer in self.dense:
            y = F.dropout(F.relu(layer(x)), self.dropout, self.training)
            x = x + y if x.shape == y.shape else y
        return self.head(x)


def build(
    size: str = "tiny", batch_size: int | None = None, lr: float = 1e-3, precision: Any = "float32", **changes: Any
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = Uno(config)
    *features, growth = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        inputs=tuple(features),
        targets=(growth,),
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Config, rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Each drug acts the more, the larger its dose and the better it fits the genes.
    (genes, drug 1, drug 2, dose 1, dose 2, growth in [-1, 1])"""
    c, g = config, generator(seed)
    nature = generator(12345)  # what a gene and a descriptor mean: the same for all seeds
    of_gene = torch.randn(c.num_genes, generator=nature) / c.num_genes**0.5
    of_descriptor = torch.randn(c.num_descriptors, generator=nature) / c.num_descriptors**0.5
    genes = torch.randn(rows, c.num_genes, generator=g)
    drugs = [torch.randn(rows, c.num_descriptors, generator=g) for _ in range(2)]
    doses = [torch.rand(rows, 1, generator=g) for _ in range(2)]
    fit = (genes @ of_gene)[:, None]
    effects = [torch.sigmoid(fit + (drug @ of_descriptor)[:, None]) * dose for drug, dose in zip(drugs, doses, strict=True)]
    return genes, *drugs, *doses, 1 - effects[0] - effects[1]
