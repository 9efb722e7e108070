"""Hints for tiling, which apps put into a PEF's metadata. They are kept there and change nothing."""

from __future__ import annotations

from typing import Any


class ConvTilingMetadata(dict[str, Any]):
    key = "conv_tiling"

    def __init__(self, original_size: Any = None, **more: Any) -> None:
        super().__init__(original_size=original_size, **more)


class TilingMetadata(dict[str, Any]):
    key = "tiling"

    def __init__(self, original_size: Any = None, num_tiles: int | None = None, **more: Any) -> None:
        super().__init__(original_size=original_size, num_tiles=num_tiles, **more)
