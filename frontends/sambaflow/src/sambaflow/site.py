"""What the scripts of a DataScale site expect: /opt/sambaflow with the starters, an environment to activate, and tools."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PLACE = "opt/sambaflow"  # below the root
MARK = ".tilework-site"  # in the folder that we made: only such a folder is ever removed or replaced
TOOLS = ("tilework", "python", "sntilestat", "snconfig", "snd")
SERVICE_NAMES = ("snd.service",)  # what `systemctl status` is asked for on such a site

_ACTIVATE = """# Tilework: sourced by a site's scripts. The Python environment that Tilework is installed in, and its tools.
_TILEWORK_OLD_PATH="$PATH"
export PATH="{bin}:{tools}:$PATH"
export VIRTUAL_ENV="{prefix}"
deactivate () {{ export PATH="$_TILEWORK_OLD_PATH"; unset VIRTUAL_ENV _TILEWORK_OLD_PATH; unset -f deactivate; }}
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
    return [target, top / "venv" / "bin" / "activate", top / "bin"]


def remove(root: Path) -> bool:
    """Takes away what install made, and nothing else. Says whether there was anything."""
    top = root / PLACE
    if not (top / MARK).exists():
        return False
    shutil.rmtree(top)
    return True
