"""The kinds of error that PopTorch programs catch. All are poptorch.Error and have an id, with a section in errors.md; some are
also what Python itself would raise, because programs match on that. The text comes first: programs match on its beginning."""

from __future__ import annotations

from typing import Any

from tilework.errors import TileworkError, UserError


class Error(UserError):
    """poptorch.Error. A program may raise one of its own, with a text alone."""

    def __init__(self, id: str, summary: str = "", **more: Any) -> None:
        own = not summary
        super().__init__("poptorch-error" if own else id, id if own else summary, **more)
        self.message = self.summary
        self.type = type(self).__name__
        self.location = ""

    def __str__(self) -> str:
        lines = [self.summary, *map(str, self.places)]
        lines += [
            f"  {name}: {text}" for name, text in (("found", self.found), ("expected", self.expected), ("fix", self.fix)) if text
        ]
        if self.id != "poptorch-error":
            lines.append(f"  see: tilework explain {self.id}")
        return "\n".join(lines)


class RecoverableError(Error):
    """Never raised here: there is no hardware that could be reset."""


class UnrecoverableError(Error):
    """Never raised here: there is no hardware that could be broken."""


class ArgumentError(Error, AssertionError):
    """Where PopTorch asserts."""


class WrongValue(Error, ValueError):
    """Where PopTorch raises ValueError."""


class StateError(Error, RuntimeError):
    """Where PopTorch raises RuntimeError."""


class FrozenError(Error, AttributeError):
    """Options that an executor or a loader uses already, and attributes that options do not have."""


def from_engine(error: TileworkError) -> Error:
    """What the engine says of a model or an input, as a poptorch.Error with the same id, facts and places."""
    return Error(error.id, error.summary, found=error.found, expected=error.expected, fix=error.fix, places=error.places)
