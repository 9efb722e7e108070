"""tilework daemon: the service that leases this machine's tiles. It starts by itself; an administrator may install it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import MachineError, UserError
from ..tiles import client, locks, messages
from ..tiles.places import ADDRESS, INSTALLED, run_folder
from .output import count, duration, out, print_json

NAME = "daemon"
HELP = "The service that leases tiles: run, status, stop, log, install, remove."
EXAMPLE = "Example: tilework daemon status"
ACTIONS = ("run", "status", "stop", "log", "install", "remove")
UNIT = "etc/systemd/system/tilework.service"
_UNIT = """[Unit]
Description=Tilework: leases of this machine's tiles
After=local-fs.target
# It begins when the sessions from before the install have ended, however long that takes.
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={python} -m tilework.tiles.service
Restart=always
RestartSec=1
RuntimeDirectory=tilework
RuntimeDirectoryMode=0755
# Leases outlive a restart of the daemon: so must the directory that says who holds them.
RuntimeDirectoryPreserve=yes
StateDirectory=tilework
StateDirectoryMode=0700
LogsDirectory=tilework
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
    action: Annotated[str, typer.Argument(help=", ".join(ACTIONS) + ".")] = "status",
    platform: Annotated[str | None, typer.Option(help="run: host, a named platform, or the site's own.")] = None,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="run: read-only HTTP, /metrics and /tiles.")] = None,
    token_file: Annotated[str | None, typer.Option(help="run: the token that HTTP clients must send.")] = None,
    root: Annotated[Path, typer.Option(help="install, remove: below which folder.")] = Path("/"),
    metrics: Annotated[bool, typer.Option(help="status: print the metrics as Prometheus reads them.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    if action not in ACTIONS:
        raise UserError("tiles-action", f"no action {action!r}", expected=", ".join(ACTIONS))
    if action == "run":
        from ..tiles.service import main

        words = [f"--{k}={v}" for k, v in (("platform", platform), ("listen", listen), ("token-file", token_file)) if v]
        raise typer.Exit(main(words))
    if action == "status":
        _status(metrics, json)
    elif action == "stop":
        with client.talking(start=False) as ask:
            ask(messages.Stop())
        out.print("stopped; leases live on, and the next session starts a daemon again")
    elif action == "log":
        out.print(log_path().read_text(errors="replace") if log_path().exists() else f"{log_path()}: nothing yet", markup=False)
    else:
        _install(root, action == "install")


def log_path() -> Path:
    """Of the daemon that serves us, where we may see it; else where our own would write."""
    folder = run_folder()
    if folder == INSTALLED:
        return Path("/var/log/tilework/daemon.log")
    logs = [p for p in folder.glob("user-*/daemon.log") if os.access(p, os.R_OK)]
    return max(logs, key=lambda p: p.stat().st_mtime) if logs else folder / f"user-{os.getuid()}" / "daemon.log"


def _status(metrics: bool, json: bool) -> None:
    with client.talking(start=False) as ask:
        if metrics:
            print(ask(messages.Metrics())["text"], end="")
            return
        seen = ask(messages.View())
    about: dict[str, Any] = {**seen["daemon"], "platform": seen["platform"], "tiles": len(seen["tiles"]),
                             "leases": len(seen["leases"]), "waiting": seen["num_waiting"], "log": str(log_path())}  # fmt: skip
    if json:
        print_json(about)
        return
    age = duration(time.time() - about["started"])
    out.print(f"pid {about['pid']}, user {about['user']}, version {about['version']}, for {age}\n"
              f"platform {about['platform']}: {count(about['tiles'], 'tile')}, {count(about['leases'], 'lease')}, "
              f"{about['waiting']} waiting\n"
              f"folder {about['folder']}, log {about['log']}", markup=False)  # fmt: skip
    if about["trouble"]:
        out.print(f"its history cannot be written: {about['trouble']}", markup=False)


def _check_unused() -> None:
    """Once it is removed, sessions start a daemon of their own, which knows nothing of the service's leases."""
    if client.answers(INSTALLED):
        raise UserError("tiles-in-use", "the service still runs", fix="systemctl disable --now tilework, then this again")
    pids = locks.alive(INSTALLED)
    if pids:
        raise UserError("tiles-in-use", "sessions still hold tiles of the service", found=", ".join(f"pid {p}" for p in pids[:8]),
                        fix="wait for them, or end them, then this again")  # fmt: skip


def _install(root: Path, install: bool) -> None:
    """The unit for systemd, with the names that frontends' users know the service by."""
    unit = root / UNIT
    aliases = [name for point in entry_points(group="tilework.site") for name in getattr(point.load(), "SERVICE_NAMES", ())]
    there = False
    try:
        if install:
            unit.parent.mkdir(parents=True, exist_ok=True)
            lines = f"Alias={' '.join(aliases)}\n" if aliases else ""
            unit.write_text(_UNIT.format(python=sys.executable, aliases=lines))
        else:
            if root == Path("/"):
                _check_unused()
            there = unit.exists()
            unit.unlink(missing_ok=True)
            (root / "run/tilework" / ADDRESS).unlink(missing_ok=True)  # or clients would wait for the service
    except OSError as e:
        raise MachineError(
            "site-write", f"{unit} could not be changed", found=str(e), fix="run this as root, or choose --root"
        ) from e
    out.print(f"{'written' if install else 'removed' if there else 'there was no'}: {unit}", markup=False)
    if root == Path("/") and shutil.which("systemctl"):
        then = "systemctl daemon-reload && systemctl enable --now tilework" if install else "systemctl daemon-reload"
        out.print(f"now: {then}", markup=False)
