"""Faults of Inductor that would be wrong numbers of ours, mended where they are. Each says what is wrong and how it was seen;
tests/fuzz/test_found.py has a program for each. Where a later torch has mended one, the fix changes nothing."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def apply() -> None:
    """Once a process, before code is generated."""
    _scatter_in_tiles()
    _scatter_on_its_own()


def _scatter_in_tiles() -> None:
    """A loop over tiles of two dimensions that adds to places given by an index (the gradient of indexing, of an embedding)
    shifts that index by the inner loop's variable twice: CppTile2DKernel.store shifts it, and so does the index expression that
    CppVecKernel.store makes of it. Numbers land elsewhere, also beyond the end of the tensor. (torch 2.11 to 2.13)"""
    from torch._inductor import config
    from torch._inductor.codegen import cpp

    original = cpp.CppTile2DKernel.store

    @functools.wraps(original)
    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        added_by_index = mode == "atomic_add" and (config.cpp.dynamic_threads or self.num_threads != 1)
        if added_by_index and not self.need_vec_transpose(self.rename_indexing(index)):
            return cpp.CppVecKernel.store(self, name, index, value, mode)
        return original(self, name, index, value, mode)

    cpp.CppTile2DKernel.store = store  # type: ignore[method-assign]


def _scatter_on_its_own() -> None:
    """Loops that add to places given by an index are fused with loops that read the sum, which is not complete then: of several
    gradients some arrive after the loop that needs them all. (torch 2.13; reports 191571, 100794)"""
    from torch._inductor.codegen import cpp

    def adds(node: Any) -> bool:
        return any(n._get_atomic_add_buffers() for n in node.get_nodes() if hasattr(n, "_get_atomic_add_buffers"))

    for name in ("can_fuse_horizontal", "can_fuse_vertical", "can_fuse_vertical_outer_loop"):
        original = getattr(cpp.CppScheduling, name)

        def can_fuse(self: Any, node1: Any, node2: Any, original: Any = original) -> bool:
            return bool(original(self, node1, node2)) and not adds(node1) and not adds(node2)

        setattr(cpp.CppScheduling, name, can_fuse)
