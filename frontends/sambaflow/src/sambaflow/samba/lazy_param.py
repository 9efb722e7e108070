"""lazy_param(): inside it, modules are made without filling their parameters; materialize() fills them later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def lazy_param(*_: Any, **__: Any) -> Iterator[None]:
    """Initialisation is left out: memory is reserved, not written, and noted to be without data."""
    names = [n for n in dir(torch.nn.init) if n.endswith("_") and not n.startswith("_")]
    kept = {n: getattr(torch.nn.init, n) for n in names}

    def without_data(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        tensor.has_data = False  # type: ignore[attr-defined]
        return tensor

    for n in names:
        setattr(torch.nn.init, n, without_data)
    try:
        yield
    finally:
        for n, function in kept.items():
            setattr(torch.nn.init, n, function)


class RNGProvider:
    """A source of random numbers of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def get(self) -> torch.Generator:
        return self.generator


class RNGProviderFactory:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def create(self) -> RNGProvider:
        self.seed += 1
        return RNGProvider(self.seed)

    __call__ = create
