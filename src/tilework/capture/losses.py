"""The joint graph for the known losses, made out of the one for any gradients of the outputs: the model is traced once.

Gradients flow from the losses alone, with ones to begin with; those of the other outputs are absent. A value that depends
on nothing but absent gradients is absent as well, and where an absent gradient would be added, the sum is the other part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..artifact.graph import VIEWS, Graph, Node, Ref
from ..artifact.names import Buffer, Kind, is_kind

# Operators of a backward pass whose result is zero where the gradient that comes in is zero. The rest of them are called
# something_backward. Anything else may come from a backward that the user wrote, which zeros may not leave at zero.
_ZERO_TO_ZERO = VIEWS | {
    "reshape", "clone", "_to_copy", "copy", "neg", "mul", "div", "mm", "bmm", "sum", "mean", "getitem", "slice_scatter",
    "tanh_backward", "max_pool_grad",
}  # fmt: skip


def from_losses(joint: Graph, losses: Sequence[str], scale: float = 1.0) -> Graph | None:
    """Gradients begin with `scale` at the losses. None: not certain for this graph; it has to be traced."""
    given = [r for r in joint.reads if is_kind(r, Kind.OUTGRAD)]
    absent = {g for g in given if Buffer(g).name not in losses}
    values = dict(joint.writes)
    seeds: dict[str, Node] = {}
    rename: dict[str, str] = {}
    for loss in losses:
        source, seed = values[Kind.OUTPUT.of(loss)], f"outgrad.{loss}"
        if Kind.OUTGRAD.of(loss) not in given:
            return None
        if source in seeds:  # one value, returned twice
            rename[Kind.OUTGRAD.of(loss)] = seeds[source].name
            continue
        rename[Kind.OUTGRAD.of(loss)] = seed
        seeds[source] = Node(seed, "aten.full_like.default", (Ref(source), scale), {"pin_memory": False},
                             (joint.types[Kind.OUTGRAD.of(loss)],))  # fmt: skip
    tainted = set(given)  # what depends on any gradient
    kinds = {**joint.types, **{n.name: n.types[0] for n in joint.nodes}}
    nodes = [seeds[r] for r in joint.reads if r in seeds]
    for node in joint.nodes:
        grads = tainted.intersection(node.refs())
        if not grads:
            nodes.append(node)
        else:
            tainted.add(node.name)
            missing = grads & absent
            if missing and missing == grads:
                kind = node.op.split(".")[1] if "." in node.op else node.op
                if kind not in _ZERO_TO_ZERO and not kind.endswith("_backward"):
                    return None
                absent.add(node.name)
            elif missing:
                other = _other_part(node, missing)
                if other is None or kinds[other] != node.types[0]:
                    return None
                rename[node.name] = rename.get(other, other)
            else:
                nodes.append(node.map_refs(lambda r: rename.get(r, r)))
        if node.name in seeds:
            nodes.append(seeds[node.name])
    writes = tuple((buffer, rename.get(value, value)) for buffer, value in joint.writes if value not in absent)
    reads = tuple(r for r in joint.reads if r not in given)
    types = {b: t for b, t in joint.types.items() if b not in given}
    graph = replace(joint, reads=reads, nodes=tuple(nodes), writes=writes, types=types).prune()
    graph.verify()
    return graph


def _other_part(node: Node, missing: set[str]) -> str | None:
    """For a sum of two, one of them absent: the other."""
    if node.op != "aten.add.Tensor" or node.kwargs.get("alpha", 1) != 1:
        return None
    parts = [a.name for a in node.args if isinstance(a, Ref)]
    left = [p for p in parts if p not in missing]
    return left[0] if len(parts) == 2 and len(left) == 1 else None
