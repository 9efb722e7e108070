"""Maximum pooling whose windows do not overlap becomes our own operators, before the graph is cut into sections.

The gradient then finds the maxima again instead of reading their indices, so that fwd need not keep any for bwd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..artifact.graph import Graph, Node, Ref, TensorType, name_of

_FORWARD, _BACKWARD = "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default"


def pooling(graph: Graph) -> Graph:
    types: dict[str, TensorType | None] = {**graph.types, **{n.name: n.types[0] if n.types else None for n in graph.nodes}}
    plain = {n.name: n for n in graph.nodes if n.op == _FORWARD and _apart(n.args[1:], n.args[0], types)}
    indices = {n.name: n.args[0].name for n in graph.nodes if n.op == "getitem" and n.args[0].name in plain and n.args[1] == 1}
    users = [(n, ref) for n in graph.nodes for ref in n.refs() if ref in indices]
    # Someone else may want the indices: the user (return_indices).
    wanted = {indices[ref] for n, ref in users if n.op != _BACKWARD}
    wanted |= {indices[value] for _, value in graph.writes if value in indices}
    chosen = {name: n for name, n in plain.items() if name not in wanted}
    values = {n.args[0].name: n.name for n in graph.nodes if n.op == "getitem" and n.args[0].name in chosen and n.args[1] == 0}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "getitem" and node.args[0].name in chosen:
            forward = chosen[node.args[0].name]
            if node.args[1] == 0:
                kind = types[node.name]
                assert kind is not None
                rest = _window(forward.args[1:])
                nodes.append(replace(forward, name=node.name, op="tilework.max_pool.default",
                                     args=(forward.args[0], *rest), kwargs={}, types=(kind.as_dense(),)))  # fmt: skip
        elif node.op == _BACKWARD and indices.get(name_of(node.args[-1])) in values:
            forward = chosen[indices[node.args[-1].name]]
            rest = _window(forward.args[1:])
            kind = types[node.name]
            assert kind is not None
            args = (node.args[0], forward.args[0], Ref(values[forward.name]), *rest)
            nodes.append(replace(node, op="tilework.max_pool_grad.default", args=args, kwargs={}, types=(kind.as_dense(),)))
        elif node.name not in chosen:
            nodes.append(node)
    changed = replace(graph, nodes=tuple(nodes)).prune()
    changed.verify()
    return changed


def _window(args: Sequence[Any]) -> tuple[list[int], list[int], list[int]]:
    """kernel, stride, padding as pairs, from max_pool2d's arguments, of which all but the first may be missing."""
    kernel = list(args[0]) * (2 // len(args[0]))
    stride = list(args[1]) * (2 // len(args[1])) if len(args) > 1 and args[1] else kernel
    padding = list(args[2]) * (2 // len(args[2])) if len(args) > 2 else [0, 0]
    return kernel, stride, padding


def _apart(args: Sequence[Any], x: Any, types: dict[str, TensorType | None]) -> bool:
    image = types.get(name_of(x))
    if image is None or len(image.shape) != 4 or image.dtype != "float32" or image != image.as_dense() or 0 in image.shape:
        return False
    kernel, stride, _ = _window(args)
    dilation = args[3] if len(args) > 3 else [1]
    ceil = len(args) > 4 and bool(args[4])
    return all(s >= k for s, k in zip(stride, kernel, strict=True)) and set(dilation) == {1} and not ceil
