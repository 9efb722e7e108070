"""The machine's chips as those commands number them, and who holds them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tilework.errors import TileworkError
from tilework.tiles.client import view
from tilework.tiles.view import SessionView, TileView


@dataclass(frozen=True)
class Device:
    number: int
    tiles: tuple[TileView, ...]
    holders: tuple[SessionView, ...]

    @property
    def state(self) -> str:
        return ", ".join(dict.fromkeys(t.state for t in self.tiles))

    @property
    def busy(self) -> float:
        """Percent of the time that its holders computed, over all its tiles."""
        shares = [next((h.shares.get("exec", 0.0) for h in self.holders if h.id == t.lease), 0.0) for t in self.tiles]
        return sum(shares) / len(shares)


def devices() -> list[Device]:
    seen = view(2.0, os.environ.get("TILEWORK_PLATFORM"))
    leases = {lease.id: lease for lease in seen.leases}
    chips: dict[int, list[TileView]] = {}
    for tile in seen.tiles:
        chips.setdefault(tile.chip, []).append(tile)
    found = []
    for number, tiles in enumerate(chips.values()):
        ids = dict.fromkeys(t.lease for t in tiles if t.lease is not None)
        found.append(Device(number, tuple(tiles), tuple(leases[i] for i in ids if i in leases)))
    return found


def groups(count: int) -> list[list[int]]:
    """Devices that can be used together: 2, 4, 8 ... neighbours."""
    found, size = [], 2
    while size <= count:
        found += [list(range(i, i + size)) for i in range(0, count - size + 1, size)]
        size *= 2
    return found


def host() -> str:
    return socket.gethostname()


def guarded(name: str, act: Callable[[], None]) -> int:
    """The exit code of a command."""
    try:
        act()
        sys.stdout.flush()
    except TileworkError as e:
        print(f"{name}: {e}", file=sys.stderr)
        return e.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gc-info -l | head
    return 0
