"""What a session asks for: some tiles, some whole chips, or certain tiles. Written as text in TILEWORK_TILES:

4                 four tiles
chips:2           two whole chips
share:2           half of a chip's tiles: what one of two ranks on a node takes
gpus:2            two whole GPUs
gpu-tiles:3       three tiles of GPUs
0-3,8             those tiles; `tiles:8` for a single one
chip:2-3          those chips, by number
/X_0/R_1          the tiles at a path, as `tilework tiles` writes them
all               every core that the process may use
job, job:4        for the job that the process is in: one chip, or whatever is written after `job:`
of:NAME           those that this user keeps under a name (keep.py)
shared            no tiles at all
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
SHARED = "shared"
_EXPECTED = "4, chips:2, gpus:1, gpu-tiles:2, 0-3,8, tiles:8, chip:1, a path, all, job, job:4 or shared"


class Ask(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Exactly one of the first three; none: one chip, which is what an artifact runs on unless somebody says otherwise."""

    count: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    chips: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    tiles: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=MOST)] | None = None
    gpu: bool = False
    flexible: bool = False  # fewer will do where the process may not use as many CPUs

    @property
    def is_default(self) -> bool:
        return self.count is None and self.chips is None and self.tiles is None

    def __str__(self) -> str:
        if self.tiles is not None:
            return f"tile{'s' if len(self.tiles) != 1 else ''} {ranges(self.tiles)[:60]}"
        if self.count is not None:
            return _plural(self.count, "GPU tile" if self.gpu else "tile")
        return _plural(self.chips or 1, "GPU" if self.gpu else "chip")


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"


def for_job(text: str) -> tuple[bool, str]:
    """Is it for the job, and what is asked for?"""
    word, _, rest = text.strip().partition(":")
    return (True, rest.strip()) if word == "job" else (False, text)


def is_name(text: str) -> bool:
    """Whether tiles can be kept under it. Jobs have numbers."""
    return re.fullmatch(r"[A-Za-z][\w.-]{0,39}", text, re.ASCII) is not None


def named(text: str) -> str:
    """The name of the kept tiles that are asked for; empty where others are."""
    word, _, name = text.strip().partition(":")
    return name if word == "of" and is_name(name) else ""


def parse(text: str, node: Node) -> Ask:
    text = text.strip()
    try:
        if text == "all":
            return Ask(tiles=tuple(t.index for t in node.tiles if t.gpu is None), flexible=True)
        if text.startswith("/"):
            return Ask(tiles=tuple(t.index for t in node.find(text)))
        if text.startswith("share:"):
            return Ask(count=max(1, len(node.chips[0]) // _positive(text.removeprefix("share:"))), flexible=True)
        if text.startswith("gpus:"):
            return Ask(chips=_positive(text.removeprefix("gpus:")), gpu=True)
        if text.startswith("gpu-tiles:"):
            return Ask(count=_positive(text.removeprefix("gpu-tiles:")), gpu=True)
        if text.startswith("chip:"):
            chips = sorted(set(numbers(text.removeprefix("chip:"), MOST)))
            if chips and chips[-1] < len(node.chips):
                return Ask(tiles=tuple(t.index for c in chips for t in node.chips[c]))
            raise UserError("tiles-ask", "there is no such chip on this node", found=text,
                            expected=f"chip:0 to chip:{len(node.chips) - 1}")  # fmt: skip
        if text.startswith("chips:"):
            return Ask(chips=_positive(text.removeprefix("chips:")))
        if text.isdigit():
            return Ask(count=_positive(text))
        text = text.removeprefix("tiles:")
        if re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text):
            return Ask(tiles=tuple(sorted(set(numbers(text, MOST)))))
    except ValueError:
        pass
    raise UserError("tiles-ask", f"{text!r} does not say which tiles", expected=_EXPECTED,
                    fix="correct TILEWORK_TILES, --tiles or tiles=")  # fmt: skip


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return min(value, 10**9)  # larger than any node: capped() says what the session gets


def capped(ask: Ask, node: Node) -> tuple[Ask, str]:
    """The ask, no larger than the node, and a line that says so where it was."""
    kind = [t for t in node.tiles if (t.gpu is not None) == ask.gpu]
    if not kind:
        raise UserError("tiles-ask", f"this node has no {'GPU' if ask.gpu else 'CPU'} tiles", found=str(ask),
                        fix="see tilework tiles")  # fmt: skip
    if ask.tiles is not None:
        have = tuple(sorted({t.index for t in node.tiles} & set(ask.tiles)))
        if not have:
            raise UserError("tiles-ask", "none of the tiles that were asked for is on this node",
                            found=", ".join(map(str, ask.tiles[:8])), expected=f"0 to {len(node.tiles) - 1}")  # fmt: skip
        made = Ask(tiles=have, flexible=ask.flexible)
        return made, "" if len(have) == len(set(ask.tiles)) else _line(ask, f"{len(have)} of them")
    if ask.count is not None:
        made = Ask(count=min(ask.count, len(kind)), gpu=ask.gpu, flexible=ask.flexible)
        return made, "" if made.count == ask.count else _line(ask, str(made))
    made = Ask(chips=min(ask.chips or 1, len({t.chip for t in kind})), gpu=ask.gpu, flexible=ask.flexible or ask.is_default)
    return made, "" if made.chips == (ask.chips or 1) else _line(ask, str(made))


def _line(ask: Ask, have: str) -> str:
    return f"{ask} asked for; this node has {have}, which is what the session gets"
