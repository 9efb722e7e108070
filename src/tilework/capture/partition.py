"""Cuts a joint forward and backward graph in two: `fwd` keeps what `bwd` will need in buffers named saved/..."""

from __future__ import annotations

from dataclasses import replace

from ..artifact.graph import VIEWS, Graph, Node
from ..artifact.names import Kind, is_kind

# Views and other free operators: cheaper to repeat in bwd than to keep their result. Not those with several results, whose
# producer would have to be repeated with each.
_FREE = (VIEWS - {"split", "unbind"}) | {
    "reshape", "full", "ones_like", "zeros_like", "full_like", "scalar_tensor", "arange",
}  # fmt: skip


def _is_free(node: Node) -> bool:
    if node.op == "getitem":
        return False  # its producer would have to be repeated with it
    return node.op.split(".")[1] in _FREE


def partition(joint: Graph) -> tuple[Graph, Graph]:
    """(fwd, bwd). Buffers outgrad/* are what bwd starts from; writes of gradients belong to bwd, all others to fwd."""
    tainted = {r for r in joint.reads if is_kind(r, Kind.OUTGRAD)}
    forward_nodes, backward_nodes = [], []
    for node in joint.nodes:
        if tainted.intersection(node.refs()):
            tainted.add(node.name)
            backward_nodes.append(node)
        else:
            forward_nodes.append(node)
    forward_writes = tuple(w for w in joint.writes if not is_kind(w[0], Kind.GRAD, Kind.INPUT_GRAD))
    backward_writes = tuple(w for w in joint.writes if is_kind(w[0], Kind.GRAD, Kind.INPUT_GRAD))

    # what bwd uses of fwd, with free nodes repeated instead of kept
    made_forward = {n.name: n for n in forward_nodes}
    changed = {buffer for buffer, _ in forward_writes}
    wanted = [ref for n in backward_nodes for ref in n.refs()] + [value for _, value in backward_writes]
    saved: dict[str, str] = {}
    repeated: dict[str, Node] = {}
    todo = list(dict.fromkeys(wanted))
    while todo:
        ref = todo.pop()
        if ref in tainted or ref in saved or ref in repeated:
            continue
        made = made_forward.get(ref)
        if made is not None and _is_free(made):
            repeated[ref] = made
            todo += made.refs()
        elif made is not None or ref in changed:  # a buffer that fwd changes must be kept as it was
            saved[ref] = Kind.SAVED.of(ref.replace("/", "."))

    types = dict(joint.types)
    for ref, buffer in saved.items():
        kept = made_forward[ref].types[0] if ref in made_forward else joint.types[ref]
        assert kept is not None
        types[buffer] = kept
    fwd = Graph(
        "fwd",
        joint.reads,
        tuple(replace(n, section="fwd") for n in forward_nodes),
        (*forward_writes, *((buffer, ref) for ref, buffer in saved.items())),
        types,
    ).prune()

    def rename(ref: str) -> str:
        return saved.get(ref, ref)

    nodes = [n for n in forward_nodes if n.name in repeated] + backward_nodes
    bwd = Graph(
        "bwd",
        (*joint.reads, *saved.values()),
        tuple(replace(n.map_refs(rename), section="bwd") for n in nodes),
        tuple((buffer, rename(value)) for buffer, value in backward_writes),
        types,
    ).prune()
    fwd.verify()
    bwd.verify()
    return fwd, bwd


def label_sections(joint: Graph) -> Graph:
    """Marks each node of a joint graph as fwd (needed for outputs) or bwd (only needed for gradients)."""
    needed = {value for buffer, value in joint.writes if not is_kind(buffer, Kind.GRAD)}
    for node in reversed(joint.nodes):
        if node.name in needed:
            needed.update(node.refs())
    nodes = tuple(replace(n, section="fwd" if n.name in needed else "bwd") for n in joint.nodes)
    return replace(joint, nodes=nodes)
