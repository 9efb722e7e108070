"""reference: plain eager PyTorch replays the graphs, which every artifact carries. There is nothing to build."""

from __future__ import annotations

from ...plan.plan import Plan
from ..cache import Cache
from . import Built, Report


class ReferenceBackend:
    passes = ()
    computes = True
    generates = False

    def build(self, name: str, plan: Plan, cache: Cache | None, report: Report) -> Built:
        return Built(notes=dict.fromkeys(plan.programs, "replayed"))


backend = ReferenceBackend()
