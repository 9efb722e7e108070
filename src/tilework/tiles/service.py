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
import sys

from ..errors import MachineError, TileworkError
from .daemon import Daemon
from .places import INSTALLED, log_path, run_folder
from .topology import asked_platform, detect

log = logging.getLogger("tilework.tiles")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilework daemon run", description="Serve this machine's tiles.")
    parser.add_argument("--platform", default=None, help="host, or a named platform; clients cannot change it then")
    parser.add_argument("--auto", action="store_true", help="started by a session: ends when nobody needs it")
    parser.add_argument("--listen", default=None, metavar="HOST:PORT", help="read-only HTTP: /metrics, /tiles")
    parser.add_argument("--token-file", default=None, help="the token that HTTP clients must send")
    args = parser.parse_args(argv)
    os.umask(0o022)
    try:
        service = os.geteuid() == 0 and INSTALLED.is_dir() and not args.auto and "TILEWORK_RUN" not in os.environ
        folder = INSTALLED if service else run_folder()
        daemon = Daemon(folder, args.platform, args.auto)
        if args.auto and not daemon.fixed and asked_platform() is not None:
            daemon.ledger.node = detect(asked_platform(), daemon.site)
        handler: logging.Handler
        try:
            handler = logging.handlers.RotatingFileHandler(log_path(folder), maxBytes=2**20, backupCount=3)
        except OSError:
            handler = logging.StreamHandler()
        logging.basicConfig(handlers=[handler], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        with contextlib.suppress(OSError, ValueError):  # whoever started us may have had few; we serve everybody
            resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        if args.listen:
            from .endpoint import listen

            listen(args.listen, args.token_file)
        if not daemon.open():
            print("a daemon serves this machine already", file=sys.stderr)
            return 0 if args.auto else 1
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(daemon, "stopping", True))
        signal.set_wakeup_fd(_wakeup(daemon))
        daemon.serve()
        daemon.stop()
        return 0
    except TileworkError as e:
        log.error("%s", e)
        print(e, file=sys.stderr)
        return e.exit_code
    except OSError as e:
        print(MachineError("tiles-folder", "the daemon cannot start", found=str(e)), file=sys.stderr)
        return 3


def _wakeup(daemon: Daemon) -> int:
    """A signal must wake the loop."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    daemon.selector.register(read, selectors.EVENT_READ, lambda _: os.read(read, 64))
    return write


if __name__ == "__main__":
    sys.exit(main())
