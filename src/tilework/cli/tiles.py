"""tilework tiles: what this machine has, who holds it, and what an administrator does about it."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..errors import UserError
from ..tiles import client, messages
from ..tiles.machine import numbers, ranges
from ..tiles.reset import reset
from ..tiles.topology import node_of
from .output import duration, err, out, print_json

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
    history: Annotated[int, typer.Option(metavar="N", min=0, max=1000, help="Show the last N leases instead.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    if sum(x is not None for x in (drain, undrain, reset_tile)) + bool(history) > 1:
        raise UserError("tiles-ask", "one of --drain, --undrain, --reset and --history at a time")
    if history:
        _history(history, json)
        return
    seen = client.view(platform=platform)
    path = next((p for p in (drain, undrain, reset_tile) if p is not None), None)
    if path is not None:
        if seen.get("platform_note"):  # a path means other cores on another platform
            raise UserError("tiles-platform", seen["platform_note"], fix="leave --platform out to change the tiles in use")
        node_of(seen).find(path)
    if drain is not None or undrain is not None:
        with client.talking() as ask:
            done = ask(messages.Drain(path or "", drain is not None, reason, seen["platform"]))
        word = "drained" if drain is not None else "in use again"
        print_json(done) if json else out.print(f"{word}: {', '.join(done['tiles'])}", markup=False)
        return
    if reset_tile is not None:
        ended = reset(seen, reset_tile)
        if json:
            print_json(ended)
        for one in ended if not json else ():
            how = signal.Signals(one["signal"]).name if one["signal"] else "it was gone"
            out.print(f"reset: pid {one['pid']} ({one['user']}, {one['command']}): {how}", markup=False)
        return
    if seen.get("platform_note"):  # a daemon from before an upgrade does not say
        err.print(f"tilework: {seen['platform_note']}", markup=False)
    if json:
        print_json(seen)
        return
    _print(seen, stack)


def _history(limit: int, json: bool) -> None:
    with client.talking() as ask:
        leases = ask(messages.History(limit))["leases"]
    if json:
        print_json(leases)
        return
    out.print(f"{'BEGAN':19}  {'HELD':>7}  {'USER':10}  {'PID':>7}  {'TILES':12}  {'ENDED':13}  COMMAND", markup=False)
    for lease in leases:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease["began"]))
        held = duration((lease["ended"] or time.time()) - lease["began"])
        how, tiles = lease["how"] or "still held", ranges(numbers(lease["tiles"]))
        out.print(f"{began}  {held:>7}  {lease['user']:10}  {lease['pid']:>7}  {tiles:12}  {how:13}  {lease['command']}",
                  markup=False)  # fmt: skip


def _print(seen: Mapping[str, Any], stack: bool) -> None:
    """One line a tile, however long its command is: a terminal wraps it, a script can read it."""
    leases = {lease["id"]: lease for lease in seen["leases"]}
    rows = [("TILE", "CPUS", "STATE", "PID", "USER", "HELD", "COMMAND")]
    for tile in seen["tiles"]:
        lease = leases.get(tile["lease"])
        where = f"GPU {tile['gpu']}" if tile["gpu"] is not None else ranges(tile["cpus"])
        drained = "" if tile["drained"] is None else f"drained {tile['drained']}".strip()
        if lease:
            doing = ", ".join(filter(None, (state(lease), drained)))
            rows.append((tile["path"], where, doing, str(lease["pid"]), lease["user"], duration(lease["held_seconds"]),
                         lease["command"]))  # fmt: skip
        else:
            rows.append((tile["path"], where, drained or "free", "", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1] + [0]
    for row in rows:
        out.print(" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), markup=False)
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
