"""tilework site: lay out, or take away, the folders that a site's scripts expect. Frontends bring them, as entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import MachineError, UserError
from ..jobs import commands
from .output import out, print_json

NAME = "site"
HELP = "Create or remove the folders that a site's scripts expect."
EXAMPLE = "Example: tilework site install --root /tmp/site"


def command(
    action: Annotated[Literal["install", "remove"], typer.Argument(help="What to do.")],
    root: Annotated[Path, typer.Option(metavar="DIR", help="The folder to work below.")] = Path("/"),
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    done: dict[str, Any] = {}
    sites = {"commands of the queue": commands, **{point.name: point.load() for point in entry_points(group="tilework.site")}}
    for name, site in sites.items():
        try:
            done[name] = [str(p) for p in site.install(root)] if action == "install" else site.remove(root)
        except FileExistsError as e:
            raise UserError("site-exists", f"{e}: Tilework did not create this folder, so it is left alone",
                            fix="choose another --root, or move it away")from e  # fmt: skip
        except OSError as e:
            raise MachineError("site-write", f"the site's folders could not be changed below {root}", found=str(e),
                               fix="choose a --root that you can write to, or run this as root") from e  # fmt: skip
    if json:
        print_json(done)
        return
    for name, what in done.items():
        lines = what if isinstance(what, list) else ["removed" if what else "nothing was there"]
        if action == "install" and not lines:
            lines = ["not needed: there is a Slurm"]
        for line in lines:
            out.print(f"{name}: {line}", markup=False)
