"""channels_last: a pass, on by default. Weights of library convolutions lie with their channels last.

The convolution library works that way inside. Given weights in that layout it gives results in it, and so do all operators
after it: nothing is turned round between two convolutions. Only device copies change; what goes in and out of a session
keeps the user's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..artifact.graph import RESHAPES, Graph, Ref, TensorType
from ..artifact.names import Kind, is_kind
from .views import View

# Fewer channels than this do not fill a vector; then the plain layout is the faster one.
FEW_CHANNELS = 16


def channels_last(programs: Mapping[str, Graph]) -> dict[str, Graph]:
    if any(node.op == "aten.as_strided.default" for graph in programs.values() for node in graph.nodes):
        return dict(programs)  # written for one layout
    weights = {w for graph in programs.values() for w in _weights(graph)}
    if not weights:
        return dict(programs)
    return {name: _turned(graph, weights) for name, graph in programs.items()}


def _weights(graph: Graph) -> set[str]:
    """Buffers that are weights of 2-D convolutions in a library, wide enough for it to matter, and dense so far."""
    found = set()
    for node in graph.nodes:
        if node.op != "aten.convolution.default" or not isinstance(node.args[1], Ref):
            continue
        kind = graph.types.get(node.args[1].name)
        if kind is None or len(kind.shape) != 4 or kind != kind.as_dense():
            continue
        if max(kind.shape[:2]) >= FEW_CHANNELS:
            found.add(node.args[1].name)
    return found


def layouts_across(graph: Graph, views: Mapping[str, View]) -> dict[str, TensorType]:
    """Images between convolutions with their channels last, as the library gives them and wants them: how values lie in memory
    that go from one piece of a program to another. Views of a value were made for the layout that it was traced with."""
    turned = [k for b, k in graph.types.items() if is_kind(b, Kind.PARAM) and len(k.shape) == 4 and k == _last(k) != k.as_dense()]
    if not turned:
        return {}
    viewed = {view.base for view in views.values()}
    return {
        n.name: _last(kind)
        for n in graph.nodes
        if len(n.types) == 1 and n.name not in views and n.name not in viewed
        for kind in n.types
        if kind is not None and len(kind.shape) == 4 and kind == kind.as_dense() and kind.shape[1] > 1 and n.section != "opt"
    }


def _turned(graph: Graph, weights: set[str]) -> Graph:
    """The weights, and all that is kept beside them (gradients, optimizer state), in the other layout."""
    names = {w.split("/", 1)[1] for w in weights}
    types = dict(graph.types)
    for buffer, kind in types.items():
        group, _, rest = buffer.partition("/")
        own = rest if group in ("param", "grad") else rest.rpartition("/")[0] if group == "state" else ""
        if own in names and len(kind.shape) == 4:
            types[buffer] = _last(kind)
    # A view of a result that now lies otherwise may need a copy.
    nodes = tuple(replace(n, op="aten.reshape.default") if n.op in RESHAPES else n for n in graph.nodes)
    changed = replace(graph, nodes=nodes, types=types)
    changed.verify()
    return changed


def _last(kind: TensorType) -> TensorType:
    _, c, h, w = kind.shape
    return TensorType(kind.dtype, kind.shape, (c * h * w, 1, w * c, c))
