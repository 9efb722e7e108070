"""tilework runs: the runs below a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .common import out, print_json

NAME = "runs"
HELP = "List the runs below a folder, as run --run-dir makes them."
EXAMPLE = "Example: tilework runs runs"


def command(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look; here by default.")] = Path("."),
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from rich.table import Table

    from ..errors import UserError
    from ..runs.report import find, number, summary

    if not folder.is_dir():
        raise UserError("run-folder", f"{folder} is not a folder", fix="tilework runs FOLDER")
    found = [summary(path) for path in find(folder)]
    if json:
        print_json([asdict(run) for run in found])
        return
    if not found:
        out.print(f"{folder}: no runs here (tilework run --run-dir makes them)", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for name, right in (
        ("RUN", False),
        ("STATE", False),
        ("STEP", True),
        ("LOSS", True),
        ("SAMPLES/S", True),
        ("STARTED", False),
    ):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for run in found:
        table.add_row(run.name, run.state, f"{run.step}/{run.steps}", number(run.loss), number(run.rate), run.started)
    out.print(table, width=out.width if out.is_terminal else 1000)
