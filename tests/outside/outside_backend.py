"""A backend that lives in another distribution: its code is a list of the graph's operators, packed into a member of its own."""

from __future__ import annotations

import json
import zlib
from typing import Any

from tilework.compiler.backends import Built, Report
from tilework.plan.plan import Plan


class OutsideBackend:
    passes = ("sums",)  # those that its code wants, of plan.CHANGES
    computes = True
    generates = False

    def build(self, name: str, plan: Plan, cache: Any, report: Report) -> Built:
        members = {f"native/{p}.ops": zlib.compress(json.dumps(g.to_json()).encode()) for p, g in plan.programs.items()}
        return Built(
            members=members,
            code_of={p: f"native/{p}.ops" for p in plan.programs},
            needs={"distance": ["far"]},
            notes=dict.fromkeys(plan.programs, "packed"),
        )


backend = OutsideBackend()
