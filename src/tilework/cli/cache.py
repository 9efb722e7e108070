"""tilework cache: what the compile cache holds."""

from __future__ import annotations

import datetime
from typing import Annotated

import typer

from .output import out, print_json

NAME = "cache"
HELP = "Show, trim or clear the compile cache."
EXAMPLE = "Example: tilework cache --prune 500"


def command(
    prune: Annotated[int | None, typer.Option(metavar="MB", help="Keep at most this many MB; remove the oldest.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove everything.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from ..compiler.cache import Cache

    cache = Cache()
    removed = 0
    if clear:
        removed = len(cache.entries())
        cache.clear()
    elif prune is not None:
        removed = cache.prune(prune * 1_000_000)
    entries = cache.entries()
    if json:
        print_json({"folder": str(cache.folder), "bytes": cache.size(), "removed": removed,
                    "programs": [{"key": k, "bytes": b, "used": u, "parts": p} for k, b, u, p in entries]})  # fmt: skip
        return
    out.print(f"{cache.folder}: {len(entries)} programs, {cache.size() / 1e6:.1f} MB with headers; removed {removed}")
    for key, size, used, parts in entries:
        when = datetime.datetime.fromtimestamp(used).isoformat(timespec="seconds", sep=" ")
        out.print(f"  {key[:12]}  {size / 1e3:8.1f} kB  last used {when}  torch {parts.get('torch', '?')}")
