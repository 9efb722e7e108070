"""The daemon as a process: `tilework daemon run`, `snd`, systemd's unit, and what a client starts (`--auto`)."""

from __future__ import annotations

import argparse
import contextlib
import logging
import logging.handlers
import os
import resource
import selectors
import signal
import socket
import sys
from pathlib import Path

from ..errors import MachineError, TileworkError
from .daemon import Daemon
from .place import INSTALLED, run_folder
from .topology import asked_platform, detect

log = logging.getLogger("tilework.tiles")
LOG = "daemon.log"  # in its folder, of a daemon that a session started; others write to stderr, which systemd keeps


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilework daemon run", description="Serve this machine's tiles.")
    parser.add_argument("--platform", default=None, help="host, or a named platform; clients cannot change it then")
    parser.add_argument("--auto", action="store_true", help="started by a session: ends when nobody needs it")
    parser.add_argument("--listener", type=int, default=None, metavar="FD", help="with --auto: the socket that it has made")
    parser.add_argument("--listen", default=None, metavar="HOST:PORT", help="read-only HTTP: /metrics, /tiles")
    parser.add_argument("--token-file", default=None, help="the token that HTTP clients must send")
    args = parser.parse_args(argv)
    os.umask(0o022)
    if args.auto:
        with contextlib.suppress(OSError):  # not bound to the cores of the session that started it
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        service = os.geteuid() == 0 and INSTALLED.is_dir() and not args.auto and "TILEWORK_RUN" not in os.environ
        folder = INSTALLED if service else run_folder()
        daemon = Daemon(folder, args.platform, args.auto)
        if args.auto and not daemon.fixed and asked_platform() is not None:
            daemon.ledger.node = detect(asked_platform(), daemon.site)
        _log(folder / LOG if args.auto else None)
        with contextlib.suppress(OSError, ValueError):  # whoever started us may have had few; we serve everybody
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        if args.listen:
            from .endpoint import listen

            listen(args.listen, args.token_file)
        if not daemon.open(socket.socket(fileno=args.listener) if args.listener is not None else None):
            if not args.auto:
                print(f"a daemon serves {folder} already", file=sys.stderr)
            return 0 if args.auto else 1
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(daemon, "stopping", True))
        signal.set_wakeup_fd(_wakeup(daemon))
        _tell_systemd("READY=1")
        if args.auto:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what whoever started us reads, who has heard enough
        daemon.serve()
        daemon.stop()
        return 0
    except TileworkError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    except OSError as e:
        print(MachineError("tiles-folder", "the daemon cannot start", found=str(e)), file=sys.stderr)
        return 3


def _log(path: Path | None) -> None:
    """To a file; without one to stderr: of a service that is systemd's journal, which knows the time."""
    timed = "" if "JOURNAL_STREAM" in os.environ and path is None else "%(asctime)s "
    handler = (
        logging.StreamHandler() if path is None else logging.handlers.RotatingFileHandler(path, maxBytes=2**20, backupCount=3)
    )
    logging.basicConfig(handlers=[handler], level=logging.INFO, format=f"{timed}%(levelname)s %(message)s")


def _tell_systemd(what: str) -> None:
    """`systemctl start` returns when tiles can be leased (Type=notify). Nothing where systemd did not start us."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(what.encode(), address.replace("@", "\0", 1))  # @: an abstract name


def _wakeup(daemon: Daemon) -> int:
    """A signal must wake the loop."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    daemon.selector.register(read, selectors.EVENT_READ, lambda _: os.read(read, 64))
    return write


if __name__ == "__main__":
    sys.exit(main())
