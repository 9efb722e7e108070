"""recompute: a pass, on by default. Where the model marks values with tilework.recompute_from, a program that has the forward and
the backward pass keeps those for the backward pass. What lies between them is computed again when it is needed. What follows the
last one is kept: the backward pass begins with it.

Random numbers are a function of the seed, so dropout is computed again with the same ones. Sums over replicas are never asked for
twice: they are kept. What is computed again begins with values that are there only after a gradient (tilework.after): generated
code would otherwise compute it once and keep it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..artifact.graph import VIEWS, Graph, Node, Ref, TensorType
from ..artifact.names import Kind, is_kind
from ..artifact.operators import SYNCHRONISES

MARK = "tilework.recompute_from.default"
_AFTER = "tilework.after.default"
_THERE = (Kind.PARAM, Kind.BUFFER, Kind.CONST, Kind.HYPER)  # what is made of these alone is kept


def recompute(graph: Graph) -> Graph:
    forward = _forward(graph)
    marks = [n for n in graph.nodes[:forward] if n.op == MARK]
    if not marks or forward == len(graph.nodes):
        return unmarked(graph)
    depth = _depths(graph, forward)
    deepest = max(depth[m.name] for m in marks)
    made = {n.name: n for n in graph.nodes[:forward]}

    def is_kept(name: str) -> bool:
        """By the forward pass, or in a buffer."""
        node = made.get(name)
        return node is None or node.op in (MARK, SYNCHRONISES) or depth[name] >= deepest

    again = _Again(graph, made, is_kept)
    nodes = list(graph.nodes[:forward])
    for node in graph.nodes[forward:]:
        for name in node.refs():
            nodes += again.made_for(name)
        nodes.append(node.map_refs(again.name_of))
        again.passed(nodes[-1])
    return unmarked(replace(graph, nodes=tuple(nodes)).prune())


class _Again:
    """What is computed again, piece by piece: from one gradient to the next."""

    def __init__(self, graph: Graph, made: Mapping[str, Node], is_kept: Callable[[str], bool]) -> None:
        self.graph, self.made, self.is_kept = graph, made, is_kept
        self.names: dict[str, str] = {}  # of the forward pass -> of what is computed again
        self.late: dict[str, str] = {}  # values that are kept -> the same, after a gradient
        self.gradient = ""

    def name_of(self, name: str) -> str:
        return self.names.get(name, name)

    def passed(self, node: Node) -> None:
        """A node of the backward pass: what is computed again from now on comes after it."""
        op = node.op.split(".")[1] if "." in node.op else node.op
        if node.op != "getitem" and op not in VIEWS and len(node.types) == 1 and node.types[0] is not None:
            self.gradient = node.name

    def made_for(self, name: str) -> list[Node]:
        """The nodes that a value needs, in order."""
        found: list[Node] = []
        todo = [name]
        while todo and self.gradient:
            now = todo[-1]
            if now in self.names or self.is_kept(now):
                todo.pop()
                continue
            node = self.made[now]
            missing = [r for r in node.refs() if r not in self.names and not self.is_kept(r)]
            if missing:
                todo += missing
                continue
            for r in node.refs():
                found += self._late(r)
            self.names[now] = f"{now}.again"
            made = node.map_refs(lambda r: self.names.get(r, self.late.get(r, r)))
            found.append(replace(made, name=self.names[now], section="bwd"))
            todo.pop()
        return found

    def _late(self, name: str) -> list[Node]:
        """A value that is kept, once more."""
        kind = self._kind(name)
        if name in self.names or name in self.late or kind is None or is_kind(name, *_THERE):
            return []
        self.late[name] = f"{name}.late"
        return [Node(self.late[name], _AFTER, (Ref(name), Ref(self.gradient)), {}, (kind,), section="bwd")]

    def _kind(self, name: str) -> TensorType | None:
        node = self.made.get(name)
        if node is None:
            return self.graph.types[name]
        return node.types[0] if len(node.types) == 1 else None


def unmarked(graph: Graph) -> Graph:
    """Without marks."""
    if not any(n.op == MARK for n in graph.nodes):
        return graph
    same: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = node.map_refs(lambda r: same.get(r, r))
        if node.op == MARK:
            (same[node.name],) = node.refs()
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), writes=tuple((b, same.get(v, v)) for b, v in graph.writes))


def _forward(graph: Graph) -> int:
    """How many nodes come before the backward pass. All of them, where there is none."""
    sections = [n.section for n in graph.nodes]
    if "bwd" not in sections or "fwd" not in sections:
        return len(sections)
    return len(sections) - sections[::-1].index("fwd")


def _depths(graph: Graph, forward: int) -> Mapping[str, int]:
    """How many marks lie on the way to each value."""
    found: dict[str, int] = {}
    for node in graph.nodes[:forward]:
        found[node.name] = max((found.get(r, 0) for r in node.refs()), default=0) + (node.op == MARK)
    return found
