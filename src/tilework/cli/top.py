"""tilework top: all tiles and sessions, live. A map of the tiles, then one line a session."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..tiles import client
from .output import duration, size
from .tiles import state

NAME = "top"
HELP = "Watch tiles and sessions: who holds what, what it is doing, how fast. q ends it."
EXAMPLE = "Example: tilework top --interval 2"

# What a tile does most: (letter, colour). The letter says the same without colour.
_SHOWN = {"free": ("·", "bright_black"), "idle": ("o", "yellow"), "exec": ("█", "green"), "pload": ("L", "magenta"),
          "aload": ("A", "cyan"), "chkpt": ("C", "blue"), "quiesce": ("Q", "bright_yellow"), "hung": ("!", "bold red"),
          "drained": ("x", "red")}  # fmt: skip
_ROW = "{:>7} {:<9} {:>5} {:>5} {:>10} {:>9} {:>9} {:>7}"


def command(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Print one look and end.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Save one look as a picture.")] = None,
    platform: Annotated[str | None, typer.Option(help="host, a named platform, or the site's own.")] = None,
) -> None:
    console = Console(record=True, width=100, height=30, force_terminal=True) if svg is not None else Console()
    if once or svg is not None or not console.is_terminal or console.is_dumb_terminal:
        client.view(2.0, platform)
        console.print(screen(client.view(2.0, platform), console.width, console.height))
        if svg is not None:
            console.save_svg(str(svg), title="tilework top")
        return
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            seen = client.view(max(2.0, interval), platform)
            live.update(screen(seen, console.width, console.height), refresh=True)
            if pressed(interval) in ("q", "\x03"):
                return


@contextmanager
def _keys() -> Iterator[Any]:
    """pressed(seconds): waits that long for a key. Without a keyboard it only waits."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (termios.error, ValueError, OSError):
        yield lambda seconds: time.sleep(seconds)
        return

    def pressed(seconds: float) -> str:
        ready = select.select([fd], [], [], seconds)[0]
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def screen(seen: Mapping[str, Any], width: int, height: int) -> RenderableType:
    """One look, no larger than the terminal."""
    leases = {lease["id"]: lease for lease in seen["leases"]}
    held = sum(t["lease"] is not None for t in seen["tiles"])
    head = Text(f"{seen['title']}  {len(seen['tiles'])} tiles, {held} held, {seen['num_waiting']} waiting  ", style="bold")
    head.append(time.strftime("%H:%M:%S"), style="bright_black")
    parts: list[RenderableType] = [head]
    if seen["note"]:
        parts.append(Text(seen["note"], style="bright_black", no_wrap=True, overflow="ellipsis"))
    tiles = _map(seen, leases, width)
    parts += tiles
    parts.append(_legend())
    left = max(3, height - len(parts) - 2)
    parts.append(Text(""))
    parts.append(_sessions(seen, left))
    return Group(*parts)


def _map(seen: Mapping[str, Any], leases: Mapping[str, Any], width: int) -> list[RenderableType]:
    """Each chip is a name and a cell a tile; as many chips side by side as fit."""
    chips: dict[int, list[Mapping[str, Any]]] = {}
    for tile in seen["tiles"]:
        chips.setdefault(tile["chip"], []).append(tile)
    cells = []
    for tiles in chips.values():
        text = Text(tiles[0]["path"].rsplit("/", 1)[0][1:] + " ")
        for tile in tiles:
            letter, colour = _SHOWN[_doing(tile, leases.get(tile["lease"]))]
            text.append(letter, style=colour)
        cells.append(text)
    widest = max(len(c) for c in cells) + 3
    columns = max(1, min(len(cells), width // widest))
    rows = -(-len(cells) // columns)
    lines: list[RenderableType] = []
    for row in range(rows):
        line = Text(no_wrap=True, overflow="ellipsis")
        for column in range(columns):
            i = column * rows + row
            if i < len(cells):
                line.append_text(cells[i])
                line.append(" " * (widest - len(cells[i])))
        lines.append(line)
    return lines


def _doing(tile: Mapping[str, Any], lease: Mapping[str, Any] | None) -> str:
    if lease is None:
        return "free" if tile["drained"] is None else "drained"
    if lease["hung"]:
        return "hung"
    busy = {k: v for k, v in lease["shares"].items() if k != "idle"}
    most = max(busy, key=busy.__getitem__) if busy else "idle"
    return most if busy and busy[most] >= 5.0 else "idle"


def _legend() -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for name, (letter, colour) in _SHOWN.items():
        text.append(letter, style=colour)
        text.append(f" {name}  ", style="bright_black")
    return text


def _sessions(seen: Mapping[str, Any], rows: int) -> RenderableType:
    """Two lines a session: its numbers, then what it is and does."""
    if not seen["leases"] and not seen["queue"]:
        return Text("nobody holds a tile", style="bright_black")
    lines = [Text(_ROW.format("PID", "USER", "TILES", "%EXEC", "STEPS/S", "LOSS", "MEM", "HELD"), style="bold")]
    room = max(1, (rows - 2) // 2)
    shown = seen["leases"][:room]
    for lease in shown:
        loss, rate = lease.get("loss"), lease.get("steps_per_second", 0.0)
        lines.append(Text(_ROW.format(
            lease["pid"], lease["user"][:9], len(lease["tiles"]), f"{lease['shares']['exec']:.0f}",
            f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}", "" if loss is None else f"{loss:.4g}",
            size(lease.get("memory_bytes", 0)), duration(lease["held_seconds"]))))  # fmt: skip
        second = Text(f"{'':>8}")
        second.append(state(lease), style=_colour(lease))
        second.append(f"  {'[' + lease['job'] + '] ' if lease['job'] else ''}{lease['command']}", style="bright_black")
        lines.append(second)
    waiting = seen["queue"][: max(0, 2 * (room - len(shown)))]
    for w in waiting:
        waited = duration(w["waited_seconds"])
        lines.append(Text(f"{w['pid']:>7} {w['user'][:9]:<9} waits for {w['ask']}, {waited}: {w['command']}",
                          style="bright_black"))  # fmt: skip
    more = len(seen["leases"]) + len(seen["queue"]) - len(shown) - len(waiting)
    if more > 0:
        lines.append(Text(f"and {more} more", style="bright_black"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _colour(lease: Mapping[str, Any]) -> str:
    return "bold red" if lease["hung"] else "yellow" if lease.get("idle_seconds", 0) >= 10 else "green"
