"""sntilestat: where the time of every tile goes, and who holds it."""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from typing import Any

from tilework.errors import TileworkError, UserError
from tilework.tiles.client import view
from tilework.tiles.view import SessionView, View

from ..platforms import spelt

# What the columns are called here and in the engine: programs are loaded, arguments moved, checkpoints written, ranks waited for
# (alone, and to reduce gradients).
_STATES = {"idle": ("idle",), "exec": ("exec",), "pload": ("load",), "aload": ("copy",), "chkpt": ("save",),
           "quiesce": ("wait", "reduce")}  # fmt: skip
_WIDTHS = {"idle": 5, "exec": 5, "pload": 6, "aload": 6, "chkpt": 6, "quiesce": 8}
_FREE = {"idle": 100.0}
_SHORTEST, _LONGEST = 0.1, 86400.0  # seconds between two looks


def rows(seen: View, skip_idle: bool = False) -> list[dict[str, Any]]:
    """One row a tile: its path, percentages that add up to 100 (None: nobody knows), and the process that holds it. Then one
    for each process that shares the machine."""
    leases = {lease.id: lease for lease in seen.leases}
    found = [_row(spelt(t.path, seen.levels), leases[t.lease] if t.lease is not None else None, t.state, t.drained)
             for t in seen.tiles if t.lease is not None or not skip_idle]  # fmt: skip
    return found + [_row("shared", x, "hung" if x.hung else "shared", None) for x in seen.shared]


def _row(name: str, by: SessionView | None, state: str, drained: str | None) -> dict[str, Any]:
    shares = by.shares if by else _FREE
    return {"tile": name, **{c: sum(shares.get(s, 0.0) for s in own) if shares else None for c, own in _STATES.items()},
            "pid": by.pid if by else None, "user": by.user if by else None, "command": by.command if by else None,
            "hung": bool(by and by.hung), "drained": drained, "state": state}  # fmt: skip


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def table(seen: View, skip_idle: bool = False, width: int | None = None) -> str:
    """The seeds' layout. `width` cuts long commands, for a terminal."""
    found = rows(seen, skip_idle)
    first = max([20, *(len(r["tile"]) for r in found)])
    head = f"{'TILE':<{first}} " + " ".join(f"{'%' + c:>{_WIDTHS[c]}}" for c in _STATES) + f" {'PID':>6} {'USER':>8} COMMAND"
    lines = [head]
    for r in found:
        line = f"{r['tile']:<{first}} " + " ".join(f"{_percent(r[c]) or 'N/A':>{_WIDTHS[c]}}" for c in _STATES)
        if r["pid"] is not None:
            line += f" {r['pid']:>6} {r['user']:>8} {'(hung) ' if r['hung'] else ''}{r['command']}"
        elif r["drained"] is not None:
            line += f" {'':>6} {'':>8} (drained{': ' + r['drained'] if r['drained'] else ''})"
        lines.append(line if width is None else line[:width])
    if seen.note:
        lines.append(f"# {seen.note}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="sntilestat", description="Where the time of every tile goes, and who holds it.")
    p.add_argument("-i", "--interval", type=float, default=None, metavar="SECONDS", help="again and again, every so many seconds")
    p.add_argument("--count", type=int, default=None, help="this many times")
    p.add_argument("--skip-idle", action="store_true", help="only tiles that somebody holds")
    p.add_argument("--csv", action="store_true", help="comma-separated, one line a tile")
    p.add_argument("--json", action="store_true", help="one JSON list each time")
    p.add_argument("--platform", default=os.environ.get("TILEWORK_PLATFORM"), help="host, SN10-8, SN30-8, or the site's own")
    args = p.parse_args(argv)
    if args.count is not None and args.count < 1:
        p.error("--count must be more than 0")
    times = args.count or (1 if args.interval is None else None)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    done, said = 0, ""
    try:
        if args.interval is not None and not _SHORTEST <= args.interval <= _LONGEST:  # nan is not either
            raise UserError("tiles-interval", "--interval is no time to wait between two looks", found=f"{args.interval:g}",
                            expected=f"from {_SHORTEST:g} to {_LONGEST:g} seconds")  # fmt: skip
        while times is None or done < times:
            if done:
                time.sleep(args.interval or 1.0)
            seen = view(min(args.interval or 2.0, 60.0), args.platform)
            if seen.platform_note and seen.platform_note != said:  # once, not at every look
                said = seen.platform_note
                print(f"sntilestat: {said}", file=sys.stderr)
            if args.json:
                print(json.dumps(rows(seen, args.skip_idle)), flush=True)
            elif args.csv:
                if not done:
                    writer.writerow(["time", "tile", *_STATES, "pid", "user", "command", "state", "reason"])
                now = time.strftime("%Y-%m-%dT%H:%M:%S")
                for r in rows(seen, args.skip_idle):
                    writer.writerow([now, r["tile"], *(_percent(r[c]) for c in _STATES), r["pid"], r["user"], r["command"],
                                     r["state"], r["drained"]])  # fmt: skip
                sys.stdout.flush()
            else:
                width = os.get_terminal_size().columns if sys.stdout.isatty() else None
                print(table(seen, args.skip_idle, width), flush=True)
            done += 1
    except TileworkError as e:
        print(f"sntilestat: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # sntilestat | head
    except OSError as e:  # nowhere to print to
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"sntilestat: {e}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
