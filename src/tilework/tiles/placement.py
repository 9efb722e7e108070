"""Which tiles a request gets, and who is next. Pure functions.

Packing: a request that fits on one chip goes to the chip with the fewest free tiles that still holds it, so that whole chips stay
whole; among equals, to the one whose cores have the fewest held tiles. Order: first come, first served. A later request may go
first only with tiles that the head of the queue could not use in any placement, so the head is never delayed. A process gets only
tiles whose CPUs it may use, all of them: taskset, a container or a batch system may have confined it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from .asks import Ask
from .topology import Node, Tile


def inside(node: Node, cpus: Set[int]) -> set[int]:
    """The tiles whose CPUs all are among those that a process may use. A GPU's tile needs no core of its own."""
    return {t.index for t in node.tiles if t.gpu is not None or set(t.cpus) <= cpus}


def fitted(node: Node, within: Set[int], ask: Ask) -> Ask | None:
    """The ask, as those tiles could serve it if all of them were free; None: never."""
    if choose(node, within, ask) is not None:
        return ask
    if not ask.flexible:
        return None
    if ask.tiles is not None:
        left = tuple(i for i in ask.tiles if i in within)
        return Ask(tiles=left) if left else None
    chips = [sum(t.index in within for t in chip) for chip in node.chips if (chip[0].gpu is not None) == ask.gpu]
    count = max(chips, default=0) if ask.count is None else min(ask.count, sum(chips))
    return Ask(count=count, gpu=ask.gpu) if count else None


def choose(node: Node, free: Set[int], ask: Ask, held: Set[int] | None = None) -> list[int] | None:
    """Tiles for the ask out of the free ones; None if they do not suffice. Cores with few held tiles come first (held: all that
    are not free, unless somebody says otherwise)."""
    if ask.tiles is not None:
        return sorted(ask.tiles) if set(ask.tiles) <= free else None
    load = _load(node, {t.index for t in node.tiles} - free if held is None else held)
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


def _load(node: Node, held: Set[int]) -> dict[int, int]:
    """CPU -> held tiles on it."""
    load: dict[int, int] = {}
    for i in held:
        for cpu in node.tiles[i].cpus:
            load[cpu] = load.get(cpu, 0) + 1
    return load


def _weight(tiles: Iterable[Tile], load: Mapping[int, int]) -> int:
    return sum(load.get(cpu, 0) for tile in tiles for cpu in tile.cpus)


def share_of(tiles: tuple[int, ...], which: int, parts: int) -> tuple[int, ...]:
    """One of several parts of a job's tiles, as even as can be. With fewer tiles than parts, some share one."""
    if len(tiles) < parts:
        return (tiles[which % len(tiles)],) if tiles else ()
    return tiles[len(tiles) * which // parts : len(tiles) * (which + 1) // parts]


def useful(node: Node, usable: Set[int], ask: Ask) -> set[int]:
    """Every tile that some placement of the ask could include; `usable` are those that are not drained."""
    if ask.tiles is not None:
        return set(ask.tiles)
    chips = [chip for chip in node.chips if (chip[0].gpu is not None) == ask.gpu]
    if ask.count is None:
        chips = [c for c in chips if all(t.index in usable for t in c)]
    return {t.index for c in chips for t in c} & usable


def grants(
    node: Node, free: Set[int], usable: Set[int], queue: Sequence[tuple[object, Ask, Set[int]]], held: Set[int] | None = None
) -> list[tuple[object, list[int]]]:
    """Who of the queue gets tiles now, in order: (request, tiles). The queue: (request, ask, the tiles that it may have)."""
    made: list[tuple[object, list[int]]] = []
    left, kept = set(free), set[int]()
    for request, ask, within in queue:
        tiles = choose(node, (left - kept) & within, ask, held)
        if tiles is not None:
            made.append((request, tiles))
            left -= set(tiles)
        elif not kept and choose(node, usable & within, ask) is not None:
            # What drained tiles make impossible keeps nobody waiting.
            kept = useful(node, usable & within, ask)
    return made
