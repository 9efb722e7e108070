"""tilework tiles: what this machine has, who holds it, and what an administrator does about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ..errors import UserError
from ..tiles import client, messages
from ..tiles.reset import reset
from .output import duration, out, print_json

NAME = "tiles"
HELP = "List the tiles of this machine and who holds them; drain tiles, or reset a session."
EXAMPLE = "Example: tilework tiles --json"


def command(
    platform: Annotated[str | None, typer.Option(help="host, a named platform, or the site's own.")] = None,
    drain: Annotated[str | None, typer.Option(metavar="PATH", help="Give these tiles to no new session (root).")] = None,
    undrain: Annotated[str | None, typer.Option(metavar="PATH", help="Take them into use again (root).")] = None,
    reason: Annotated[str, typer.Option(help="Why they are drained.")] = "",
    reset_tile: Annotated[
        str | None, typer.Option("--reset", metavar="PATH", help="End the session that holds these tiles (its owner, or root).")
    ] = None,
    stack: Annotated[bool, typer.Option(help="Show where hung sessions are.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    if sum(x is not None for x in (drain, undrain, reset_tile)) > 1:
        raise UserError("tiles-ask", "one of --drain, --undrain and --reset at a time")
    if drain is not None or undrain is not None:
        with client.talking() as ask:
            done = ask(messages.Drain(drain or undrain or "", drain is not None, reason))
        word = "drained" if drain else "in use again"
        print_json(done) if json else out.print(f"{word}: {', '.join(done['tiles'])}", markup=False)
        return
    seen = client.view(platform=platform)
    if reset_tile is not None:
        ended = reset(seen, reset_tile)
        if json:
            print_json(ended)
        for one in ended if not json else ():
            how = signal.Signals(one["signal"]).name if one["signal"] else "it was gone"
            out.print(f"reset: pid {one['pid']} ({one['user']}, {one['command']}): {how}", markup=False)
        return
    if json:
        print_json(seen)
        return
    _print(seen, stack)


def _print(seen: Mapping[str, Any], stack: bool) -> None:
    leases = {lease["id"]: lease for lease in seen["leases"]}
    table = Table(box=None, pad_edge=False)
    for column in ("TILE", "CPUS", "STATE", "PID", "USER", "HELD", "COMMAND"):
        table.add_column(column, no_wrap=column != "COMMAND")
    for tile in seen["tiles"]:
        lease = leases.get(tile["lease"])
        where = f"GPU {tile['gpu']}" if tile["gpu"] is not None else ",".join(map(str, tile["cpus"]))
        if lease:
            table.add_row(tile["path"], where, state(lease), str(lease["pid"]), lease["user"],
                          duration(lease["held_seconds"]), Text(lease["command"]))  # fmt: skip
        else:
            drained = tile["drained"]
            table.add_row(tile["path"], where, Text("free" if drained is None else f"drained {drained}".strip()))
    out.print(table)
    for waiting in seen["queue"]:
        out.print(f"waiting: {waiting['ask']} for {waiting['user']}, pid {waiting['pid']}, "
                  f"{duration(waiting['waited_seconds'])}: {waiting['command']}", markup=False)  # fmt: skip
    if seen["note"]:
        out.print(f"# {seen['note']}", markup=False)
    for lease in seen["leases"] if stack else ():
        if lease["hung"]:
            out.print(f"\npid {lease['pid']}, stuck for {duration(lease['stuck_seconds'])}:\n{lease['stack'] or 'no stack: '}"
                      f"{'' if lease['stack'] else 'the daemon may not ask this process for it'}", markup=False)  # fmt: skip


def state(lease: Mapping[str, Any]) -> str:
    """In words: what the holder is doing."""
    if lease["hung"]:
        return "hung"
    idle = lease.get("idle_seconds", 0.0)
    return f"held, idle for {duration(idle)}" if idle >= 10 else f"held, {lease['state']}"
