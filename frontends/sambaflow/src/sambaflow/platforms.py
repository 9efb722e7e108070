"""What the levels of a DataScale are called, and the shapes that job scripts expect. Found by the engine by entry point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LEVELS = ("XRDU", "RDU", "TILE")
PLATFORMS: dict[str, dict[str, Any]] = {  # chips: on each board; tiles: on each chip
    "SN10-8": {"title": "DataScale SN10-8", "boards": 4, "chips": 2, "tiles": 4, "levels": LEVELS},
    "SN30-8": {"title": "DataScale SN30-8", "boards": 4, "chips": 2, "tiles": 8, "levels": LEVELS},
}


def spelt(path: str, levels: Sequence[str]) -> str:
    """A tile's path in SambaFlow's words, on a machine that has no words of its own. `levels`: the node's."""
    from tilework.tiles.topology import LEVELS as PLAIN

    if tuple(levels) != PLAIN:
        return path  # a named platform's, or the site's choice
    return "/" + "/".join(f"{LEVELS[i]}_{part.rsplit('_', 1)[1]}" for i, part in enumerate(path.strip("/").split("/")))
