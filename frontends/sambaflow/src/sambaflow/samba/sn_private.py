"""Gather, scatter and multinomial under the vendor's private names: torch's own operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sn_gather(tensor: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    return torch.gather(tensor, dim, index)


def sn_scatter(tensor: Tensor, dim: int, index: Tensor, source: Tensor, **_: Any) -> Tensor:
    return torch.scatter(tensor, dim, index, source)


def sn_multinomial(probabilities: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    return torch.multinomial(probabilities, num_samples, replacement)
