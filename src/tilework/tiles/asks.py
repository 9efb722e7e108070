"""What a session asks for: some tiles, some whole chips, or certain tiles. Written as text in TILEWORK_TILES:

4                 four tiles
chips:2           two whole chips
share:2           half of a chip's tiles: what one of two ranks on a node takes
0-3,8             those tiles; `tiles:8` for a single one
/X_0/R_1          the tiles at a path, as `tilework tiles` writes them
all               every tile
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import UserError
from .machine import numbers, ranges
from .topology import Node

MOST = 4096  # tiles of a request; no node has as many


class Ask(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Exactly one of the first three; none: one chip, which is what an artifact runs on unless somebody says otherwise."""

    count: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    chips: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    tiles: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=MOST)] | None = None
    gpu: bool = False

    def __str__(self) -> str:
        if self.tiles is not None:
            return f"tile{'s' if len(self.tiles) != 1 else ''} {ranges(self.tiles)[:60]}"
        return _plural(self.count, "tile") if self.count is not None else _plural(self.chips or 1, "chip")


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"


def parse(text: str, node: Node) -> Ask:
    text = text.strip()
    try:
        if text == "all":
            return Ask(tiles=tuple(t.index for t in node.tiles if t.gpu is None))
        if text.startswith("/"):
            return Ask(tiles=tuple(t.index for t in node.find(text)))
        if text.startswith("share:"):
            return Ask(count=max(1, len(node.chips[0]) // _positive(text.removeprefix("share:"))))
        if text.startswith("chips:"):
            return Ask(chips=_positive(text.removeprefix("chips:")))
        if text.isdigit():
            return Ask(count=_positive(text))
        text = text.removeprefix("tiles:")
        if re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text):
            return Ask(tiles=tuple(sorted(set(numbers(text, MOST)))))
    except ValueError:
        pass
    raise UserError("tiles-ask", f"{text!r} does not say which tiles", expected="4, chips:2, 0-3,8, tiles:8, a path, or all",
                    fix="correct TILEWORK_TILES or tiles=")  # fmt: skip


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return min(value, 10**9)  # larger than any node: capped() says what the session gets


def capped(ask: Ask, node: Node) -> tuple[Ask, str]:
    """The ask, no larger than the node, and a line that says so where it was."""
    kind = [t for t in node.tiles if (t.gpu is not None) == ask.gpu]
    if not kind:
        raise UserError("tiles-ask", "this node has no GPU tiles" if ask.gpu else "this node has no CPU tiles")
    if ask.tiles is not None:
        known = {t.index for t in node.tiles}
        have = tuple(sorted(known & set(ask.tiles)))
        if not have:
            raise UserError("tiles-ask", "none of the tiles that were asked for is on this node",
                            found=", ".join(map(str, ask.tiles[:8])), expected=f"0 to {len(node.tiles) - 1}")  # fmt: skip
        return Ask(tiles=have), "" if len(have) == len(set(ask.tiles)) else _line(ask, f"{len(have)} of them")
    if ask.count is not None:
        count = min(ask.count, len(kind))
        return Ask(count=count, gpu=ask.gpu), "" if count == ask.count else _line(ask, _plural(count, "tile"))
    asked, have_chips = ask.chips or 1, len({t.chip for t in kind})
    chips = min(asked, have_chips)
    return Ask(chips=chips, gpu=ask.gpu), "" if chips == asked else _line(ask, _plural(chips, "chip"))


def _line(ask: Ask, have: str) -> str:
    return f"{ask} asked for; this node has {have}, which is what the session gets"
