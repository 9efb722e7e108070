"""tilework measure --collectives: how fast ranks reduce, every way, by size."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from rich.table import Table

from .common import out, print_json

NAMES = {"device": "in the native step", "ring": "ring", "hierarchical": "hierarchical", "gloo": "gloo's own"}


def measured(num_ranks: int, *, json: bool) -> int:
    """Under a launcher, this process is one of the ranks; otherwise it starts them."""
    from ..parallel import launched, start

    if launched().size == 1:
        from ..parallel.launch import launch

        words = [sys.executable, "-m", "tilework", "measure", "--collectives", *(["--json"] if json else [])]
        return launch(words, num_ranks, tag=None)
    from ..parallel.bandwidth import sweep

    with start() as group:
        group.take_cores()
        rows = sweep(group, exchange_library())
        if group.rank == 0:
            _print(rows, group, json)
    return 0


def _print(rows: list[dict[str, Any]], group: Any, json: bool) -> None:
    if json:
        print_json({"ranks": group.size, "nodes": len(group.nodes), "rows": rows})
        return
    ways = list(dict.fromkeys(r["way"] for r in rows))
    table = Table("size", *[NAMES[w] for w in ways], box=None)
    for size in dict.fromkeys(r["bytes"] for r in rows):
        found = {r["way"]: r["seconds"] for r in rows if r["bytes"] == size}
        cells = [f"{found[w] * 1e6:,.0f} us  {size / found[w] / 1e9:.2f} GB/s" if w in found else "" for w in ways]
        table.add_row(f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB", *cells)
    where = f"{group.size} ranks on {len(group.nodes)} machine{'s' * (len(group.nodes) > 1)}"
    out.print(f"all-reduce of float32, {where}: median time, bytes per second", markup=False)
    out.print(table)


def exchange_library() -> Any:
    """exchange.cpp as artifacts carry it. None where nothing can be compiled: the way through shared memory is then left out."""
    from ..compiler import toolchain
    from ..compiler.backends import cpu
    from ..compiler.cache import Cache
    from ..errors import TileworkError
    from ..plan.options import Options
    from ..runtime.devices.cpu import open_code

    options, cache, file = Options(), Cache(), cpu.EXCHANGE
    try:
        parts = {**cpu.common_parts(options), file.stem: file.read_text()}
        build = partial(toolchain.own_library, file, options, folder=cache.folder / "headers")
        return open_code("exchange", cache.get(file.stem, parts, build).code)
    except TileworkError as e:
        print(f"tilework: without the way through shared memory: {e.summary}", file=sys.stderr)
        return None
