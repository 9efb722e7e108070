"""tilework launch: several ranks of one command on this machine."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

NAME = "launch"
HELP = "Run several ranks of a command on this machine: data parallel without MPI."
EXAMPLE = "Example: tilework launch -n 2 -- python train.py"
SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def command(
    words: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command and its arguments.")],
    num_ranks: Annotated[int, typer.Option("-n", "--ranks", metavar="N", help="How many ranks.")] = 2,
    tag: Annotated[bool, typer.Option(help="Begin each line of output with the rank's number.")] = True,
) -> None:
    from ..errors import UserError
    from ..parallel.launch import launch

    if shutil.which(words[0]) is None:
        raise UserError("ranks-launched", f"there is no command {words[0]!r}", fix="tilework launch -n 2 -- python train.py")
    raise typer.Exit(launch(words, num_ranks, tag="[{rank}] " if tag else None))
