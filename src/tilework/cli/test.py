"""tilework test: the artifact beside the user's untouched module, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from .common import devices, load_step, out, print_json, progress

NAME = "test"
HELP = (
    "Compare an artifact with your model in eager PyTorch, tensor by tensor: outputs, gradients, updated parameters and "
    "optimizer state. Without BUILD, the artifact is compared with its own graph."
)
EXAMPLE = "Example: tilework test out/lenet.pef tilework.zoo.lenet:build"


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The .pef file.")],
    build: Annotated[str | None, typer.Argument(metavar="BUILD", help="The build function it was compiled from.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", autocompletion=devices,
                                               help="Run on this device instead of the artifact's own.")] = None,
    tiles: Annotated[str | None, typer.Option(metavar="TILES", help="Tiles of its own: 4, chips:1, gpus:1, all.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE",
                                                   help="Argument for the build function. Can be repeated.")] = None,
    brief: Annotated[bool, typer.Option("--brief", help="One line for each kind of tensor, with the largest error.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Accept a file that other users could have changed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    from ..check.check import check
    from ..runtime.leasing import Footing

    footing = Footing(tiles, leased=tiles is not None)  # for all that is run here
    step = load_step(build, set_ or []) if build else None
    with progress(quiet=json) as report:
        report("running the artifact and the reference")
        result = check(artifact, step, device=device, trust=trust)
    footing.close()
    first = result.first_difference
    if json:
        print_json({"ok": result.ok, "mode": result.mode, "device": result.device,
                    "first_difference": vars(first) if first else None, "rows": [vars(r) for r in result.rows]})  # fmt: skip
    else:
        _show(result, every=not brief or not result.ok)
    if not result.ok:
        raise typer.Exit(1)


def _show(result: object, every: bool) -> None:
    rows = result.rows  # type: ignore[attr-defined]
    table = Table(box=None, pad_edge=False)
    for column in ("kind", "tensor", "error", "tolerance", "", ""):
        table.add_column(column, justify="right" if column in ("error", "tolerance") else "left")
    if every:
        for r in rows:
            table.add_row(r.kind, r.name, f"{r.error:.1e}", f"{r.tolerance:.0e}", "pass" if r.ok else "FAIL", r.note)
    else:
        for kind in dict.fromkeys(r.kind for r in rows):
            of_kind = [r for r in rows if r.kind == kind]
            worst = max(of_kind, key=lambda r: r.error / r.tolerance if r.tolerance else r.error)
            table.add_row(
                kind,
                f"{len(of_kind)} tensors, worst {worst.name}",
                f"{worst.error:.1e}",
                f"{worst.tolerance:.0e}",
                "pass",
            )
    out.print(table)
    first = result.first_difference  # type: ignore[attr-defined]
    verdict = "pass" if first is None else f"FAIL: first difference in {first.kind} {first.name}"
    against = "your module in eager PyTorch" if result.mode == "module" else "its own graph only"  # type: ignore[attr-defined]
    out.print(f"{verdict}  ({len(rows)} tensors on {result.device}, against {against})", markup=False)  # type: ignore[attr-defined]
