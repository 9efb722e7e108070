"""tilework export: trained weights under the model's own names, for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from .common import out, print_json

NAME = "export"
HELP = "Write weights as safetensors under the model's own names: a folder that other programs open."
EXAMPLE = "Example: tilework export out/model.pef --run runs/first --like FOLDER -o out/trained"


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The .pef file.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where model.safetensors goes.")],
    weights: Annotated[Path | None, typer.Option(metavar="FILE", help="Weights that run --save wrote.")] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Or the newest checkpoint of this run.")] = None,
    like: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Copy the configuration and tokenizer from here.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Accept a file that other users could have changed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from ..errors import UserError
    from ..runs.checkpoints import Checkpoints
    from ..runs.folder import RunFolder
    from ..runtime.checkpoint import write_public
    from ..runtime.session import load

    if weights is not None and run is not None:
        raise UserError("options", "--weights and --run", expected="one of them")
    session = load(artifact, device="reference", weights=weights if run is None else False, trust=trust)
    step = session.num_steps
    if run is not None:
        found = Checkpoints(RunFolder(run).checkpoints, report=lambda text: out.print(text, markup=False)).newest()
        if found is None:
            raise UserError("weights-missing", f"{run}: this run has no checkpoint")
        session.restore(found[1])
        step = found[0].step
    tensors = session.state_dict()
    write_public(output / "model.safetensors", tensors)
    copied = []
    for file in sorted(like.iterdir()) if like is not None else []:
        if file.is_file() and file.suffix in (".json", ".txt", ".model") and "index" not in file.name:
            shutil.copy(file, output / file.name)
            copied.append(file.name)
    if json:
        print_json({"folder": str(output), "tensors": len(tensors), "step": step, "copied": copied})
    else:
        out.print(f"{len(tensors)} tensors of step {step} in {output / 'model.safetensors'}", markup=False)
