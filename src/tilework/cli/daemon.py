"""tilework daemon: the service that leases this machine's tiles. It starts by itself; an administrator may install it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from ..errors import MachineError, UserError
from ..tiles import client, messages, records
from ..tiles.endpoint import check_listener
from ..tiles.leases import Lease
from ..tiles.place import INSTALLED, SOCKET, is_service, run_folder
from .output import count, duration, out, print_json

NAME = "daemon"
HELP = "The service that leases tiles. It starts by itself; an administrator can install it."
EXAMPLE = "Example: tilework daemon status"
Action = Literal["run", "status", "stop", "log", "install", "remove"]
UNIT = "etc/systemd/system/tilework.service"
_UNIT = """[Unit]
Description=Tilework: leases of this machine's tiles
After=local-fs.target
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={command}
Restart=always
RestartSec=1
RuntimeDirectory=tilework
RuntimeDirectoryMode=0755
# Leases outlive a restart of the daemon: so must the directory that says who holds them.
RuntimeDirectoryPreserve=yes
StateDirectory=tilework
StateDirectoryMode=0700
LimitNOFILE=65536
# It reads /proc and sends one harmless signal; sessions are never its children.
KillMode=process
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
{aliases}"""


def command(
    action: Annotated[Action, typer.Argument(help="What to do.")] = "status",
    platform: Annotated[str | None, typer.Option(metavar="NAME", help="run, install: the platform of this machine.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="run, install: /metrics and /tiles over HTTP.")] = None,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="run, install: the token for HTTP clients.")] = None,
    root: Annotated[Path, typer.Option(metavar="DIR", help="install, remove: the folder to work below.")] = Path("/"),
    metrics: Annotated[bool, typer.Option("--metrics", help="status: print the metrics for Prometheus.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    if token_file:
        token_file = os.path.abspath(token_file)
    words = [f"--{k}={v}" for k, v in (("platform", platform), ("listen", listen), ("token-file", token_file)) if v]
    if action == "run":
        from ..tiles.service import main

        raise typer.Exit(main(words))
    if action == "status":
        _status(metrics, json)
    elif action == "stop":
        with client.talking(start=False) as ask:
            ask(messages.Stop())
        out.print("stopped; leases live on, and the next session starts a daemon again")
    elif action == "log":
        _log()
    elif action == "install":
        _install(root, words)
    else:
        _remove(root)


def _log() -> None:
    folder = run_folder()
    if is_service(folder):
        out.print("the service writes to the journal: journalctl -u tilework", markup=False)
        return
    path = folder / "daemon.log"
    out.print(path.read_text(errors="replace") if path.exists() else f"{path}: nothing yet", markup=False)


def _status(metrics: bool, json: bool) -> None:
    if metrics:
        with client.talking(start=False) as ask:
            print(ask(messages.Metrics())["text"], end="")
        return
    seen = client.view(start=False)
    log = "journalctl -u tilework" if is_service(run_folder()) else str(run_folder() / "daemon.log")
    about: dict[str, Any] = {**msgspec.to_builtins(seen.daemon), "platform": seen.platform, "tiles": len(seen.tiles),
                             "leases": len(seen.leases), "shared": len(seen.shared), "waiting": seen.num_waiting,
                             "log": log}  # fmt: skip
    if json:
        print_json(about)
        return
    age = duration(time.time() - about["started"])
    out.print(f"pid {about['pid']}, user {about['user']}, version {about['version']}, for {age}\n"
              f"platform {about['platform']}: {count(about['tiles'], 'tile')}, {count(about['leases'], 'lease')}, "
              f"{about['shared']} shared, {about['waiting']} waiting\n"
              f"folder {about['folder']}, log {about['log']}", markup=False)  # fmt: skip
    if about["trouble"]:
        out.print(f"its history cannot be written: {about['trouble']}", markup=False)


def _install(root: Path, words: list[str]) -> None:
    """The unit for systemd, with the names that frontends' users know the service by. What it is told here, it keeps."""
    if any(word.startswith(("--listen", "--token-file")) for word in words):
        check_listener(
            *(next((w.partition("=")[2] for w in words if w.startswith(k)), None) for k in ("--listen", "--token-file"))
        )
    aliases = [name for point in entry_points(group="tilework.site") for name in getattr(point.load(), "SERVICE_NAMES", ())]
    command = " ".join(_quoted(word) for word in (sys.executable, "-m", "tilework.tiles.service", *words))
    text = _UNIT.format(command=command, aliases=f"Alias={' '.join(aliases)}\n" if aliases else "")
    unit = root / UNIT
    with _writing(unit):
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
    out.print(f"written: {unit}", markup=False)
    if root == Path("/"):
        out.print("Sessions that run now keep a daemon of their own until they end; the service does not know their tiles.")
        if shutil.which("systemctl"):
            out.print("now: systemctl daemon-reload && systemctl enable --now tilework", markup=False)


def _quoted(word: str) -> str:
    """As systemd reads a command line."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"' if any(c in text for c in " \t\"'\\;") else text


def _remove(root: Path) -> None:
    unit = root / UNIT
    if root == Path("/"):
        _check_unused()
    there = unit.exists()
    with _writing(unit):
        unit.unlink(missing_ok=True)
        (root / "run/tilework" / SOCKET).unlink(missing_ok=True)  # or clients would wait for the service
    out.print(f"{'removed' if there else 'there was no'}: {unit}", markup=False)
    if root == Path("/") and shutil.which("systemctl"):
        out.print("now: systemctl daemon-reload", markup=False)


def _check_unused() -> None:
    """Once it is removed, sessions start daemons of their own, which know nothing of the service's leases."""
    if client.answers(INSTALLED):
        raise UserError("tiles-in-use", "the service still runs", fix="systemctl disable --now tilework, then this again")
    with _writing(INSTALLED):
        found = [r for r in records.read_all(INSTALLED) if r.tiles and Lease.found(r)] if INSTALLED.is_dir() else []
    if found:
        pids = ", ".join(f"pid {r.pid}" for r in found[:8])
        raise UserError("tiles-in-use", "sessions still hold tiles of the service", found=pids,
                        fix="wait for them, or end them, then this again")  # fmt: skip


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise MachineError("site-write", f"{place} could not be changed", found=str(e),
                           fix="run this as root, or choose --root") from e  # fmt: skip
