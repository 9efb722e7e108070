"""sums: a pass, on by default. A weight that is used many times (a recurrent layer's, at every time step) has a gradient that is
a sum of small products, a^T b at each use. One product of all a's under each other with all b's under each other gives the same
sum, without reading and writing the whole gradient once a use. The same for a bias, whose gradient is a sum of sums over rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..artifact.graph import Graph, Node, Ref, TensorType, name_of

FEW = 4  # terms: fewer are added as they are
_CAT, _STACK = "aten.cat.default", "aten.stack.default"
_ADD, _MM, _T, _SUM, _VIEW = "aten.add.Tensor", "aten.mm.default", "aten.t.default", "aten.sum.dim_IntList", "aten.view.default"


def sums(graph: Graph) -> Graph:
    return _Sums(graph).run()


@dataclass(frozen=True)
class _Term:
    rows: str  # a, [k, m]: the product is a^T b, the sum goes over a's rows
    other: str  # b, [k, n]; empty for a sum
    turned: bool  # the transpose of the product


class _Sums:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made = {n.name: n for n in graph.nodes}
        self.uses: dict[str, int] = {}
        for ref in [*(r for n in graph.nodes for r in n.refs()), *(value for _, value in graph.writes)]:
            self.uses[ref] = self.uses.get(ref, 0) + 1
        self.stacks = {frozenset(n.refs()): n.refs() for n in graph.nodes if n.op == _STACK}

    def run(self) -> Graph:
        inner = {ref for n in self.graph.nodes if self._is_add(n) for ref in n.refs() if self._is_inner(ref, n)}
        replaced: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            if self._is_add(node) and node.name not in inner:
                new = self._together(node)
                if new:
                    replaced[node.name] = new
        if not replaced:
            return self.graph
        nodes = [new for n in self.graph.nodes for new in replaced.get(n.name, [n])]
        result = _collected_once(replace(self.graph, nodes=tuple(nodes)).prune())
        result.verify()
        return result

    def _is_add(self, node: Node) -> bool:
        kind = node.types[0] if len(node.types) == 1 else None
        if node.op != _ADD or node.kwargs or kind is None or kind.dtype != "float32" or len(kind.shape) not in (1, 2):
            return False
        return all(isinstance(a, Ref) and self._type(a.name).shape == kind.shape for a in node.args)

    def _is_inner(self, ref: str, of: Node) -> bool:
        node = self.made.get(ref)
        return node is not None and self._is_add(node) and self.uses[ref] == 1 and node.types[0].shape == of.types[0].shape  # type: ignore[union-attr]

    def _type(self, name: str) -> TensorType:
        kind = self.made[name].types[0] if name in self.made else self.graph.types[name]
        return kind if kind is not None else TensorType("", (), ())

    def _leaves(self, root: Node) -> list[str]:
        found, todo = [], [root]
        while todo:
            node = todo.pop()
            for ref in node.refs():
                if self._is_inner(ref, node):
                    todo.append(self.made[ref])
                else:
                    found.append(ref)
        return found

    def _term(self, leaf: str) -> _Term | None:
        turned = False
        while (node := self.made.get(leaf)) is not None and node.op == _T and self.uses[leaf] == 1:
            leaf, turned = name_of(node.args[0]), not turned
        if node is None or self.uses[leaf] != 1:
            return None
        if node.op == _VIEW and (total := self.made.get(name_of(node.args[0]))) is not None:
            plain = total.op == _SUM and self.uses[total.name] == 1 and list(total.args[1:]) == [[0], True] and not total.kwargs
            kind = self._type(name_of(total.args[0])) if plain else TensorType("", (), ())
            fits = kind.dtype == "float32" and len(kind.shape) == 2 and self._type(leaf).shape == kind.shape[1:] and not turned
            return _Term(name_of(total.args[0]), "", False) if fits else None
        first = self.made.get(name_of(node.args[0])) if node.op == _MM else None
        if first is None or first.op != _T:
            return None
        rows, other = name_of(first.args[0]), name_of(node.args[1])
        (k, m), (_, n) = self._type(rows).shape, self._type(other).shape
        return _Term(rows, other, turned) if k * (m + n) <= m * n else None  # else copying them costs more than adding

    def _together(self, root: Node) -> list[Node]:
        """The nodes that stand for a sum, its last one with the sum's name; none where there is little to gain."""
        leaves = self._leaves(root)
        found = {leaf: self._term(leaf) for leaf in leaves}
        kinds: dict[tuple[bool, bool], list[_Term]] = {}
        for leaf in leaves:
            term = found[leaf]
            if term is not None:
                kinds.setdefault((bool(term.other), term.turned), []).append(term)
        if not kinds:
            return []
        (product, turned), terms = max(kinds.items(), key=lambda item: len(item[1]))
        if len(terms) < FEW:
            return []
        kind = root.types[0]
        assert kind is not None
        nodes: list[Node] = []

        def make(name: str, op: str, args: tuple[object, ...], shape: tuple[int, ...], turned: bool = False) -> Ref:
            stride = (
                TensorType.dense("float32", shape[::-1]).stride[::-1] if turned else TensorType.dense("float32", shape).stride
            )
            nodes.append(
                replace(root, name=f"{root.name}_{name}", op=op, args=args, types=(TensorType("float32", shape, stride),))
            )
            return Ref(nodes[-1].name)

        # In the order in which somebody else stacks them, if anybody does: then it is done once.
        order = {name: i for i, name in enumerate(self.stacks.get(frozenset(t.rows for t in terms), ()))}
        terms.sort(key=lambda t: order.get(t.rows, 0))
        rows, m = self._stacked([t.rows for t in terms])
        all_rows = make("rows", _CAT, ([Ref(t.rows) for t in terms], 0), (rows, m))
        if product:
            _, n = self._stacked([t.other for t in terms])
            all_other = make("other", _CAT, ([Ref(t.other) for t in terms], 0), (rows, n))
            total = make("product", _MM, (make("turned", _T, (all_rows,), (m, rows), True), all_other), (m, n))
            total = make("back", _T, (total,), (n, m), True) if turned else total
        else:
            total = make("total", _VIEW, (make("sum", _SUM, (all_rows, [0], True), (1, m)), [m]), (m,))
        rest = [leaf for leaf in leaves if (t := found[leaf]) is None or (bool(t.other), t.turned) != (product, turned)]
        for i, leaf in enumerate(rest):
            total = make(f"and_{i}", _ADD, (total, Ref(leaf)), kind.shape)
        nodes[-1] = replace(nodes[-1], name=root.name)
        return nodes

    def _stacked(self, names: list[str]) -> tuple[int, int]:
        """The shape of matrices under each other."""
        shapes = [self._type(name).shape for name in names]
        return sum(s[0] for s in shapes), shapes[0][1]


def _collected_once(graph: Graph) -> Graph:
    """The same matrices under each other (for a weight, for its bias, for the input's weight) are collected once. A stack of them
    is the same memory in another shape."""
    known: dict[tuple[str, ...], Node] = {}
    same: dict[str, str] = {}
    shapes = {n.name: n.types[0].shape for n in graph.nodes if len(n.types) == 1 and n.types[0] is not None}
    shapes |= {name: kind.shape for name, kind in graph.types.items()}
    nodes = []
    for node in (n.map_refs(lambda name: same.get(name, name)) for n in graph.nodes):
        names = tuple(node.refs())
        alike = len({shapes.get(name) for name in names}) == 1 and len(shapes.get(names[0], ())) == 2 if names else False
        if node.op not in (_CAT, _STACK) or node.kwargs or list(node.args[1:]) not in ([], [0]) or not alike or len(names) < FEW:
            nodes.append(node)
            continue
        kind, first = node.types[0], known.setdefault(names, node)
        dense = all(t is not None and t == t.as_dense() for t in (kind, first.types[0]))
        if first is node or kind is None or not dense:
            nodes.append(node)
        elif first.op == node.op:
            same[node.name] = first.name
        else:
            nodes.append(replace(node, op=_VIEW, args=(Ref(first.name), list(kind.shape))))
    writes = tuple((buffer, same.get(value, value)) for buffer, value in graph.writes)
    return replace(graph, nodes=tuple(nodes), writes=writes)
