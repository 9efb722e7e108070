"""The site file: what an administrator says about this machine. TOML, every key optional:

platform = "SN30-8"          # a named platform, or the name of [shape]

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
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import msgspec

from ..errors import UserError

MOST_TILES = 1024
PLACES = ("/etc/tilework/site.toml", "~/.config/tilework/site.toml")


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    boards: int
    chips: int
    tiles: int
    levels: tuple[str, str, str] | None = None  # None: as on every other platform
    cpus: list[list[int]] | None = None


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tiles_per_user: int | None = None
    requests_per_user: int = 64
    wait_seconds: float = 600.0
    hung_seconds: float = 120.0


class Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    platform: str | None = None
    shape: Shape | None = None
    limits: Limits = Limits()


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
        text = path.read_text()
    except OSError as e:
        raise UserError("site-file", f"{path}: the site file cannot be read", found=str(e),
                        fix="correct TILEWORK_SITE, or the file's permissions") from e  # fmt: skip
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise _wrong(path, _line_of_error(str(e)), f"not TOML: {e}") from e
    try:
        site = msgspec.convert(content, Site)
    except msgspec.ValidationError as e:
        raise _wrong(path, _line_of_key(text, str(e)), str(e)) from e
    shape = site.shape
    if shape is not None:
        for key in ("boards", "chips", "tiles"):
            if not 1 <= getattr(shape, key) <= 4096:
                raise _wrong(path, _line_of_key(text, f"`$.shape.{key}`"), f"shape.{key} must be from 1 to 4096")
        total = shape.boards * shape.chips * shape.tiles
        if total > MOST_TILES:
            raise _wrong(path, _line_of_key(text, "`$.shape.tiles`"), f"{total} tiles in all; at most {MOST_TILES}")
        if shape.cpus is not None and len(shape.cpus) != total:
            raise _wrong(path, _line_of_key(text, "`$.shape.cpus`"), f"shape.cpus has {len(shape.cpus)} lists for {total} tiles")
    for key in ("tiles_per_user", "requests_per_user", "wait_seconds", "hung_seconds"):
        value = getattr(site.limits, key)
        if value is not None and value <= 0:
            raise _wrong(path, _line_of_key(text, f"`$.limits.{key}`"), f"limits.{key} must be more than 0")
    return site


def _wrong(path: Path, line: int | None, why: str) -> UserError:
    return UserError("site-file", f"{path}{f':{line}' if line else ''}: {why}",
                     fix="docs/tiles.md has a site file with every key")  # fmt: skip


def _line_of_error(message: str) -> int | None:
    found = re.search(r"at line (\d+)", message)
    return int(found[1]) if found else None


def _line_of_key(text: str, message: str) -> int | None:
    """The line of the key that a message is about: '... - at `$.shape.tiles`', or an unknown field's own name."""
    named = re.search(r"at `\$\.?([^`\[]*)", message) or re.search(r"`\$\.([^`\[]*)`", message)
    path = named[1].split(".") if named and named[1] else []
    unknown = re.search(r"unknown field `(\w+)`", message)
    if unknown:
        path.append(unknown[1])
    table, wanted = "", ".".join(path)
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*([\w.-]+)", line)
        key = re.match(r"\s*([\w-]+)\s*=", line)
        if header:
            table = header[1]
            if table == wanted:
                return number
        elif key and ".".join(filter(None, (table, key[1]))) == wanted:
            return number
    return None
