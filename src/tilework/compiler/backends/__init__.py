"""One file per device. A backend names the passes that its code wants, turns a Plan's programs into members of the artifact, and
says what a machine must have to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...found import module_of
from ...plan.plan import Plan
from ..cache import Cache

Report = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """What a backend made."""

    members: dict[str, bytes] = field(default_factory=dict)  # native/<name>.<kind> -> code
    code_of: dict[str, str] = field(default_factory=dict)  # program -> the member that holds its code
    needs: dict[str, str | list[int | str]] = field(default_factory=dict)  # the fingerprint's own part of this device
    notes: dict[str, str] = field(default_factory=dict)  # program -> "cached", or why it was compiled
    called: dict[str, tuple[str, ...]] = field(default_factory=dict)  # program -> operators called through torch's dispatcher


class Backend(Protocol):
    passes: tuple[str, ...]  # of plan.CHANGES, and "pieces"
    computes: bool  # whether there are numbers to compare with eager PyTorch's
    generates: bool  # whether it may do with less where its code is wrong: without a pass, or with operators called

    def build(self, name: str, plan: Plan, cache: Cache | None, report: Report) -> Built: ...


def backend_for(device: str) -> Backend:
    return module_of("backends", device).backend  # type: ignore[no-any-return]
