"""Faults of Inductor that would be wrong numbers of ours, kept out where they arise. Each says what is wrong and how it was seen;
tests/fuzz/test_found.py and tests/device/test_trackers_*.py have programs for them. They hold while our code is generated, and
not for what else the process does with Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


@contextmanager
def applied() -> Iterator[None]:
    import sympy
    from torch._inductor import lowering, scheduler, sizevars
    from torch._inductor.fx_passes import post_grad

    # Two helpers of the C++ generator simplify every index with all that sympy knows. Expanding it is enough for what is asked
    # (does it move with a loop variable, and by how much?). hf/funnel took over 15 minutes here, and 67 s of CPU without.
    quick = SimpleNamespace(**{**vars(sympy), "simplify": lambda e: sympy.expand(e) if isinstance(e, sympy.Expr) else e})
    computed_again = scheduler.SchedulerNode.recompute_size_and_body

    def computed_again_and_renamed(self: Any, *args: Any, **kwargs: Any) -> None:
        computed_again(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    with (
        # Sums by index (gradients of indexing, gathering, resampling) are calls of torch's own kernels, never loops. In loops
        # over tiles of two dimensions Inductor shifts the index by the inner loop's variable twice: numbers land elsewhere, also
        # beyond the end of the tensor. And loops that read such a sum may come before all of it has arrived.
        # (torch 2.11 to 2.13; reports 191571, 100794, 160391)
        patch.object(lowering, "needs_fallback_due_to_atomic_add_limitations", lambda dtype: True),
        # Operators change a buffer before its new value is stored, and then shifted elements of it are read (a copy between
        # them is taken for needless). Our graphs store all results at the end, so nothing is gained by it. (report 198270)
        patch.object(post_grad, "reinplace_inplaceable_ops", lambda *_, **__: None),
        # A loop whose sizes are computed again, so that it can join another, forgets that a buffer it reads is changed before by
        # another kernel: the loop may then run too early. (seen on torch 2.11 and 2.13; found by tests/fuzz, program s1-c0/46)
        patch.object(sizevars, "sympy", quick),
        patch.object(scheduler.SchedulerNode, "recompute_size_and_body", computed_again_and_renamed),
    ):
        yield
