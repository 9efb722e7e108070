"""Convolutions in 16 bits: the GPU's units take pictures whose channels lie together. All of a graph is laid out so, rather than
turned for each convolution and back."""

from __future__ import annotations

from typing import Any

import torch

from ...artifact.graph import Graph
from ..to_fx import Otherwise, Translation

aten = torch.ops.aten
_HALF = ("bfloat16", "float16")
_GROUPS = {"aten.convolution.default": 8, "aten.convolution_backward.default": 9}  # which argument says how many


def channels_last(graph: Graph) -> bool:
    """Whether all convolutions in the graph are such ones, and nothing in it asks how tensors lie."""
    if any("as_strided" in n.op for n in graph.nodes):
        return False
    found = [n for n in graph.nodes if n.op in _GROUPS]
    kinds = [n.types[0] or n.types[1] for n in found]
    return bool(found) and all(
        kind is not None and kind.dtype in _HALF and len(kind.shape) == 4 and n.args[_GROUPS[n.op]] == 1
        for n, kind in zip(found, kinds, strict=True)
    )


def _last(t: Translation, x: Any) -> Any:
    if x.meta["val"].is_contiguous(memory_format=torch.channels_last):
        return x
    key = ("channels last", x)
    if key not in t.kept:
        t.kept[key] = t.emit(aten.clone.default, x, memory_format=torch.channels_last)
    return t.kept[key]


def _forward(t: Translation, x: Any, weight: Any, *rest: Any) -> Any:
    return t.inline(aten.convolution.default, (_last(t, x), _last(t, weight), *rest), {})


def _backward(t: Translation, grad: Any, x: Any, weight: Any, *rest: Any) -> Any:
    return t.inline(aten.convolution_backward.default, (_last(t, grad), _last(t, x), _last(t, weight), *rest), {})


WRITTEN: dict[str, Otherwise] = {"aten.convolution.default": _forward, "aten.convolution_backward.default": _backward}
