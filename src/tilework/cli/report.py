"""tilework report: runs compared on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import out, print_json

NAME = "report"
HELP = "Compare runs on one HTML page with their curves. The page needs nothing beside it."
EXAMPLE = "Example: tilework report runs/first runs/second -o report.html"


def command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders that run --run-dir made.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page to write.")] = Path("report.html"),
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from ..artifact.writer import write_whole
    from ..runs.report import page

    text = page(runs)
    write_whole(output, lambda f: f.write(text.encode()))
    if json:
        print_json({"page": str(output), "runs": [str(r) for r in runs]})
    else:
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        out.print(f"{output}: {count}, {len(text) / 1e3:.0f} kB", markup=False)
