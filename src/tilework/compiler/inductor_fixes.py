"""Faults of Inductor that would be wrong numbers of ours, kept out where they arise. Each says what is wrong and how it was seen;
tests/fuzz/test_found.py and tests/device/test_trackers_*.py have programs for them. They hold where our code is generated, and
not for what else the process does with Inductor, in other threads or later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

_generating: ContextVar[bool] = ContextVar("generating", default=False)  # one for each thread


@contextmanager
def applied() -> Iterator[None]:
    _install()
    before = _generating.set(True)
    try:
        yield
    finally:
        _generating.reset(before)


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """ours(the original, arguments) where our code is generated, the original elsewhere."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs) if _generating.get() else original(*args, **kwargs)

    setattr(owner, name, chosen)


@functools.cache
def _install() -> None:
    import sympy
    from torch._inductor import lowering, scheduler, sizevars
    from torch._inductor.fx_passes import post_grad

    # Sums by index (gradients of indexing, gathering, resampling) are calls of torch's own kernels, never loops. In loops
    # over tiles of two dimensions Inductor shifts the index by the inner loop's variable twice: numbers land elsewhere, also
    # beyond the end of the tensor. And loops that read such a sum may come before all of it has arrived.
    # (torch 2.11 to 2.13; reports 191571, 100794, 160391)
    _replace(lowering, "needs_fallback_due_to_atomic_add_limitations", lambda original, dtype: True)

    # Operators change a buffer before its new value is stored, and then shifted elements of it are read (a copy between
    # them is taken for needless). Our graphs store all results at the end, so nothing is gained by it. (report 198270)
    _replace(post_grad, "reinplace_inplaceable_ops", lambda original, *_, **__: None)

    # A loop whose sizes are computed again, so that it can join another, forgets that a buffer it reads is changed before by
    # another kernel: the loop may then run too early. (seen on torch 2.11 and 2.13; found by tests/fuzz, program s1-c0/46)
    def computed_again_and_renamed(original: Any, node: Any, *args: Any, **kwargs: Any) -> None:
        original(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.rename(node.mutation_renames))

    _replace(scheduler.SchedulerNode, "recompute_size_and_body", computed_again_and_renamed)

    # Two helpers of the C++ generator simplify every index with all that sympy knows. Expanding it is enough for what is asked
    # (does it move with a loop variable, and by how much?). hf/funnel took over 15 minutes here, and 67 s of CPU without.
    names = SimpleNamespace(**vars(sympy))
    _replace(names, "simplify", lambda original, e: sympy.expand(e) if isinstance(e, sympy.Expr) else e)
    sizevars.sympy = names  # type: ignore[assignment, attr-defined]
