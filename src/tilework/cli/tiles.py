"""tilework tiles: what this machine has, who holds it, and what an administrator does about it."""

from __future__ import annotations

import signal
import time
from typing import Annotated

import msgspec
import typer

from ..errors import UserError
from ..tiles import client, messages
from ..tiles.machine import numbers, ranges
from ..tiles.reset import reset
from ..tiles.topology import node_of
from ..tiles.view import SessionView, View
from .output import duration, err, out, print_json

NAME = "tiles"
HELP = "List the tiles of this machine and the sessions on them. Drain tiles, or reset a session."
EXAMPLE = "Example: tilework tiles --json"


def command(
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="host, a named platform, or the site's own.")] = None,
    drain: Annotated[str | None, typer.Option(metavar="PATH", help="Give these tiles to no new session (root).")] = None,
    undrain: Annotated[str | None, typer.Option(metavar="PATH", help="Use them again (root).")] = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why they are drained.", show_default=False)] = "",
    reset_tile: Annotated[str | None, typer.Option("--reset", metavar="PATH",
                                                   help="End the session that holds these tiles (its owner, or root).")] = None,
    release_job: Annotated[bool, typer.Option("--release-job",
                                              help="Give back the tiles of the job that this command runs in.")] = False,
    stack: Annotated[bool, typer.Option("--stack", help="Show where hung sessions are.")] = False,
    history: Annotated[int, typer.Option(metavar="N", min=0, max=1000, show_default=False,
                                         help="Show the last N leases and sessions instead.")] = 0,
    cluster: Annotated[bool, typer.Option("--cluster", help="All nodes of the cluster (docs: On a Slurm cluster).")] = False,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="All nodes of a partition of Slurm's.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    if sum(x is not None for x in (drain, undrain, reset_tile)) + bool(history) + release_job > 1:
        raise UserError("tiles-ask", "one of --drain, --undrain, --reset, --release-job and --history at a time")
    if history:
        _history(history, json)
        return
    if cluster or partition is not None:
        _cluster(partition, stack, json)
        return
    seen = client.view(platform=platform)
    if release_job:
        _release_job(seen)
        return
    path = next((p for p in (drain, undrain, reset_tile) if p is not None), None)
    if path is not None:
        if seen.platform_note:  # a path means other cores on another platform
            raise UserError("tiles-platform", seen.platform_note, fix="leave --platform out to change the tiles in use")
        node_of(seen).find(path)
    if drain is not None or undrain is not None:
        with client.talking() as ask:
            done = ask(messages.Drain(path or "", drain is not None, reason, seen.platform))
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
    if seen.platform_note:
        err.print(f"tilework: {seen.platform_note}", markup=False)
    if json:
        print_json(msgspec.to_builtins(seen))
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
        how, tiles = lease["how"] or "still there", ranges(numbers(lease["tiles"])) or "shared"
        out.print(f"{began}  {held:>7}  {lease['user']:10}  {lease['pid']:>7}  {tiles:12}  {how:13}  {lease['command']}",
                  markup=False)  # fmt: skip


def _cluster(partition: str | None, stack: bool, json: bool) -> None:
    from ..tiles.cluster import look

    found = look(partition)
    if json:
        print_json({s.node: msgspec.to_builtins(s.view) if s.view else {"error": s.why} for s in found})
        return
    for seen in found:
        if seen.view is None:
            out.print(f"{seen.node}: no answer: {seen.why}", markup=False)
            continue
        held = sum(t.lease is not None for t in seen.view.tiles)
        out.print(f"{seen.node}: {seen.view.title}, {held} of {len(seen.view.tiles)} tiles held", markup=False)
        _print(seen.view, stack)


def _release_job(seen: View) -> None:
    """The daemon decides whether we are in that job."""
    for lease in seen.leases:
        if lease.kind == "job":
            try:
                with client.talking() as ask:
                    ask(messages.Release(lease.id))
            except UserError as e:
                if e.id != "tiles-lease":
                    raise
                continue
            out.print(f"given back: {ranges(lease.tiles)} of job {lease.job}", markup=False)
            return
    raise UserError("tiles-job", "no job that this command runs in holds tiles", fix="tilework tiles shows who holds what")


def _print(seen: View, stack: bool) -> None:
    """One line for each tile and each session without one, however long its command is: a terminal wraps it, a script can read
    it."""
    leases = {lease.id: lease for lease in seen.leases}
    rows = [("TILE", "CPUS", "STATE", "PID", "USER", "HELD", "COMMAND")]
    for tile in seen.tiles:
        where = f"GPU {tile.gpu}" if tile.gpu is not None else ranges(tile.cpus)
        drained = "" if tile.drained is None else f"drained {tile.drained}".strip()
        if tile.lease is None:
            rows.append((tile.path, where, drained or tile.state, "", "", "", ""))
        else:
            lease = leases[tile.lease]
            rows.append((tile.path, where, ", ".join(filter(None, (state(lease), drained))), *_who(lease)))
    rows += [("shared", "", state(session), *_who(session)) for session in seen.shared]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1] + [0]
    for row in rows:
        out.print(" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), markup=False)
    for waiting in seen.queue:
        out.print(f"waiting: {waiting.ask} for {waiting.user}, pid {waiting.pid}, "
                  f"{duration(waiting.waited_seconds)}: {waiting.command}", markup=False)  # fmt: skip
    if seen.note:
        out.print(f"# {seen.note}", markup=False)
    for session in (*seen.leases, *seen.shared) if stack else ():
        if session.hung:
            out.print(f"\npid {session.pid}, stuck for {duration(session.stuck_seconds)}:\n"
                      f"{session.stack or 'no stack: the daemon may not ask this process for it'}", markup=False)  # fmt: skip


def _who(session: SessionView) -> tuple[str, str, str, str]:
    job = f"[job {session.job}] " if session.job else f"[{session.label}] " if session.label else ""
    return str(session.pid), session.user, duration(session.held_seconds), job + session.command


def state(session: SessionView) -> str:
    """In words: what a process is doing."""
    if session.hung:
        return "hung"
    held = "held, " if session.kind != "shared" else ""
    if session.idle_seconds >= 10:
        return f"{held}idle for {duration(session.idle_seconds)}"
    return held + (session.activity if session.shares else session.state)
