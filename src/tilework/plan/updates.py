"""updates: a pass, on by default. Where a weight's gradient is one matrix product and the update is plain SGD, the product is
added to the weight as it is made (BLAS: w = keep w - lr a b, with keep = 1 - lr wd), and the gradient is never written to
memory."""

from __future__ import annotations

from dataclasses import replace

from ..artifact.graph import Graph, Node, Ref, name_of
from ..artifact.names import Kind, is_kind
from .aliases import shares_with


def updates(graph: Graph) -> Graph:
    made = {n.name: n for n in graph.nodes}
    uses: dict[str, int] = {}
    for ref in [*(r for n in graph.nodes for r in n.refs()), *(value for _, value in graph.writes)]:
        uses[ref] = uses.get(ref, 0) + 1
    changed: dict[str, Node] = {}
    for buffer, value in graph.writes:
        found = _update(made, uses, graph, buffer, value) if is_kind(buffer, Kind.PARAM) else None
        if found is not None:
            changed[value] = found
    if not changed:
        return graph
    result = replace(graph, nodes=tuple(changed.get(n.name, n) for n in graph.nodes)).prune()
    result.verify()
    return result


def _update(made: dict[str, Node], uses: dict[str, int], graph: Graph, buffer: str, value: str) -> Node | None:
    """w keep - g lr, with g a product of two matrices that nobody else uses."""

    def of(name: str, op: str) -> Node | None:
        node = made.get(name)
        fits = node is not None and node.op == op and uses[name] == 1 and not node.kwargs and len(node.args) == 2
        return node if fits else None

    def is_scalar(name: str) -> bool:
        return name in made and made[name].types[0] is not None and not made[name].types[0].shape  # type: ignore[union-attr]

    kind, new = graph.types[buffer], of(value, "aten.sub.Tensor")
    if new is None or kind != kind.as_dense() or kind.dtype != "float32":
        return None
    kept, scaled = (of(name_of(a), "aten.mul.Tensor") for a in new.args)
    if kept is None or name_of(kept.args[0]) != buffer or not is_scalar(keep := name_of(kept.args[1])):
        return None
    if scaled is None or not is_scalar(lr := name_of(scaled.args[1])):
        return None
    gradient, turned = name_of(scaled.args[0]), False
    while (node := made.get(gradient)) is not None and node.op == "aten.t.default" and uses[gradient] == 1:
        gradient, turned = name_of(node.args[0]), not turned
    found = of(gradient, "tilework.product.default")
    if found is None or turned or found.types[0] != kind or 1 in (*kind.shape, _inner(found, made, graph)):
        return None
    # The weight changes while others wait for their turn: an operand must not be memory that this step changes.
    if any(shares_with(name_of(operand), made) & graph.written for operand in found.args):
        return None
    return replace(new, op="tilework.updated_by_product.default", args=(Ref(buffer), *found.args, Ref(lr), Ref(keep)))


def _inner(product: Node, made: dict[str, Node], graph: Graph) -> int:
    name = name_of(product.args[0])
    kind = graph.types.get(name) or made[name].types[0]
    return kind.shape[-1] if kind is not None else 1
