"""Parameters that no module has registered, by the path that leads to them.

A model may keep sub-modules in a plain list, or reach them through a closure. PyTorch's named_parameters() does not see
them, yet they train if the optimizer holds them. Both sides must call them by the same name: capture when it meets them,
and sync when it looks for them in the host's model.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_SKIPPED = ("_parameters", "_buffers", "_modules", "training")
_MAX_DEPTH = 6


def hidden_parameters(root: nn.Module) -> dict[str, Tensor]:
    """name -> parameter, for those reachable from attributes of the model but registered nowhere below `root`."""
    known = {id(p) for p in root.parameters()} | {id(m) for m in root.modules()}
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in root.named_modules():
        for name, value in module.__dict__.items():
            if name not in _SKIPPED and not name.endswith("_hooks"):
                for where, parameter in _walk(value, f"{path}.{name}" if path else name, known, seen, 0):
                    found[where] = parameter
    return found


def _walk(value: Any, path: str, known: set[int], seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if id(value) in known or id(value) in seen or depth > _MAX_DEPTH:
        return
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            seen.add(id(value))
            yield path, value
    elif isinstance(value, nn.Module):
        seen.add(id(value))
        for name, parameter in value.named_parameters():
            if id(parameter) not in known and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}", parameter
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk(item, f"{path}[{i}]", known, seen, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, f"{path}[{key}]", known, seen, depth + 1)
    elif isinstance(value, MethodType):
        yield from _walk(value.__self__, path, known, seen, depth + 1)
    elif isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                item = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield from _walk(item, f"{path}.{name}", known, seen, depth + 1)
