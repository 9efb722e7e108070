"""Tilework compiles a whole PyTorch training step into one file, and runs that file on tiles.

import tilework

tilework.compile(tilework.Step(model=model, inputs=(x,), targets=(y,), loss=loss, optimizer=optimizer), "m.pef")
session = tilework.load("m.pef")
session.run(x, y).loss
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .artifact.operators import recompute_from as recompute_from
    from .artifact.reader import Artifact as Artifact
    from .artifact.reader import read_artifact as read_artifact
    from .capture.examples import settled as settled
    from .check.verified import compile as compile
    from .compiler.build import Compiled as Compiled
    from .compiler.build import plan_step as plan_step
    from .errors import BugError as BugError
    from .errors import MachineError as MachineError
    from .errors import TileworkError as TileworkError
    from .errors import TileworkWarning as TileworkWarning
    from .errors import UserError as UserError
    from .plan.options import Options as Options
    from .runtime.loader import Loader as Loader
    from .runtime.results import Result as Result
    from .runtime.session import Session as Session
    from .runtime.session import load as load
    from .step import Step as Step

# The public names, and where they live. They are imported on first use, so that a run never pays for the compiler.
_PUBLIC = {
    "Artifact": ("artifact.reader", "Artifact"),
    "BugError": ("errors", "BugError"),
    "Compiled": ("compiler.build", "Compiled"),
    "MachineError": ("errors", "MachineError"),
    "Options": ("plan.options", "Options"),
    "Loader": ("runtime.loader", "Loader"),
    "Result": ("runtime.results", "Result"),
    "Session": ("runtime.session", "Session"),
    "Step": ("step", "Step"),
    "TileworkError": ("errors", "TileworkError"),
    "TileworkWarning": ("errors", "TileworkWarning"),
    "UserError": ("errors", "UserError"),
    "compile": ("check.verified", "compile"),
    "load": ("runtime.session", "load"),
    "plan_step": ("compiler.build", "plan_step"),
    "recompute_from": ("artifact.operators", "recompute_from"),
    "settled": ("capture.examples", "settled"),
    "read_artifact": ("artifact.reader", "read_artifact"),
}
__all__ = [*sorted(_PUBLIC), "optim"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        module, attribute = _PUBLIC[name]
        value = getattr(importlib.import_module(f".{module}", __name__), attribute)
        globals()[name] = value
        return value
    if name == "optim":
        return importlib.import_module(".optim", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
