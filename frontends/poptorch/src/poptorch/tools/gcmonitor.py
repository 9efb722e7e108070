"""gc-monitor: the devices of this machine, and the processes on them."""

from __future__ import annotations

import argparse
import json
import sys

from tilework.tiles.machine import processor

from .devices import Device, devices, guarded, host


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(str(r[i])) for r in [head, *rows]) for i in range(len(head))]
    rule = "+" + "+".join("-" * (w + 2) for w in widths) + "+"
    inside = len(rule) - 2
    lines = ["+" + "-" * inside + "+", "|" + title.center(inside) + "|", rule]

    def row(cells: list[str]) -> str:
        return "|" + "|".join(f" {c:<{w}} " for c, w in zip(cells, widths, strict=True)) + "|"

    return "\n".join([*lines, row(head), rule, *map(row, rows), rule])


def cards(found: list[Device]) -> str:
    rows = [[host(), "N/A", "N/A", processor(), str(d.number), str(d.number), str(len(d.tiles)), d.state] for d in found]
    return table("gc-monitor", ["IPU-M", "Serial", "Version", "Type", "ID", "IPU#", "Tiles", "State"], rows)


def processes(found: list[Device]) -> str:
    rows = [[str(h.pid), h.command[:40], f"{h.held_seconds:.0f}s", h.user, str(d.number), "N/A", "N/A", "N/A", f"{d.busy:.2f}%"]
            for d in found for h in d.holders]  # fmt: skip
    if not rows:
        return table("IPUs", ["Message"], [["No attached processes"]])
    return table("IPUs", ["PID", "Command", "Time", "User", "ID", "Clock", "Temp", "Power", "Utilisation"], rows)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="gc-monitor", description="The devices of this machine, and the processes on them.")
    p.add_argument("--no-card-info", action="store_true", help="only the processes")
    p.add_argument("--all-partitions", action="store_true", help="accepted: everybody's processes are shown")
    p.add_argument("-j", "--json", action="store_true")
    args = p.parse_args(argv)

    def show() -> None:
        found = devices()
        if args.json:
            print(json.dumps([{"id": d.number, "state": d.state, "processes": [
                {"pid": h.pid, "user": h.user, "command": h.command} for h in d.holders]} for d in found]))  # fmt: skip
            return
        if not args.no_card_info:
            print(cards(found))
        print(processes(found))

    return guarded("gc-monitor", show)


def run() -> None:
    sys.exit(main())
