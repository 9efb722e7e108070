"""null: does no arithmetic, so that planning, leases, ranks and queues can be tested anywhere."""

from __future__ import annotations

from ...plan.plan import Plan
from ..cache import Cache
from . import Built, Report


class NullBackend:
    passes = ()
    computes = False
    generates = False

    def build(self, name: str, plan: Plan, cache: Cache | None, report: Report) -> Built:
        return Built(notes=dict.fromkeys(plan.programs, "nothing to do"))


backend = NullBackend()
