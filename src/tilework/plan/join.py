"""Joining graphs: the fused step, and gradients that add up over micro-batches. Pure functions from graphs to graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..artifact.graph import Graph, Node, Ref, TensorType
from ..artifact.names import SUMMED, is_kind


def join(name: str, graphs: Sequence[Graph], keep: Callable[[str], bool]) -> Graph:
    """One graph that does the work of several in a row. A buffer that an earlier one writes and a later one reads becomes
    a plain value; it is written to memory only if `keep` says so."""
    current: dict[str, str] = {}  # buffer -> the value it has by now
    nodes: list[Node] = []
    reads: dict[str, None] = {}
    types: dict[str, TensorType] = {}
    taken: set[str] = set()
    for graph in graphs:
        rename: dict[str, str] = {}
        for buffer in graph.reads:
            if buffer not in current:
                reads.setdefault(buffer)
            rename[buffer] = current.get(buffer, buffer)
        for node in graph.nodes:
            fresh, i = node.name, 0
            while fresh in taken:
                i += 1
                fresh = f"{node.name}_{graph.name}{i}"
            taken.add(fresh)
            nodes.append(replace(node.map_refs(lambda r, m=rename: m[r]), name=fresh))  # type: ignore[misc]
            rename[node.name] = fresh
        for buffer, value in graph.writes:
            current[buffer] = rename[value]
        types |= graph.types
    writes = tuple((buffer, value) for buffer, value in current.items() if keep(buffer))
    joined = Graph(name, tuple(reads), tuple(nodes), writes, types).prune()
    joined.verify()
    return joined


def accumulate(joint: Graph) -> Graph:
    """The joint graph, but gradients are added to what their buffers hold. The runtime zeroes them before each step."""
    nodes, writes = list(joint.nodes), []
    reads = list(joint.reads)
    types = dict(joint.types)
    for buffer, value in joint.writes:
        if not is_kind(buffer, *SUMMED):
            writes.append((buffer, value))
            continue
        kind = (types[buffer],)
        total = f"{value}_total_{len(nodes)}"
        reads.append(buffer)
        nodes.append(Node(total, "aten.add.Tensor", (Ref(buffer), Ref(value)), {}, kind, section="bwd"))
        writes.append((buffer, total))
    graph = Graph("accumulate", tuple(dict.fromkeys(reads)), tuple(nodes), tuple(writes), types).prune()
    graph.verify()
    return graph
