"""Updates that work element by element, of many parameters at once: one loop over all of them instead of one each.

An optimizer's rule is the same few operators for each parameter. Where they are all known here, parameters with the same rule
share one function (compiler/assemble.py), and a table says whose memory it is to work on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..artifact.graph import Graph, Node, Ref, TensorType
from .views import View

MANY = 4  # parameters with the same rule: fewer stay with the loops around them

# Operators that work element by element, of floats; `where` with a condition that is one flag.
KNOWN = {
    *(f"aten.{name}.{form}" for name in ("add", "sub", "mul", "div") for form in ("Tensor", "Scalar")),
    *(f"aten.{name}.default" for name in ("sqrt", "neg", "abs", "maximum", "minimum", "reciprocal")),
    *(f"aten.where.{form}" for form in ("self", "ScalarOther", "ScalarSelf")),
}


@dataclass(frozen=True)
class Instance:
    """One parameter: the values it reads, in the order of the rule's inputs, and the buffers it writes."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]  # tensors of one number
    outputs: tuple[str, ...]
    numel: int


@dataclass(frozen=True)
class Updates:
    rule: tuple[tuple[str, tuple[Any, ...]], ...]  # operators with their arguments: numbers, t<i> (tensors), s<i> (scalars), v<i>
    flags: tuple[bool, ...]  # which scalars are true or false
    results: tuple[int, ...]  # which operator's result each output is
    instances: tuple[Instance, ...]
    nodes: frozenset[str]  # of the graph, that these stand for

    def inputs(self) -> Iterable[str]:
        return (name for i in self.instances for name in (*i.tensors, *i.scalars))

    def writes(self) -> Iterable[str]:
        return (name for i in self.instances for name in i.outputs)

    def with_values(self, value: Callable[[str], str]) -> Updates:
        instances = tuple(
            replace(i, tensors=tuple(map(value, i.tensors)), scalars=tuple(map(value, i.scalars))) for i in self.instances
        )
        return replace(self, instances=instances)


def find_updates(graph: Graph, views: Mapping[str, View], across: dict[str, TensorType]) -> list[Updates]:
    """The updates of the program that can be done together, by rule. They go through memory element by element, so all of a
    parameter's tensors must lie alike: where a gradient does not, `across` is told how it is to lie."""
    written: dict[str, list[str]] = {}
    for buffer, value in graph.writes:
        written.setdefault(value, []).append(buffer)
    kinds: dict[str, TensorType | None] = dict(graph.types)
    kinds |= {n.name: n.types[0] if n.types else None for n in graph.nodes}
    groups = _connected(graph, kinds)
    fixed = {view.base for view in views.values()} | {ref for n in graph.nodes if n.section != "opt" for ref in n.refs()}
    uses: dict[str, set[int]] = {}
    owner = {node.name: g for g, nodes in enumerate(groups) for node in nodes}
    for node in graph.nodes:
        for ref in node.refs():
            uses.setdefault(ref, set()).add(owner.get(node.name, -1))
    found: dict[Any, list[tuple[Instance, list[Node]]]] = {}
    for g, nodes in enumerate(groups):
        made = _instance(nodes, g, graph, kinds, written, uses)
        if made is not None and _lie_alike(made[1], graph, kinds, views, fixed, across):
            key, instance = made
            found.setdefault(key, []).append((instance, nodes))
    return [
        Updates(rule, flags, results, tuple(i for i, _ in members), frozenset(n.name for _, nodes in members for n in nodes))
        for (rule, flags, results), members in found.items()
        if len(members) >= MANY
    ]


def _connected(graph: Graph, kinds: dict[str, TensorType | None]) -> list[list[Node]]:
    """Operators of `opt` that can be written here, in groups that depend on each other."""
    group: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.section != "opt" or not _is_simple(node, kinds):
            continue
        joined: list[Node] = []
        for other in {id(group[r]): group[r] for r in node.refs() if r in group}.values():
            joined += other
        joined.append(node)
        for member in joined:
            group[member.name] = joined
    order = {n.name: i for i, n in enumerate(graph.nodes)}
    unique = {id(nodes): sorted(nodes, key=lambda n: order[n.name]) for nodes in group.values()}
    return list(unique.values())


def _is_simple(node: Node, kinds: dict[str, TensorType | None]) -> bool:
    if node.op not in KNOWN or node.kwargs or len(node.types) != 1:
        return False
    (kind,) = node.types
    if kind is None or kind.dtype != "float32" or not kind.shape or not kind.numel:
        return False
    for i, arg in enumerate(node.args):
        condition = node.op.startswith("aten.where") and i == 0
        if isinstance(arg, Ref):
            other = kinds[arg.name]
            if other is None or other.dtype != ("bool" if condition else "float32"):
                return False
            if other.shape and (condition or other.shape != kind.shape):
                return False
        elif not isinstance(arg, (int, float)) or isinstance(arg, bool) or not math.isfinite(arg):
            return False
    return True


def _instance(
    nodes: Sequence[Node],
    group: int,
    graph: Graph,
    kinds: dict[str, TensorType | None],
    written: dict[str, list[str]],
    uses: dict[str, set[int]],
) -> tuple[Any, Instance] | None:
    """(what is computed, by whom), or None where somebody else needs what lies between, or reads what is written."""
    inside = {n.name: f"v{i}" for i, n in enumerate(nodes)}
    tensors: dict[str, None] = {}
    scalars: dict[str, None] = {}
    rule = []
    for node in nodes:
        words: list[Any] = []
        for arg in node.args:
            if not isinstance(arg, Ref):
                words.append(float(arg))
            elif arg.name in inside:
                words.append(inside[arg.name])
            else:
                names, letter = (tensors, "t") if kinds[arg.name].shape else (scalars, "s")  # type: ignore[union-attr]
                names.setdefault(arg.name)
                words.append(f"{letter}{list(names).index(arg.name)}")
        rule.append((node.op, tuple(words)))
    outputs, results = [], []
    for i, node in enumerate(nodes):
        if uses.get(node.name, {group}) - {group}:
            return None
        for buffer in written.get(node.name, ()):
            # Elements are read before the same elements are written: a buffer may be both, but nobody else's.
            if uses.get(buffer, {group}) - {group, -1} or graph.types[buffer].shape != node.types[0].shape:  # type: ignore[union-attr]
                return None
            outputs.append(buffer)
            results.append(i)
    if not outputs:
        return None
    kind = nodes[0].types[0]
    assert kind is not None
    flags = tuple(kinds[s].dtype == "bool" for s in scalars)  # type: ignore[union-attr]
    return (tuple(rule), flags, tuple(results)), Instance(tuple(tensors), tuple(scalars), tuple(outputs), kind.numel)


def _lie_alike(
    instance: Instance,
    graph: Graph,
    kinds: Mapping[str, TensorType | None],
    views: Mapping[str, View],
    fixed: Collection[str],
    across: dict[str, TensorType],
) -> bool:
    buffers = [name for name in (*instance.tensors, *instance.outputs) if name in graph.types]
    kind = graph.types[buffers[0]]
    if kind.extent != kind.numel or any(graph.types[b] != kind for b in buffers):
        return False
    others = [name for name in instance.tensors if name not in graph.types]
    wrong = [name for name in others if across.get(name, kinds[name]) != kind]
    if any(name in views or name in fixed for name in wrong):
        return False
    across |= dict.fromkeys(wrong, kind)
    return True
