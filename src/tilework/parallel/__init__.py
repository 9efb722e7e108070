"""Many replicas: ranks, their connection, and the reduction of gradients.

group = tilework.parallel.start()
session = tilework.load("lenet.pef", group=group)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .environment import Launched, launched

if TYPE_CHECKING:
    from .group import Group, RanksError, current, start
    from .threads import Replicas

__all__ = ["Group", "Launched", "RanksError", "Replicas", "current", "launched", "start"]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first used: tools that only ask for ranks do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from . import group, threads

    return getattr(threads if name == "Replicas" else group, name)
