"""What repeats in a graph: stretches of nodes that do the same with other buffers, and what lies between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..artifact.graph import Graph, Node, Ref, TensorType
from .views import View

PERIOD = 8  # nodes: shorter stretches are not worth a call
RANDOM = "tilework.random_bits.default"
IN_PLACE = "tilework.updated_by_product.default"
_HEAVY = ("product", "conv", "mm", "attention", "embedding", "index", "linalg", "sort")  # a kernel of its own in any case


@dataclass(frozen=True)
class Segment:
    start: int
    stop: int
    family: int  # segments of one family do the same; -1: one of its own


class Listing:
    """The nodes of a graph that compute something, in order: without views, and without those that are left out."""

    def __init__(
        self, graph: Graph, views: Mapping[str, View], without: Collection[str], across: Mapping[str, TensorType]
    ) -> None:
        self.graph, self.views, self.across = graph, views, across
        self.made = {n.name: n for n in graph.nodes}
        self.nodes = _parts_after_their_whole([n for n in graph.nodes if n.name not in self.views and n.name not in without])
        self.position = {n.name: i for i, n in enumerate(self.nodes)}
        self.uses: dict[int, list[int]] = {}  # position -> where its result is used
        for i, node in enumerate(self.nodes):
            for ref in node.refs():
                at = self.position.get(self.base(ref))
                if at is not None:
                    self.uses.setdefault(at, []).append(i)

    def base(self, name: str) -> str:
        """What a value is a view of; itself if it is none."""
        view = self.views.get(name)
        return view.base if view is not None else name

    def is_buffer(self, name: str) -> bool:
        return name in self.graph.types and name not in self.made

    def type(self, name: str) -> Any:
        """Of a buffer, or of a value as it lies between pieces (`across`); several for an operator with several results."""
        if self.is_buffer(name):
            return self.graph.types[name]
        types = self.made[name].types
        return self.across.get(name, types[0]) if len(types) == 1 else types

    # ---- segments ----

    def segments(self, size: int) -> tuple[list[Segment], int]:
        """(all nodes in segments, how many nodes are repetitions of others). What does not repeat is cut into segments of about
        `size` nodes."""
        families = self._families()
        repeated = sum(stop - start for spans in families for start, stop in spans[1:])
        alike = sorted((start, stop, f) for f, spans in enumerate(families) for start, stop in spans)
        found, at = [], 0
        for start, stop, family in alike:
            found += [*self._parts(at, start, size), Segment(start, stop, family)]
            at = stop
        return found + self._parts(at, len(self.nodes), size), repeated

    def _parts(self, start: int, stop: int, size: int) -> list[Segment]:
        """What lies between repetitions; something long in several parts, cut where little crosses."""
        count = max(1, round((stop - start) / size))
        cuts = [start]
        for i in range(1, count):
            middle, leeway = start + (stop - start) * i // count, max(1, (stop - start) // count // 4)
            places = [at for at in range(middle - leeway, middle + leeway) if self._may_begin(at)]
            cuts += [min(places, key=lambda at: (self._across(at, leeway), abs(at - middle)))] if places else []
        return [Segment(a, b, -1) for a, b in zip(cuts, [*cuts[1:], stop], strict=True) if a < b]

    def _families(self) -> list[list[tuple[int, int]]]:
        """Stretches of nodes that do the same: lists of (start, stop)."""
        labels, found = self._labels(), []
        todo = [(0, len(labels))]
        while todo:
            start, stop = todo.pop()
            region = _repetition(labels[start:stop], [_is_heavy(n) for n in self.nodes[start:stop]])
            if region is None:
                continue
            first, last, period = start + region[0], start + region[1], region[2]
            spans = self._same(first, last, period)
            if len(spans) > 1:
                found.append(spans)
            todo += [(start, first), (last, stop)]
        return found

    def _same(self, first: int, last: int, period: int) -> list[tuple[int, int]]:
        """The repetitions in a region, cut where little crosses, and of these the most that agree also in what refers to what."""
        most = (last - first) // period
        shifts = [s for s in range((last - first) - most * period + 1)
                  if all(self._may_begin(first + s + i * period) for i in range(most + 1))]  # fmt: skip
        if not shifts:
            return []
        shift = min(shifts, key=lambda s: sum(self._across(first + s + i * period, period) for i in range(most + 1)))
        spans = [(first + shift + i * period, first + shift + (i + 1) * period) for i in range(most)]
        structures = [self._structure(*span) for span in spans]
        common, _ = Counter(structures).most_common(1)[0]
        return [span for span, structure in zip(spans, structures, strict=True) if structure == common]

    def _may_begin(self, at: int) -> bool:
        """A getitem stays with the operator whose result it takes."""
        return at >= len(self.nodes) or self.nodes[at].op != "getitem"

    def _across(self, at: int, reach: int) -> int:
        """Bytes that are made within `reach` nodes before a place and used within as many after it."""
        total = 0
        for i in range(max(0, at - reach), min(at, len(self.nodes))):
            if any(at <= use < at + reach for use in self.uses.get(i, ())):
                total += sum(t.num_bytes for t in self.nodes[i].types if t is not None)
        return total

    def _structure(self, start: int, stop: int) -> Any:
        """What refers to what within a stretch: (position, offset of the view, type) of each reference; -1: from outside."""
        found = []
        for node in self.nodes[start:stop]:
            for ref in node.refs():
                at = self.position.get(self.base(ref), -1)
                inside = start <= at < stop
                offset = self.views[ref].offset if inside and ref in self.views else -1
                found.append((at - start if inside else -1, offset, self.type(ref)))
        return tuple(found)

    def _labels(self) -> np.ndarray[Any, Any]:
        """A number for each node, the same for nodes that do the same with tensors of the same types."""
        known: dict[Any, int] = {}
        labels = []
        for i, node in enumerate(self.nodes):
            key: Any = (node.op, self._plain(node), node.types, self.type(node.name))
            labels.append(-i - 1 if node.op == IN_PLACE else known.setdefault(key, len(known)))
        return np.array(labels, dtype=np.int64)

    def _plain(self, node: Node) -> Any:
        """Arguments without names: a reference is its type. Sites of random numbers may differ."""

        def value(v: Any) -> Any:
            if isinstance(v, Ref):
                return self.type(v.name)
            if isinstance(v, dict):
                return tuple((k, value(x)) for k, x in v.items())
            if isinstance(v, (list, tuple)):
                return tuple(map(value, v))
            return (type(v).__name__, repr(v))  # 1, 1.0 and True are different arguments

        return value(node.args[:2] if node.op == RANDOM else node.args), value(node.kwargs)


def _is_heavy(node: Node) -> bool:
    return any(word in node.op for word in _HEAVY)


def _parts_after_their_whole(nodes: list[Node]) -> list[Node]:
    """With each getitem right after the operator whose result it takes."""
    parts: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "getitem":
            parts.setdefault(node.args[0].name, []).append(node)
    ordered = []
    for node in nodes:
        if node.op != "getitem":
            ordered += [node, *parts.get(node.name, ())]
    return ordered


def _repetition(labels: np.ndarray[Any, Any], heavy: Sequence[bool]) -> tuple[int, int, int] | None:
    """(start, stop, period) of the stretch that repeats and saves most, each repetition with something heavy in it."""
    best: tuple[int, tuple[int, int, int]] | None = None
    weighty = np.concatenate([[0], np.cumsum(np.array(heavy, dtype=np.int64))])
    for period in range(PERIOD, len(labels) // 2 + 1):
        same = np.concatenate([[False], labels[period:] == labels[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            if stop - start < period or not weighty[start + period] - weighty[start]:
                continue
            count = (stop - start + period) // period
            saves = (count - 1) * period
            if saves >= 2 * PERIOD and (best is None or saves > best[0]):
                best = (saves, (int(start), int(stop + period), period))
    return best[1] if best else None
