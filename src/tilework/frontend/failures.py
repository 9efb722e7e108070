"""How a program ends on a mistake: what was found and expected, exit code 2 (3: the environment, 4: a bug), no traceback."""

from __future__ import annotations

import sys
import traceback as tracebacks
from types import TracebackType
from typing import Any

from ..errors import TileworkError

debug = False  # show the traceback as well
_before: Any = None  # the hook from before ours; None: ours is not there yet


def install() -> None:
    """Called when a program begins to behave as a command: from then on its mistakes end it as they end our own commands."""
    global _before
    if _before is None:  # once: others may have wrapped it since
        _before, sys.excepthook = sys.excepthook, _hook


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not isinstance(error, TileworkError) or hasattr(sys, "ps1") or sys.flags.interactive:
        _before(kind, error, traceback)
        return
    # Straight to the process's own: torch.distributed wraps this hook and shows sys.stderr only after it has returned.
    if debug:
        tracebacks.print_exception(kind, error, traceback, file=sys.__stderr__)
    else:
        print(error, file=sys.__stderr__, flush=True)
    # Python ends with this code, and with all that belongs to an end: handlers of atexit, files that are still open.
    raise SystemExit(error.exit_code)
