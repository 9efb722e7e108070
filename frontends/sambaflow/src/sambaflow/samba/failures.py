"""How an app ends on a mistake: what was found and expected, exit code 2 (3 for the environment), no traceback."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import tilework

debug = False
_EXIT_CODES = ((tilework.UserError, 2), (tilework.MachineError, 3), (tilework.BugError, 4))


def install() -> None:
    """Called when an app parses its arguments, compiles or traces: from then on it is a command."""
    if sys.excepthook is not _hook:
        global _before
        _before = sys.excepthook
        sys.excepthook = _hook


_before: Any = sys.excepthook


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    code = next((c for k, c in _EXIT_CODES if isinstance(error, k)), None)
    if code is None or hasattr(sys, "ps1") or sys.flags.interactive:
        _before(kind, error, traceback)
        return
    if debug:
        _before(kind, error, traceback)
    else:
        # torch.distributed wraps this hook and shows sys.stderr only after it has returned, which it does not.
        print(error, file=sys.__stderr__)
        sys.__stderr__.flush()  # type: ignore[union-attr]
    sys.stderr.flush()
    sys.stdout.flush()
    import os

    os._exit(code)  # an excepthook cannot choose the exit code in any other way
