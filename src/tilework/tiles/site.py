"""The site file: what an administrator says about this machine. TOML, every key optional:

platform = "lab"             # a named platform, or the name of [shape]

[shape]                      # another shape
title = "lab"
boards = 1
chips = 2                    # on each board
tiles = 4                    # on each chip
levels = ["A", "B", "TILE"]   # what boards, chips and tiles are called
cpus = [[0], [1], ...]       # one list a tile; without it the tiles share all cores

[limits]
tiles_per_user = 32
requests_per_user = 64       # waiting at one time
wait_seconds = 600           # how long a session waits for its tiles, unless it says otherwise
hung_seconds = 120           # inside a section without progress for so long: hung

[jobs]
gres_per = "node"            # or "task": what a count of generic resources (--gres) is for

[cluster]                    # other nodes, whose daemons listen (tilework daemon install --listen)
token_file = "/etc/tilework/token"
port = 9464
nodes = ["node1", "node2=10.0.0.2:9465"]   # without it, those that sinfo lists
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import UserError

MOST_TILES = 1024
_FIX = "docs/tiles.md has a site file with every key"
PLACES = ("/etc/tilework/site.toml", "~/.config/tilework/site.toml")


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    boards: int
    chips: int
    tiles: int
    levels: tuple[str, str, str] | None = None  # None: board, chip, tile
    cpus: list[list[int]] | None = None


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tiles_per_user: int | None = None
    requests_per_user: int = 64
    wait_seconds: float = 600.0
    hung_seconds: float = 120.0


class Jobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gres_per: Literal["node", "task"] = "node"


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_file: str = "/etc/tilework/token"
    port: int = 9464
    nodes: list[str] = []


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    platform: str | None = None
    shape: Shape | None = None
    limits: Limits = Limits()
    jobs: Jobs = Jobs()
    cluster: Cluster = Cluster()


class Site(_Content, frozen=True):
    """The content, and where it was read: mistakes that show only on the machine itself have a line too."""

    path: Path | None = None
    text: str = ""

    def wrong(self, key: str, why: str, found: str = "", expected: str = "", fix: str = _FIX) -> UserError:
        """The mistake at a key, such as shape.tiles."""
        line = _line_of_key(self.text, key.split("."))
        where = f"{self.path}{f':{line}' if line else ''}" if self.path else "the site file"
        return UserError("site-file", f"{where}: {why}", found=found, expected=expected, fix=fix)


def site_path() -> Path | None:
    own = os.environ.get("TILEWORK_SITE")
    if own:
        return Path(own)
    for text in PLACES:
        path = Path(text).expanduser() if not text.startswith("~") or os.environ.get("HOME") else None
        try:
            if path is not None and path.exists():
                return path
        except OSError:  # somebody else's home
            continue
    return None


def read_site(path: Path | None = None) -> Site:
    path = path or site_path()
    if path is None:
        return Site()
    try:
        content = path.read_bytes()
    except OSError as e:
        raise UserError("site-file", f"{path}: the site file cannot be read", found=str(e),
                        fix="correct TILEWORK_SITE, or the file's permissions") from e  # fmt: skip
    try:
        text = content.decode()
        site = Site(path=path, text=text)
        found = msgspec.convert(tomllib.loads(text), _Content)
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise UserError("site-file", f"{path}:{line}: not UTF-8", found=f"byte 0x{content[e.start]:02x}",
                        fix="save the file as UTF-8") from e  # fmt: skip
    except tomllib.TOMLDecodeError as e:
        place = re.search(r"at line (\d+)", str(e))
        raise UserError("site-file", f"{path}{f':{place[1]}' if place else ''}: not TOML: {e}",
                        fix=_FIX) from e  # fmt: skip
    except msgspec.ValidationError as e:
        raise site.wrong(_key_of(str(e)), str(e)) from e
    site = Site(found.platform, found.shape, found.limits, found.jobs, found.cluster, path, text)
    _check(site)
    return site


def _check(site: Site) -> None:
    """What the types do not say."""
    shape = site.shape
    if shape is not None:
        for key in ("boards", "chips", "tiles"):
            if not 1 <= getattr(shape, key) <= 4096:
                raise site.wrong(f"shape.{key}", f"shape.{key} must be from 1 to 4096")
        total = shape.boards * shape.chips * shape.tiles
        if total > MOST_TILES:
            raise site.wrong("shape.tiles", f"{total} tiles in all; at most {MOST_TILES}")
        if shape.cpus is not None and len(shape.cpus) != total:
            raise site.wrong("shape.cpus", f"shape.cpus has {len(shape.cpus)} lists for {total} tiles")
        if shape.cpus is not None and not all(shape.cpus):
            raise site.wrong("shape.cpus", f"shape.cpus gives tile {shape.cpus.index([])} no CPU")
        for name in shape.levels or ():
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):  # they are parts of paths, and words in tables
                raise site.wrong("shape.levels", f"shape.levels: {name!r} is no name", expected="letters, digits, - and _")
    for key in ("tiles_per_user", "requests_per_user", "wait_seconds", "hung_seconds"):
        value = getattr(site.limits, key)
        if value is not None and not value > 0:  # nan is not either
            raise site.wrong(f"limits.{key}", f"limits.{key} must be more than 0")


def _key_of(message: str) -> str:
    """The key that msgspec's message is about: '... - at `$.shape.tiles`', or an unknown field's own name."""
    named = re.search(r"at `\$\.?([^`\[]*)", message)
    unknown = re.search(r"unknown field `([^`]+)`", message)
    return ".".join(part[1] for part in (named, unknown) if part and part[1])


def _line_of_key(text: str, wanted: list[str]) -> int | None:
    """The line of a key; else of the nearest thing above it: an inline table, the head of its table, part of a dotted key."""
    table: list[str] = []
    best, found = 0, None
    for number, line in enumerate(text.splitlines(), 1):
        # Not a line of a list of lists, such as cpus has: a name begins with no digit.
        head = re.match(r"\s*\[+\s*([A-Za-z_\"'][\w\s.\"'-]*)\]+\s*(#|$)", line)
        key = re.match(r"\s*([\w\"'][\w\s.\"'-]*)=", line)
        if head:
            here = table = _names(head[1])
        elif key:
            here = table + _names(key[1])
        else:
            continue
        shared = min(len(here), len(wanted))
        if shared > best and here[:shared] == wanted[:shared]:
            best, found = shared, number
    return found


def _names(dotted: str) -> list[str]:
    return [part.strip(" \t\"'") for part in dotted.split(".")]
