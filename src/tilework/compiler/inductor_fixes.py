"""Faults of Inductor that would be wrong numbers of ours, mended where they are. Each says what is wrong and how it was seen;
tests/fuzz/test_found.py and tests/device/test_trackers_*.py have programs for them. Where a later torch has mended one, the fix
changes nothing. They hold while our code is generated, and not for what else the process does with Inductor."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def applied() -> Iterator[None]:
    from torch._inductor.codegen import cpp
    from torch._inductor.fx_passes import post_grad

    with ExitStack() as stack:
        stack.enter_context(patch.object(cpp.CppTile2DKernel, "store", _store_in_tiles(cpp.CppTile2DKernel.store)))
        for name in ("can_fuse_horizontal", "can_fuse_vertical", "can_fuse_vertical_outer_loop"):
            stack.enter_context(patch.object(cpp.CppScheduling, name, _alone(getattr(cpp.CppScheduling, name))))
        # Inductor lets operators change a buffer before its new value is stored, and then reads shifted elements of it (a copy
        # between them is taken for needless). Our graphs store all results at the end, so nothing is gained. (report 198270)
        stack.enter_context(patch.object(post_grad, "reinplace_inplaceable_ops", lambda *_, **__: None))
        yield


def _store_in_tiles(original: Any) -> Any:
    """A loop over tiles of two dimensions that adds to places given by an index (the gradient of indexing, of an embedding)
    shifts that index by the inner loop's variable twice: CppTile2DKernel.store shifts it, and so does the index expression that
    CppVecKernel.store makes of it. Numbers land elsewhere, also beyond the end of the tensor. (torch 2.11 to 2.13)"""
    from torch._inductor import config
    from torch._inductor.codegen import cpp

    @functools.wraps(original)
    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        added_by_index = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if added_by_index and not self.need_vec_transpose(self.rename_indexing(index)):
            return cpp.CppVecKernel.store(self, name, index, value, mode)
        return original(self, name, index, value, mode)

    return store


def _alone(original: Any) -> Any:
    """Loops that add to places given by an index are fused with loops that read the sum, which is not complete then: of several
    gradients some arrive after the loop that needs them all. (torch 2.13; reports 191571, 100794)"""

    def adds(node: Any) -> bool:
        return any(n._get_atomic_add_buffers() for n in node.get_nodes() if hasattr(n, "_get_atomic_add_buffers"))

    @functools.wraps(original)
    def can_fuse(self: Any, node1: Any, node2: Any) -> bool:
        return bool(original(self, node1, node2)) and not adds(node1) and not adds(node2)

    return can_fuse
