"""node -> board -> chip -> tile. The shape is the machine's own (platform `host`), a named one, or the site file's. Distributions
bring named ones by entry points of the group tilework.platforms: modules with PLATFORMS = {name: what a site file's [shape] has}.

On a named platform the tiles are virtual: they share the machine's cores in a fixed way. Of T tiles on n cores, tile i has the
cores from floor(i n / T) up to floor((i + 1) n / T), at least one: neighbours share a core where there are more tiles than cores.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ..errors import UserError, did_you_mean
from .machine import Core, Gpu, Machine, machine
from .site import Shape, Site, read_site

if TYPE_CHECKING:
    from .records import Record
    from .view import View

log = logging.getLogger("tilework.tiles")
HOST = "host"
LEVELS = ("board", "chip", "tile")
GPU_TILES = 4  # a GPU is leased in quarters


@dataclass(frozen=True)
class Tile:
    index: int
    path: str
    board: int
    chip: int  # counted through the whole node
    cpus: tuple[int, ...]
    memory_node: int = 0
    gpu: int | None = None
    multiprocessors: int = 0  # this tile's share of the GPU


@dataclass(frozen=True)
class Node:
    platform: str
    title: str
    levels: tuple[str, str, str]
    virtual: bool
    tiles: tuple[Tile, ...]

    @property
    def chips(self) -> list[list[Tile]]:
        found: dict[int, list[Tile]] = {}
        for tile in self.tiles:
            found.setdefault(tile.chip, []).append(tile)
        return [found[c] for c in sorted(found)]

    @property
    def note(self) -> str:
        """What must be said beside any table of virtual tiles; empty for real ones."""
        if not self.virtual:
            return ""
        count = len({cpu for t in self.tiles for cpu in t.cpus})
        return f"{len(self.tiles)} virtual tiles on {count} CPUs: they share them; a process's time is shown on each of its tiles"

    def find(self, path: str) -> list[Tile]:
        """The tiles at a path: a tile, a chip or a board. Never the whole node: an unset variable must not mean everything."""
        if not path.startswith("/") or not path.strip("/"):
            first = self.tiles[0].path
            raise UserError("tiles-path", f"{path!r} names no board, chip or tile",
                            expected=f"{first.rsplit('/', 2)[0]}, {first.rsplit('/', 1)[0]} or {first}",
                            fix="see tilework tiles; name the boards one by one to mean all of them")  # fmt: skip
        found = [t for t in self.tiles if f"{t.path}/".startswith(path.rstrip("/") + "/")]
        if not found:
            raise UserError("tiles-path", f"no tile {path!r} on this node", found=path,
                            expected=f"{self.tiles[0].path} to {self.tiles[-1].path}", fix="see tilework tiles")  # fmt: skip
        return found


def node_of(seen: View) -> Node:
    """The node as the daemon sees it, from its view: its site file is not everybody's."""
    tiles = [Tile(i, t.path, _board(t.path), t.chip, t.cpus, t.memory_node, t.gpu, t.multiprocessors)
             for i, t in enumerate(seen.tiles)]  # fmt: skip
    return Node(seen.platform, seen.title, seen.levels, seen.virtual, tuple(tiles))


def taken_up(node: Node, record: Record) -> tuple[int, ...]:
    """The tiles of this node that a live lease takes up: its own where the node is the same as then; else, because the site file,
    the platform or the cores that the daemon may see have changed, every tile that has one of its cores or its GPU."""
    cpus, gpus = set(record.cpus), set(record.gpus)
    same = record.platform == node.platform and all(0 <= i < len(node.tiles) for i in record.tiles)
    if not record.tiles or (same and {cpu for i in record.tiles for cpu in node.tiles[i].cpus} == cpus):
        return record.tiles
    found = tuple(t.index for t in node.tiles if (t.gpu in gpus if t.gpu is not None else cpus & set(t.cpus)))
    log.warning("lease %s of pid %d is of another shape of this node (%s); it keeps %d tiles of %s from others",
                record.id, record.pid, record.platform, len(found), node.platform)  # fmt: skip
    return found


@cache
def _named() -> dict[str, Shape]:
    return {k: Shape(**v) for point in entry_points(group="tilework.platforms") for k, v in point.load().PLATFORMS.items()}


def platforms() -> list[str]:
    return [HOST, *_named()]


def asked_platform() -> str | None:
    """What the environment asks for, if anything."""
    return os.environ.get("TILEWORK_PLATFORM") or None


def detect(platform: str | None = None, site: Site | None = None, here: Machine | None = None) -> Node:
    """The node: `platform`, else TILEWORK_PLATFORM, else what the site file says, else the machine as it is."""
    site, here = site or read_site(), here or machine()
    name = platform or asked_platform() or site.platform or HOST
    if site.shape is not None and name == site.shape.title:
        return _shaped(name, site.shape, here.cores, site)
    if name != HOST:
        if name in _named():
            return _shaped(name, _named()[name], here.cores, site)
        known = [*platforms(), *([site.shape.title] if site.shape else [])]
        if name == site.platform:
            raise site.wrong("platform", f"no platform {name!r}", expected=did_you_mean(name, known))
        raise UserError("tiles-platform", f"no platform {name!r}", expected=did_you_mean(name, known),
                        fix="choose it with --platform or TILEWORK_PLATFORM, or describe it in the site file")  # fmt: skip
    return Node(HOST, "host", LEVELS, False, _own(LEVELS, here))


def _own(levels: Sequence[str], here: Machine) -> tuple[Tile, ...]:
    """A package is a board, a memory node a chip, a core a tile; then each GPU is a board with one chip."""
    tiles: list[Tile] = []
    boards = sorted({c.package for c in here.cores})
    chip = 0
    for b, package in enumerate(boards):
        for place, node in enumerate(sorted({c.memory_node for c in here.cores if c.package == package})):
            for t, core in enumerate(c for c in here.cores if (c.package, c.memory_node) == (package, node)):
                tiles.append(Tile(len(tiles), _path(levels, b, place, t), b, chip, core.cpus, node))
            chip += 1
    for gpu in here.gpus:
        board = len(boards) + gpu.index
        near = [c for c in here.cores if c.memory_node == gpu.memory_node] or list(here.cores)
        for t in range(GPU_TILES):
            tiles.append(_gpu_tile(len(tiles), _path(levels, board, 0, t), board, chip, gpu, near, t))
        chip += 1
    return tuple(tiles)


def _gpu_tile(index: int, path: str, board: int, chip: int, gpu: Gpu, near: Sequence[Core], t: int) -> Tile:
    """A share of the multiprocessors. Its host thread may run on any core near the GPU."""
    cpus = tuple(sorted(cpu for c in near for cpu in c.cpus))
    count = gpu.multiprocessors
    share = (t + 1) * count // GPU_TILES - t * count // GPU_TILES
    return Tile(index, path, board, chip, cpus, gpu.memory_node, gpu.index, share)


def _shaped(name: str, shape: Shape, cores: Sequence[Core], site: Site) -> Node:
    tiles: list[Tile] = []
    levels = shape.levels or LEVELS
    total, n = shape.boards * shape.chips * shape.tiles, len(cores)
    for i in range(total):
        chip = i // shape.tiles
        board = chip // shape.chips
        if shape.cpus is not None:
            cpus = tuple(shape.cpus[i])
            own = [c for c in cores if set(c.cpus) & set(cpus)]
            missing = set(cpus) - {cpu for c in cores for cpu in c.cpus}
            if missing:
                raise site.wrong("shape.cpus", f"shape.cpus gives tile {i} CPUs that this machine does not have",
                                 found=str(sorted(missing)), fix="see lscpu")  # fmt: skip
        else:
            own = list(cores[i * n // total : max(i * n // total + 1, (i + 1) * n // total)])
            cpus = tuple(sorted(cpu for c in own for cpu in c.cpus))
        path = _path(levels, board, chip % shape.chips, i % shape.tiles)
        tiles.append(Tile(i, path, board, chip, cpus, own[0].memory_node if own else 0))
    taken = [cpu for t in tiles for cpu in t.cpus]
    return Node(name, shape.title, levels, len(taken) != len(set(taken)) or shape.cpus is None, tuple(tiles))


def _board(path: str) -> int:
    return int(path.split("/")[1].rsplit("_", 1)[1])


def _path(levels: Sequence[str], board: int, chip: int, tile: int) -> str:
    return f"/{levels[0]}_{board}/{levels[1]}_{chip}/{levels[2]}_{tile}"
