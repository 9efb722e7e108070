"""lazy_param(): inside it, modules are made without filling their parameters; materialize() fills them later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_active = False


@contextmanager
def lazy_param(*_: Any, **__: Any) -> Iterator[None]:
    """Initialisation is left out: memory is reserved and not written."""
    global _active
    before, _active = _active, True
    try:
        with _without_init():
            yield
    finally:
        _active = before


def is_lazy() -> bool:
    return _active


@contextmanager
def _without_init() -> Iterator[None]:
    names = [n for n in dir(torch.nn.init) if n.endswith("_") and not n.startswith("_")]
    kept = {n: getattr(torch.nn.init, n) for n in names}
    for n in names:
        setattr(torch.nn.init, n, lambda tensor, *_, **__: tensor)
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
