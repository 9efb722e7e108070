"""One file per device. A backend turns a Plan's programs into members of the artifact, and says what they will need."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...plan.plan import Plan
from ..cache import Cache

Report = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """What a backend made: libraries of native code, and what a machine must have to run them."""

    libraries: dict[str, bytes] = field(default_factory=dict)
    library_of: dict[str, str] = field(default_factory=dict)  # program -> the library that holds its code
    driver: bytes | None = None
    features: list[str] = field(default_factory=list)
    glibc: list[int] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # program -> "cached", or why it was compiled
    called: dict[str, tuple[str, ...]] = field(default_factory=dict)  # program -> operators called through torch's dispatcher


class Backend(Protocol):
    def build(self, name: str, plan: Plan, cache: Cache | None, report: Report) -> Built: ...


def backend_for(device: str) -> Backend:
    """The backend in the file of that name."""
    module = importlib.import_module(f"{__name__}.{device}")
    return module.backend  # type: ignore[no-any-return]
