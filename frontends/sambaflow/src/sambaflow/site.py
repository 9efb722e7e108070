"""What the scripts of a DataScale site expect: /opt/sambaflow with the starters, an environment to activate, and tools."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PLACE = "opt/sambaflow"  # below the root
MPI = "opt/mpich-3.3.2"  # where scripts look for mpirun
MARK = ".tilework-site"  # in the folder that we made: only such a folder is ever removed or replaced
TOOLS = ("tilework", "python", "sntilestat", "snconfig", "snd")
# What --gres calls a chip; --rdus=N and --ipus=N are the same as flags. The second is what another vendor's plug-in for Slurm
# adds, here until that vendor's frontend brings it.
RESOURCES = {"rdu": "chips", "ipu": "chips"}
SERVICE_NAMES = ("snd.service",)  # what `systemctl status` is asked for on such a site

_ACTIVATE = """# Tilework: sourced by a site's scripts. The Python environment that Tilework is installed in, and its tools.
_TILEWORK_OLD_PATH="$PATH"
export PATH="{bin}:{tools}:$PATH"
export VIRTUAL_ENV="{prefix}"
deactivate () {{ export PATH="$_TILEWORK_OLD_PATH"; unset VIRTUAL_ENV _TILEWORK_OLD_PATH; unset -f deactivate; }}
"""


# A site's own mpirun where there is one: the one that its scripts name comes first, then any other.
_MPIRUN = """#!/bin/sh
# Tilework: the mpirun of this machine, under the name that a site's scripts use.
for found in mpirun.mpich mpiexec.hydra mpirun; do
  if command -v "$found" >/dev/null 2>&1; then exec "$found" "$@"; fi
done
case "$1" in
  -np|-n) count="$2"; shift 2 ;;
  *) echo "mpirun: no MPI is installed; without it only mpirun -np N COMMAND works" >&2; exit 2 ;;
esac
exec "{tools}/tilework" launch -n "$count" -- "$@"
"""


def starters() -> Path | None:
    """The starters of this checkout, or of this installation."""
    for place in (Path(__file__).parents[4] / "apps" / "starters", Path(sys.prefix) / "share" / "tilework" / "starters"):
        if (place / "logreg").is_dir():
            return place
    return None


def install(root: Path) -> list[Path]:
    """Lays the site out; returns what was made. FileExistsError where somebody else's folder is in the way."""
    top = root / PLACE
    if top.exists() and any(top.iterdir()) and not (top / MARK).exists():
        raise FileExistsError(str(top))
    source = starters()
    if source is None:
        raise FileNotFoundError("the starters are not part of this installation")
    remove(root)
    top.mkdir(parents=True)
    (top / MARK).write_text("made by `tilework site install`; `tilework site remove` takes it away\n")
    target = top / "apps" / "starters"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pef", "out", "pef"))
    script = _ACTIVATE.format(bin=Path(sys.executable).parent, tools=top / "bin", prefix=sys.prefix)
    for folder in (top, *(f for f in target.iterdir() if f.is_dir() and f.name != "shared")):
        (folder / "venv" / "bin").mkdir(parents=True)
        (folder / "venv" / "bin" / "activate").write_text(script)
    (top / "bin").mkdir()
    for tool in TOOLS:
        found = Path(sys.executable).parent / tool
        if found.exists():
            (top / "bin" / tool).symlink_to(found)
    made = [target, top / "venv" / "bin" / "activate", top / "bin"]
    mpi = root / MPI / "bin" / "mpirun"
    if not mpi.exists():
        mpi.parent.mkdir(parents=True, exist_ok=True)
        (root / MPI / MARK).write_text((top / MARK).read_text())
        mpi.write_text(_MPIRUN.format(tools=top / "bin"))
        mpi.chmod(0o755)
        made.append(mpi)
    return made


def remove(root: Path) -> bool:
    """Takes away what install made, and nothing else. Says whether there was anything."""
    ours = [root / place for place in (PLACE, MPI) if (root / place / MARK).exists()]
    for top in ours:
        shutil.rmtree(top)
    return bool(ours)
