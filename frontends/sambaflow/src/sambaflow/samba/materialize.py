"""materialize(model): a context in which the model has real weights, also where it was made lazily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def materialize(model: nn.Module, *_: Any, **__: Any) -> Iterator[nn.Module]:
    """Modules that know how to (reset_parameters) initialise those of their parameters that have no data yet."""
    for module in model.modules():
        empty = [p for p in module.parameters(recurse=False) if getattr(p, "has_data", True) is False]
        reset = getattr(module, "reset_parameters", None)
        if empty and callable(reset):
            reset()
            for p in empty:
                p.has_data = True  # type: ignore[attr-defined]
    yield model
