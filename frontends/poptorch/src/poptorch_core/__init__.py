"""The errors of poptorch under the name of its native part: programs catch poptorch_core.Error."""

from __future__ import annotations

from poptorch.errors import Error, RecoverableError, UnrecoverableError

__all__ = ["Error", "RecoverableError", "UnrecoverableError"]
