"""What a graph costs: floating-point operations, bytes moved, and the peak of its temporaries. Estimates from shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..artifact.graph import VIEWS, Graph, Node, Ref, TensorType

# LeNet's step at batch 1 (2.5 Mflop) is worth two or three threads: 77 us with 2 of them, 125 with 16.
_FLOPS_A_THREAD = 1 << 20
_BYTES_A_THREAD = 1 << 19


@dataclass(frozen=True)
class Cost:
    flops: int
    bytes: int  # what the graph's buffers hold, each counted once for a read and once for a write
    temporary_bytes: int  # peak of live intermediate results, before fusion: an upper bound

    @property
    def threads(self) -> int:
        """How many threads may pay: each must have something to compute, or memory to go through, for tens of microseconds."""
        return max(1, self.flops // _FLOPS_A_THREAD, (self.bytes + self.temporary_bytes) // _BYTES_A_THREAD)


def cost_of(graph: Graph) -> Cost:
    types: dict[str, TensorType | None] = dict(graph.types)
    for node in graph.nodes:
        types[node.name] = node.types[0] if node.types else None
    flops = sum(_flops(node, types) for node in graph.nodes)
    moved = sum(graph.types[b].num_bytes for b in graph.reads) + sum(graph.types[b].num_bytes for b in graph.written)
    return Cost(flops, moved, _peak(graph))


def _shape(arg: object, types: dict[str, TensorType | None]) -> tuple[int, ...]:
    kind = types.get(arg.name) if isinstance(arg, Ref) else None
    return kind.shape if kind is not None else ()


def _flops(node: Node, types: dict[str, TensorType | None]) -> int:
    op = node.op.split(".")[1] if "." in node.op else node.op
    out = node.types[0] if node.types else None
    if op in ("mm", "bmm", "product", "batch_product"):
        return 2 * (out.numel if out else 0) * _shape(node.args[0], types)[-1]
    if op in ("addmm", "baddbmm", "updated_by_product"):
        return 2 * (out.numel if out else 0) * _shape(node.args[1], types)[-1]
    if op in ("small_conv_input_grad", "small_conv_weight_grad"):  # (grad, weight, ...) and (grad, x, shape of the weight, ...)
        weight = _shape(node.args[1], types) if op == "small_conv_input_grad" else node.args[2]
        return 2 * math.prod(_shape(node.args[0], types)) * math.prod(weight[1:])
    if op in ("convolution", "small_conv"):
        return 2 * (out.numel if out else 0) * math.prod(_shape(node.args[1], types)[1:])
    if op == "convolution_backward":
        once = 2 * math.prod(_shape(node.args[0], types)) * math.prod(_shape(node.args[2], types)[1:])
        return once * sum(bool(m) for m in node.args[-1][:2])
    if op in VIEWS or op == "getitem" or out is None:
        return 0
    return out.numel


def _peak(graph: Graph) -> int:
    last_use: dict[str, int] = {value: len(graph.nodes) for _, value in graph.writes}
    for i, node in enumerate(graph.nodes):
        for ref in node.refs():
            last_use[ref] = max(last_use.get(ref, 0), i)
    live = peak = 0
    ends: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        op = node.op.split(".")[1] if "." in node.op else node.op
        size = 0 if op in VIEWS or op == "getitem" else sum(t.num_bytes for t in node.types if t)
        live += size
        peak = max(peak, live)
        end = max(last_use.get(node.name, i), i)
        ends[end] = ends.get(end, 0) + size
        live -= ends.pop(i, 0)
    return peak
