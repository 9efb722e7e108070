"""What a program puts under each other (the states of all time steps, say) is made where it will lie, so that nothing is copied.

A recurrent layer stacks what its time steps made: its outputs, and for the gradient of its weight (sums.py) the gradients of all
gates. Where the parts are made by pieces of the program, each gets its place in the whole from the start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

import torch

from ..artifact.graph import Graph, Node, Ref, TensorType, name_of
from .views import View

_CAT, _STACK, _SELECT = "aten.cat.default", "aten.stack.default", "aten.select.int"
_MANY = 4  # parts: fewer are copied as they are
_WORTH = 1 << 14  # bytes of the whole


@dataclass(frozen=True)
class Gathered:
    wholes: tuple[str, ...] = ()  # nodes that need not be computed
    parts: dict[str, View] = field(default_factory=dict)  # nodes whose results lie in one of them


def picked(graph: Graph) -> Graph:
    """Without stacks of which only single parts are taken again: the last of all outputs, say."""
    made = {n.name: n for n in graph.nodes}
    same: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == _SELECT and not node.kwargs:
            part = _part(node, made)
            if part and _type(part, made, graph) == node.types[0]:
                same[node.name] = same.get(part, part)
    if not same:
        return graph
    nodes = tuple(n.map_refs(lambda name: same.get(name, name)) for n in graph.nodes if n.name not in same)
    writes = tuple((buffer, same.get(value, value)) for buffer, value in graph.writes)
    changed = replace(graph, nodes=nodes, writes=writes).prune()
    return changed if changed.buffers == graph.buffers else graph


def _part(select: Node, made: Mapping[str, Node]) -> str:
    """The part of a stack that a select takes, through transposes; empty where it takes something else."""
    source, dim, index = made.get(name_of(select.args[0])), select.args[1], select.args[2]
    while source is not None and source.op == "aten.transpose.int":
        dims = len(source.types[0].shape) if source.types[0] is not None else 0
        one, other = (d % dims for d in source.args[1:3])
        dim = {one: other, other: one}.get(dim % dims, dim % dims)
        source = made.get(name_of(source.args[0]))
    if source is None or source.op != _STACK or source.types[0] is None:
        return ""
    dims = len(source.types[0].shape)
    across = (source.args[1] if len(source.args) > 1 else source.kwargs.get("dim", 0)) % dims
    parts = source.refs()
    return parts[index] if dim % dims == across and -len(parts) <= index < len(parts) else ""


def find_gathered(
    graph: Graph, views: Mapping[str, View], across: Mapping[str, TensorType], without: Set[str]
) -> tuple[Graph, Gathered]:
    """The graph, in which each part is now a node of its own, and what lies where. A value lies in one whole: the largest."""
    made = {n.name: n for n in graph.nodes}
    stored = {views[value].base if value in views else value for _, value in graph.writes}
    wholes = [n for n in graph.nodes if n.name not in without | stored and _is_whole(n, across) and _is_plain(n, made, graph)]
    wholes.sort(key=lambda n: -n.types[0].num_bytes)  # type: ignore[union-attr]
    chosen: dict[str, dict[str, None]] = {}  # whole -> its parts that are nodes
    taken: set[str] = set()

    def may_lie(name: str) -> bool:
        node = made.get(name)
        own = node is not None and name not in views and node.op != "getitem" and not node.op.startswith("tilework.updated")
        return own and name not in taken | stored | set(across) and name not in chosen and _is_dense(_type(name, made, graph))

    for whole in wholes:
        if whole.name in taken:
            continue
        counted = Counter(whole.refs())
        parts = dict.fromkeys(name for name in counted if counted[name] == 1 and may_lie(name))
        if len(parts) >= _MANY and 2 * len(parts) >= len(whole.refs()):
            chosen[whole.name] = parts
            taken |= set(parts)
    places: dict[str, View] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name not in chosen:
            nodes.append(node)
            continue
        at, names = 0, []
        for i, name in enumerate(node.refs()):
            kind = _type(name, made, graph).as_dense()
            if name not in chosen[node.name]:  # an input, or a part of something else: copied to its place
                form = {"memory_format": torch.contiguous_format}
                copy = Node(f"{node.name}_part{i}", "aten.clone.default", (Ref(name),), form, (kind,), section=node.section)
                nodes.append(copy)
                name = copy.name
            names.append(Ref(name))
            places[name] = View(node.name, kind, at)
            at += kind.numel
        nodes.append(replace(node, args=(names, *node.args[1:])))
    return replace(graph, nodes=tuple(nodes)), Gathered(tuple(chosen), places)


def _is_whole(node: Node, across: Mapping[str, TensorType]) -> bool:
    """Whether a node lays its operands one after the other."""
    kind = node.types[0] if len(node.types) == 1 else None
    if node.op not in (_CAT, _STACK) or node.name in across or kind is None or not _is_dense(kind) or kind.num_bytes < _WORTH:
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return math.prod(kind.shape[: dim % len(kind.shape)]) == 1 and len(node.refs()) >= _MANY


def _is_plain(whole: Node, made: Mapping[str, Node], graph: Graph) -> bool:
    """Whether its operands are put there as they are: a cat of several types converts, and skips what is empty."""
    kinds = [_type(name, made, graph) for name in whole.refs()]
    dtype = whole.types[0].dtype if whole.types[0] is not None else ""
    return not dtype.startswith("complex") and all(k.dtype == dtype and k.numel > 0 for k in kinds)


def _type(name: str, made: Mapping[str, Node], graph: Graph) -> TensorType:
    kind = made[name].types[0] if name in made else graph.types[name]
    return kind if kind is not None else TensorType("", (0,), (1,))


def _is_dense(kind: TensorType) -> bool:
    return kind.numel > 0 and kind == kind.as_dense()
