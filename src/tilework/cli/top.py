"""tilework top: all tiles and sessions, live. A map of the tiles, then one line a session."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from ..errors import MachineError, UserError
from ..tiles import client
from ..tiles.view import SessionView, TileView, View
from .output import Screen, count, duration, size
from .tiles import state

NAME = "top"
HELP = "Watch tiles and sessions live: who holds what, what it is doing, how fast. q quits."
EXAMPLE = "Example: tilework top --interval 2"

# What a tile does most: (letter, colour). The letter says the same without colour.
_SHOWN = {"free": ("·", "bright_black"), "idle": ("o", "yellow"), "exec": ("█", "green"), "load": ("L", "magenta"),
          "copy": ("C", "cyan"), "save": ("S", "blue"), "wait": ("W", "bright_yellow"), "reduce": ("R", "bright_cyan"),
          "hung": ("!", "bold red"), "drained": ("x", "red")}  # fmt: skip
_SHORTEST, _LONGEST = 0.2, 86400.0  # seconds between two looks
_ROW = "{:>7} {:<9} {:>5} {:>5} {:>10} {:>9} {:>9} {:>7}"


def command(
    interval: Annotated[float, typer.Option(metavar="N", help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Save one screen as a picture.")] = None,
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="host, a named platform, or the site's own.")] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="All nodes of the cluster (docs: On a Slurm cluster).")] = False,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="All nodes of a partition of Slurm's.")] = None,
) -> None:
    if not _SHORTEST <= interval <= _LONGEST:  # nan is not either
        raise UserError("tiles-interval", "--interval is no time to wait between two looks", found=f"{interval:g}",
                        expected=f"from {_SHORTEST:g} to {_LONGEST:g} seconds")  # fmt: skip
    console = Screen(record=True, width=100, height=30, force_terminal=True) if svg is not None else Screen()

    def shown(window: float) -> RenderableType:
        if cluster or partition is not None:
            return _nodes(partition, console.width, console.height)
        return screen(client.view(window, platform), console.width, console.height)

    if once or svg is not None or not console.is_terminal or console.is_dumb_terminal:
        shown(2.0)
        console.print(shown(2.0))
        if svg is not None:
            _save(console, svg)
        return
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(shown(min(max(2.0, interval), 60.0)), refresh=True)
            if pressed(interval):
                return


def _nodes(partition: str | None, width: int, height: int) -> RenderableType:
    """All nodes of a cluster, each with its share of the screen."""
    from ..tiles.cluster import look

    found = look(partition)
    each = max(6, height // len(found) - 1)
    lines: list[RenderableType] = []
    for seen in found:
        lines.append(Text(f"{seen.node}  {seen.why and f'no answer: {seen.why}'}", style="bold red" if seen.why else "bold blue"))
        if seen.view is not None:
            lines.append(screen(seen.view, width, each))
    return Group(*lines)


def _save(console: Screen, svg: Path) -> None:
    try:
        console.save_svg(str(svg), title="tilework top")
    except OSError as e:
        raise MachineError("disk-permission", f"{svg}: the picture cannot be saved", found=str(e),
                           fix="choose a folder that exists and that you can write to") from e  # fmt: skip


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """pressed(seconds): waits that long for a key; True where one of them ends it. Without a keyboard it only waits."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (termios.error, ValueError, OSError):
        yield _wait
        return

    def pressed(seconds: float) -> bool:
        if not select.select([fd], [], [], seconds)[0]:
            return False
        try:
            keys = os.read(fd, 1024)  # all that were typed; sys.stdin would keep some back where select does not see them
        except OSError:
            return True
        return not keys or b"q" in keys or b"\x03" in keys  # none at all: the terminal is gone

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def screen(seen: View, width: int, height: int) -> RenderableType:
    """One look, no larger than the terminal."""
    held = sum(t.lease is not None for t in seen.tiles)
    tiles = count(len(seen.tiles), "tile")
    head = Text(f"{seen.title}  {tiles}, {held} held, {len(seen.shared)} shared, {seen.num_waiting} waiting  ", style="bold")
    head.append(time.strftime("%H:%M:%S"), style="bright_black")
    above = [head, *(Text(note, style="bright_black") for note in (seen.platform_note, seen.note) if note)]
    below = [*_legend(width), Text("")]
    least = 4 if seen.leases or seen.shared or seen.queue else 1  # a heading, one session, how many more there are
    room = max(1, height - len(above) - len(below) - least)
    lines = above + _map(seen, width, room) + below
    lines = (lines + _sessions(seen, max(least, height - len(lines))))[:height]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _map(seen: View, width: int, most: int) -> list[Text]:
    """Each chip is a name and a cell a tile; as many chips side by side as fit. A chip wider than the screen goes on below its
    name. What does not fit into `most` lines is counted in the last one."""
    chips: dict[int, list[TileView]] = {}
    for tile in seen.tiles:
        chips.setdefault(tile.chip, []).append(tile)
    cells: list[tuple[Text, list[str]]] = []  # and what its tiles do
    for tiles in chips.values():
        name = tiles[0].path.rsplit("/", 1)[0][1:] + " "
        name = name if len(name) <= width // 2 else "…" + name[1 - width // 2 :]
        fit = max(1, width - len(name))
        doing = [_doing(tile) for tile in tiles]
        for i in range(0, len(tiles), fit):
            text = Text(name if i == 0 else " " * len(name))
            for what in doing[i : i + fit]:
                text.append(*_SHOWN[what])
            cells.append((text, doing[i : i + fit]))
    widest = max(len(text) for text, _ in cells) + 3
    columns = max(1, min(len(cells), (width + 3) // widest))
    rows = -(-len(cells) // columns)
    hidden = [what for _, doing in cells[columns * (most - 1) :] for what in doing] if rows > most else []
    if hidden:
        rows = most - 1
        cells = cells[: columns * rows]
    lines = []
    for row in range(rows):
        line = Text()
        for text, _ in cells[row::rows]:  # down the columns
            line.append_text(text)
            line.append(" " * (widest - len(text)))
        line.rstrip()
        lines.append(line)
    if hidden:
        does = ", ".join(f"{hidden.count(what)} {what}" for what in _SHOWN if what in hidden)
        lines.append(Text(f"and {count(len(hidden), 'tile')} more: {does}", style="bright_black"))
    return lines


def _doing(tile: TileView) -> str:
    return tile.state if tile.state in ("free", "drained", "hung") else tile.activity


def _legend(width: int) -> list[Text]:
    lines = [Text()]
    for name, (letter, colour) in _SHOWN.items():
        gap = "  " if lines[-1] else ""
        if len(lines[-1]) + len(f"{gap}{letter} {name}") > width:
            lines.append(Text())
            gap = ""
        lines[-1].append(gap).append(letter, style=colour).append(f" {name}", style="bright_black")
    return lines


def _sessions(seen: View, rows: int) -> list[Text]:
    """Two lines a session: its numbers, then what it is and does."""
    sessions = [*seen.leases, *seen.shared]
    if not sessions and not seen.queue:
        return [Text("no session runs", style="bright_black")]
    lines = [Text(_ROW.format("PID", "USER", "TILES", "%EXEC", "STEPS/S", "LOSS", "MEM", "FOR"), style="bold")]
    room = max(1, (rows - 2) // 2)
    shown = sessions[:room]
    for x in shown:
        lines.append(Text(_ROW.format(
            x.pid, x.user[:9], len(x.tiles) or "-", f"{x.shares['exec']:.0f}" if x.shares else "?",
            f"{x.steps_per_second:,.0f}" if x.steps_per_second >= 10 else f"{x.steps_per_second:.1f}",
            "" if x.loss is None else f"{x.loss:.4g}", size(x.memory_bytes), duration(x.held_seconds))))  # fmt: skip
        second = Text(f"{'':>8}")
        second.append(f"{'shared, ' if x.kind == 'shared' else ''}{state(x)}", style=_colour(x))
        job = f"[job {x.job}] " if x.job else f"[{x.label}] " if x.label else ""
        second.append(f"  {job}{x.command}", style="bright_black")
        lines.append(second)
    waiting = seen.queue[: max(0, 2 * (room - len(shown)))]
    for w in waiting:
        lines.append(Text(f"{w.pid:>7} {w.user[:9]:<9} waits for {w.ask}, {duration(w.waited_seconds)}: {w.command}",
                          style="bright_black"))  # fmt: skip
    more = len(sessions) + max(len(seen.queue), seen.num_waiting) - len(shown) - len(waiting)
    if more > 0:
        lines.append(Text(f"and {more} more", style="bright_black"))
    return lines


def _colour(x: SessionView) -> str:
    return "bold red" if x.hung else "yellow" if x.idle_seconds >= 10 else "green"
