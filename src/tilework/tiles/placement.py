"""Which tiles a request gets, and who is next. Pure functions.

Packing: a request that fits on one chip goes to the chip with the fewest free tiles that still holds it, so that whole chips stay
whole; among equals, to the one whose cores have the fewest held tiles. Order: first come, first served. A later request may go
first only with tiles that the head of the queue could not use in any placement, so the head is never delayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from .asks import Ask
from .topology import Node, Tile


def choose(node: Node, free: Set[int], ask: Ask) -> list[int] | None:
    """Tiles for the ask out of the free ones; None if they do not suffice."""
    if ask.tiles is not None:
        return sorted(ask.tiles) if set(ask.tiles) <= free else None
    load = _load(node, free)
    chips = [chip for chip in node.chips if (chip[0].gpu is not None) == ask.gpu]
    if ask.count is None:
        whole = sorted((c for c in chips if all(t.index in free for t in c)), key=lambda c: (_weight(c, load), c[0].index))
        wanted = whole[: ask.chips or 1]
        return sorted(t.index for c in wanted for t in c) if len(wanted) == (ask.chips or 1) else None
    have = [[t for t in chip if t.index in free] for chip in chips]
    if sum(map(len, have)) < ask.count:
        return None
    return sorted(t.index for t in _packed(have, ask.count, load))


def _packed(have: Sequence[list[Tile]], count: int, load: Mapping[int, int]) -> list[Tile]:
    taken: list[Tile] = []
    left = [c for c in have if c]
    while count > 0:
        fits = [c for c in left if len(c) >= count]
        # The tightest chip that holds the rest; where none does, the fullest supply, near what is taken already.
        near = {t.board for t in taken}
        if fits:
            best = min(fits, key=lambda c: (len(c), c[0].board not in near, _weight(c, load), c[0].index))
        else:
            best = min(left, key=lambda c: (-len(c), c[0].board not in near, _weight(c, load), c[0].index))
        part = sorted(best, key=lambda t: (_weight([t], load), t.index))[:count]
        taken += part
        count -= len(part)
        left.remove(best)
    return taken


def _load(node: Node, free: Set[int]) -> dict[int, int]:
    """CPU -> held tiles on it."""
    load: dict[int, int] = {}
    for tile in node.tiles:
        if tile.index not in free:
            for cpu in tile.cpus:
                load[cpu] = load.get(cpu, 0) + 1
    return load


def _weight(tiles: Iterable[Tile], load: Mapping[int, int]) -> int:
    return sum(load.get(cpu, 0) for tile in tiles for cpu in tile.cpus)


def useful(node: Node, usable: Set[int], ask: Ask) -> set[int]:
    """Every tile that some placement of the ask could include; `usable` are those that are not drained."""
    if ask.tiles is not None:
        return set(ask.tiles)
    chips = [chip for chip in node.chips if (chip[0].gpu is not None) == ask.gpu]
    if ask.count is None:
        chips = [c for c in chips if all(t.index in usable for t in c)]
    return {t.index for c in chips for t in c} & usable


def grants(node: Node, free: Set[int], usable: Set[int], queue: Sequence[tuple[object, Ask]]) -> list[tuple[object, list[int]]]:
    """Who of the queue gets tiles now, in order: (request, tiles)."""
    made: list[tuple[object, list[int]]] = []
    left, kept = set(free), set[int]()
    for request, ask in queue:
        tiles = choose(node, left - kept, ask)
        if tiles is not None:
            made.append((request, tiles))
            left -= set(tiles)
        elif not kept and choose(node, usable, ask) is not None:  # what drained tiles make impossible keeps nobody waiting
            kept = useful(node, usable, ask)
    return made
