"""Where the daemon and its clients meet on this machine.

Installed (systemd): /run/tilework belongs to root, and so does the daemon. Otherwise everybody shares a world-writable, sticky
directory, and whoever needs the daemon first starts it; TILEWORK_RUN names another directory (for tests, or one user alone).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import MachineError

INSTALLED = Path("/run/tilework")
SHARED = (Path("/run/lock/tilework"), Path("/tmp/tilework"))


def run_folder() -> Path:
    own = os.environ.get("TILEWORK_RUN")
    if own:
        return _made(Path(own))
    if (INSTALLED / "daemon.lock").exists():
        return INSTALLED
    for place in SHARED:
        if os.access(place.parent, os.W_OK) or place.is_dir():
            return _made(place)
    raise MachineError("tiles-folder", "there is no directory where this machine's leases can be kept",
                       expected=f"one of {', '.join(map(str, (INSTALLED, *SHARED)))}",
                       fix="set TILEWORK_RUN to a directory that you can write to")  # fmt: skip


def _made(place: Path) -> Path:
    try:
        place.mkdir()
        place.chmod(0o1777)
    except FileExistsError:
        pass
    except OSError as e:
        raise MachineError("tiles-folder", f"{place}: the directory of leases cannot be made", found=str(e)) from e
    info = place.lstat()
    if not stat.S_ISDIR(info.st_mode):  # a link that somebody left there would lead all of us astray
        raise MachineError("tiles-folder", f"{place}: expected a directory", found="something else (a link?)",
                           fix="remove it, or set TILEWORK_RUN")  # fmt: skip
    return place
