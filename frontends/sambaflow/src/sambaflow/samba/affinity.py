"""Which tiles a program asks for: SF_RNT_TILE_AFFINITY, else --num-tiles, now or when the PEF was compiled, else one RDU.
Users of a DataScale expect tiles of their own; TILEWORK_TILES=shared runs without."""

from __future__ import annotations

import json
import os
import zipfile
from argparse import Namespace
from pathlib import Path

import tilework
from tilework.tiles import holding
from tilework.tiles.client import view
from tilework.tiles.topology import Node, asked_platform, node_of

from .compiling import METADATA

VARIABLE = "SF_RNT_TILE_AFFINITY"


def tiles_asked(args: Namespace, path: Path | str) -> str | None:
    """As tilework.load takes it; None: nothing to do with tiles."""
    text = os.environ.get(VARIABLE, "").strip()
    if not holding.wanted():
        return None
    if text:
        node = node_of(view(0.0, asked_platform()))  # as the daemon has it: all users share one view
        return "tiles:" + ",".join(map(str, tiles_of_mask(text, node)))
    asked = getattr(args, "num_tiles", None) or _noted(path)
    return str(asked) if asked else holding.one_chip()


def tiles_of_mask(text: str, node: Node) -> list[int]:
    """Up to 32 bits: nibble r is RDU r (of those there are: r modulo their number), and its bits are the quarters of that RDU's
    tiles, which on an SN10 are its four tiles. More than 8 hexadecimal digits: bit i is tile i of the node."""
    try:
        mask = int(text, 0)
    except ValueError:
        mask = 0
    if mask <= 0:
        raise tilework.UserError("sambaflow-affinity", f"{VARIABLE} is no mask of tiles", found=text,
                                 expected="a number above 0, such as 0xf for the first RDU")  # fmt: skip
    digits = text.lower().removeprefix("0x") if text.lower().startswith("0x") else ""
    if mask >= 2**32 or len(digits) > 8:
        found = {i for i in range(len(node.tiles)) if mask >> i & 1}
    else:
        chips = [c for c in node.chips if c[0].gpu is None]
        found = set()
        for bit in range(32):
            if mask >> bit & 1:
                chip, quarter = chips[bit // 4 % len(chips)], bit % 4
                n = len(chip)
                found |= {t.index for t in chip[quarter * n // 4 : max(quarter * n // 4 + 1, (quarter + 1) * n // 4)]}
    if not found:
        raise tilework.UserError("sambaflow-affinity", f"{VARIABLE} names no tile of this node", found=text,
                                 expected=f"bits 0 to {len(node.tiles) - 1}")  # fmt: skip
    return sorted(found)


def _noted(path: Path | str) -> int | None:
    """--num-tiles at compile time. Only a wish, so the file is not verified for it."""
    try:
        with zipfile.ZipFile(path) as z:
            noted = json.loads(z.read("manifest.json"))["metadata"][METADATA]["args"].get("num_tiles")
        return int(noted) if noted else None
    except (OSError, KeyError, ValueError, TypeError, AttributeError, zipfile.BadZipFile):
        return None
