"""products: a pass, on by default. Matrix products of float32 become our own operators, whose code goes by shape.

A bias becomes an addition of its own, so that it joins the loop of whatever follows (a ReLU, say)."""

from __future__ import annotations

from dataclasses import replace

from ..artifact.graph import Graph, Node, Ref


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
    changed = replace(graph, nodes=tuple(nodes))
    changed.verify()
    return changed


def _inner(node: Node, graph: Graph, before: list[Node]) -> int:
    """The length of the sums that a product makes; 1 for anything else. 0: an empty sum, which BLAS need not know."""
    if node.op not in ("aten.mm.default", "aten.bmm.default", "aten.addmm.default"):
        return 1
    a = node.args[-2]
    kind = graph.types.get(a.name) or next((n.types[0] for n in reversed(before) if n.name == a.name), None)
    return kind.shape[-1] if kind is not None else 0
