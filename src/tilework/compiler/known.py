"""Operators whose generated code is known to be wrong for some arguments or values, from reports in PyTorch's tracker that our
own tests repeat (tests/device/test_trackers_*.py). They are called through torch's dispatcher instead. What is wrong for every
value need not be here: the check of each compile finds that by itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..artifact.graph import DTYPES, Graph, Node, TensorType, name_of

_SMALL = {"uint8", "int8", "bool", "int16", "uint16"}
_FLOAT = {"float32", "float64", "bfloat16", "float16"}
_EXTREMES = {"amin", "amax", "min", "max", "argmin", "argmax", "aminmax"}
MANY = 16  # tensors
_OVERFLOW = {"acosh", "sinh", "cosh"}  # infinite where the result is not


def is_known(node: Node, kinds: Mapping[str, TensorType | None]) -> bool:
    parts = node.op.split(".")
    if len(parts) != 3 or parts[0] != "aten" or not node.args:
        return False
    name, first = parts[1], kinds.get(name_of(node.args[0]))
    dtype = first.dtype if first is not None else ""
    if name in _EXTREMES and dtype in _SMALL:  # vectors of bytes take lanes along that hold nothing
        return True
    if name in ("argmin", "argmax") and (len(node.args) < 2 or node.args[1] is None):  # counts in memory's order
        return True
    if name in ("remainder", "floor_divide", "fmod") and dtype in _FLOAT:  # a - floor(a / b) b, with a rounded quotient
        return True
    if name == "div" and node.kwargs.get("rounding_mode") == "floor" and dtype in _FLOAT:
        return True
    if name == "cat" and len(node.args[0]) > MANY:  # right, but a loop for each
        return True
    if name in _OVERFLOW or name == "embedding_dense_backward":  # a sum by index: see inductor_fixes.py. This kernel is quick
        return True
    if name in ("addmm", "baddbmm", "addmv", "addr") and node.kwargs.get("alpha", 1) == 0:  # NaN times 0 is NaN
        return True
    # The divisor of windows that reach over the edge.
    return name in ("avg_pool2d_backward", "avg_pool3d_backward") and True in node.args[5:6]


def known(graph: Graph) -> list[str]:
    """Names of the graph's nodes that must be called."""
    kinds: dict[str, TensorType | None] = dict(graph.types)
    kinds |= {n.name: n.types[0] if n.types else None for n in graph.nodes}
    found = [n.name for n in graph.nodes if is_known(n, kinds)]
    return found + (_rounding(graph, kinds) if torch.__version__ < "2.13" else [])


def _rounding(graph: Graph, kinds: Mapping[str, TensorType | None]) -> list[str]:
    """Conversions to 16 bits that are converted back: they round, which Inductor took for needless before torch 2.13, whatever
    it was told (report 185337)."""

    def width(name: str) -> int:
        kind = kinds.get(name)
        return DTYPES[kind.dtype].itemsize if kind is not None and kind.dtype in _FLOAT else 0

    casts = {n.name: n.refs()[0] for n in graph.nodes if n.op == "aten._to_copy.default"}
    back = {source for name, source in casts.items() if width(name) > 2}
    return [name for name, source in casts.items() if name in back and width(name) == 2 and width(source) > 2]
