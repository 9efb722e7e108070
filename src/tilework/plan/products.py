"""products: a pass, on by default. Matrix products of float32 become our own operators, whose code goes by shape.

A bias becomes an addition of its own, so that it joins the loop of whatever follows (a ReLU, say). A weight that many products of
few rows read transposed (a recurrent layer's, at every time step) is transposed once: each of them would, and for few rows that
takes longer than the product."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ..artifact.graph import Graph, Node, Ref, TensorType, name_of

_MANY = 4  # products that read the same matrix transposed
_FEW_ROWS = 140  # of the other one; with more, laying out the second matrix is a small part of the work (kernels/gemm.cpp)
_SMALL = 1 << 12  # elements of the second matrix


def products(graph: Graph) -> Graph:
    nodes: list[Node] = []
    for node in graph.nodes:
        kind = node.types[0] if node.types else None
        if kind is None or kind.dtype != "float32" or 0 in kind.shape or _inner(node, graph, nodes) == 0:
            nodes.append(node)
        elif node.op == "aten.mm.default":
            nodes.append(replace(node, op="tilework.product.default", types=(kind.as_dense(),)))
        elif node.op == "aten.bmm.default":
            nodes.append(replace(node, op="tilework.batch_product.default", types=(kind.as_dense(),)))
        elif node.op == "aten.addmm.default" and not node.kwargs and len(node.args) == 3:
            bias, a, b = node.args
            made = replace(
                node, name=f"{node.name}_product", op="tilework.product.default", args=(a, b), types=(kind.as_dense(),)
            )
            total = replace(node, op="aten.add.Tensor", args=(Ref(made.name), bias), types=(kind.as_dense(),))
            nodes += [made, total]
        else:
            nodes.append(node)
    changed = replace(graph, nodes=tuple(_transposed_once(graph, nodes)))
    changed.verify()
    return changed


def _transposed_once(graph: Graph, nodes: list[Node]) -> list[Node]:
    made = {n.name: n for n in nodes}

    def matrix(node: Node) -> str:
        """What a product of few rows reads transposed; empty for any other node."""
        kind = node.types[0] if node.op == "tilework.product.default" else None
        second = made.get(name_of(node.args[1])) if kind is not None and 1 < kind.shape[0] <= _FEW_ROWS else None
        if second is None or second.op != "aten.t.default" or second.types[0] is None or second.types[0].numel < _SMALL:
            return ""
        return name_of(second.args[0])

    uses = Counter(matrix(n) for n in nodes)
    often = {name for name, count in uses.items() if name and count >= _MANY and _is_dense(name, made, graph)}
    copies: dict[str, Node] = {}
    result: list[Node] = []
    for node in nodes:
        result.append(node)
        source = name_of(node.args[0]) if node.op == "aten.t.default" else ""
        if source in often and source not in copies:
            kind, form = node.types[0], {"memory_format": torch.contiguous_format}
            assert kind is not None
            copies[source] = replace(
                node,
                name=f"{node.name}_once",
                op="aten.clone.default",
                args=(Ref(node.name),),
                kwargs=form,
                types=(kind.as_dense(),),
            )
            result.append(copies[source])
    return [replace(n, args=(n.args[0], Ref(copies[matrix(n)].name))) if matrix(n) in often else n for n in result]


def _is_dense(name: str, made: dict[str, Node], graph: Graph) -> bool:
    kind: TensorType | None = made[name].types[0] if name in made else graph.types[name]
    return kind is not None and kind == kind.as_dense()


def _inner(node: Node, graph: Graph, before: list[Node]) -> int:
    """The length of the sums that a product makes; 1 for anything else. 0: an empty sum, which BLAS need not know."""
    if node.op not in ("aten.mm.default", "aten.bmm.default", "aten.addmm.default"):
        return 1
    a = node.args[-2]
    kind = graph.types.get(a.name) or next((n.types[0] for n in reversed(before) if n.name == a.name), None)
    return kind.shape[-1] if kind is not None else 0
