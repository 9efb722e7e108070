"""srun, sbatch, squeue, sinfo and scancel over the machine's own queue, for scripts that were written for Slurm.

`tilework site install` puts them where such scripts look for them, unless a real Slurm is there. They know the flags that those
scripts use; any other is an error that names it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from ..slurm import OURS

NAMES = ("sbatch", "srun", "squeue", "sinfo", "scancel")
PLACES = ("opt/slurm/bin", "usr/local/bin")  # below the root; scripts name both
_FILE = """#!{python}
{mark}
import sys

from tilework.jobs.commands.{name} import main

sys.exit(main())
"""


def ours(path: Path) -> bool:
    try:
        with path.open("rb") as f:
            return OURS in f.read(1000)
    except OSError:
        return False


def install(root: Path) -> list[Path]:
    """Returns what was made: nothing where a real Slurm is."""
    found = shutil.which("sbatch")
    if root == Path("/") and found and not ours(Path(found)):
        return []
    made = []
    for place in PLACES:
        for name in NAMES:
            path = root / place / name
            if path.exists() and not ours(path):  # somebody else's
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_FILE.format(python=sys.executable, mark=OURS.decode(), name=name))
            path.chmod(0o755)
            made.append(path)
    return made


def remove(root: Path) -> bool:
    there = [path for place in PLACES for name in NAMES if ours(path := root / place / name)]
    for path in there:
        path.unlink()
    return bool(there)
