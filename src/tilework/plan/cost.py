"""What a graph costs: floating-point operations, bytes moved, and the peak of its temporaries. Estimates from shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..artifact.graph import VIEWS, Graph, Node, Ref, TensorType

# Below these a second thread does not pay: waking it takes microseconds, and waiting for it much longer where others want its
# core. LeNet's step at batch 1 (2.7 Mflop, 1.6 MB) takes 58 us with one thread and 80 with two; 784-512-256-10 at batch 1
# (3.2 Mflop, 9 MB) 68 and 56; LeNet at batch 64 (147 Mflop) 2.7 ms and 1.6. On 2 cores; LeNet at batch 1 takes 125 us with 16.
_PARALLEL_FLOPS = 8 << 20
_PARALLEL_BYTES = 4 << 20


@dataclass(frozen=True)
class Cost:
    flops: int
    bytes: int  # what the graph's buffers hold, each counted once for a read and once for a write
    temporary_bytes: int  # peak of live intermediate results, before fusion: an upper bound

    @property
    def parallel(self) -> bool:
        """Whether more than one thread pays."""
        return self.flops >= _PARALLEL_FLOPS or self.bytes + self.temporary_bytes >= _PARALLEL_BYTES


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
