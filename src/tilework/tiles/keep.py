"""Tiles kept under a name, until they are let go: a process of its own holds them, and whatever the same user runs with
TILEWORK_TILES=of:NAME runs on them.

keep("mine", "chips:2")
let_go("mine")
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from ..errors import MachineError, TileworkError, UserError
from . import client
from .asks import is_name
from .topology import asked_platform
from .view import SessionView

_ENDS = 10.0  # seconds


def kept(name: str) -> SessionView | None:
    """The lease of this user that has this name. Where no daemon runs, nobody keeps any."""
    if not is_name(name):
        return None
    try:
        seen = client.view(platform=asked_platform(), start=False)
    except MachineError:
        return None
    return next((x for x in seen.leases if x.kind == "job" and x.job == name and x.uid == os.getuid()), None)


def keep(name: str, ask: str) -> None:
    """UserError where the tiles are not free now."""
    if not is_name(name):
        raise UserError("tiles-ask", "tiles cannot be kept under this name", found=repr(name),
                        expected="a letter, then letters, digits, and any of _ - .")  # fmt: skip
    if kept(name) is not None:
        raise UserError("tiles-in-use", f"tiles are kept under the name {name} already", fix="let them go first")
    here = str(Path(__file__).resolve().parents[2])  # the same Tilework as this one, wherever it was found
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
    holder = subprocess.Popen([sys.executable, "-m", __name__, name, ask], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, start_new_session=True, env=environment)  # fmt: skip
    assert holder.stdout is not None
    said = holder.stdout.read()
    if not said:
        raise UserError("tiles-daemon", "the process that was to keep the tiles has ended", fix="see `tilework daemon log`")
    problem = msgspec.json.decode(said)
    if problem:
        raise client.refusal(problem)


def let_go(name: str) -> None:
    """What still runs on them keeps them until it ends."""
    lease = kept(name)
    if lease is None or not _is_holder(lease.pid, name):
        raise UserError("tiles-lease", f"no tiles are kept under the name {name}", fix="see `tilework tiles`")
    os.kill(lease.pid, signal.SIGTERM)
    end = time.monotonic() + _ENDS
    while _is_holder(lease.pid, name) and time.monotonic() < end:
        time.sleep(0.01)


def _is_holder(pid: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[1:4] == [b"-m", __name__.encode(), name.encode()]
    return False


def main(name: str, ask: str) -> None:
    """The process that holds the tiles."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    problem: dict[str, str] = {}
    try:
        held = client.lease(ask, command=f"keeps {name}", label=name, platform=asked_platform(), wait=0.0, keeps=name)
    except TileworkError as e:
        problem = {k: str(getattr(e, k, "") or "") for k in ("id", "kind", "summary", "found", "expected", "fix")}
    with open(1, "wb") as out:  # whoever waits for it reads to the end
        out.write(msgspec.json.encode(problem))
    if problem:
        sys.exit(1)
    while held:
        signal.pause()


if __name__ == "__main__":
    import tilework.tiles.keep  # under its own name: `_is_holder` looks for it

    tilework.tiles.keep.main(*sys.argv[1:])
