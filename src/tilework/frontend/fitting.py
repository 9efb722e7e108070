"""Does this artifact still fit this model? Its parameters, inputs and optimizers; and what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..artifact.graph import Graph
from ..artifact.manifest import Manifest, Signature
from ..artifact.names import Kind


def misfits(manifest: Manifest, s: Signature, model: nn.Module, inputs: Sequence[Tensor], optimizers: Sequence[Any]) -> list[str]:
    """Every difference, in words: what was found here, what was compiled."""
    problems: list[str] = []
    own: dict[str, Tensor] = {Kind.PARAM.of(k): p for k, p in model.named_parameters()}
    own |= {Kind.BUFFER.of(k): b for k, b in model.named_buffers()}
    for name, t in own.items():
        entry = manifest.buffers.get(name)
        if entry is not None and list(entry.shape) != list(t.shape):
            problems.append(f"{name}: found {list(t.shape)}, expected {list(entry.shape)}")
    for parameter in manifest.parameters:
        name = Kind.PARAM.of(parameter.name)
        if name not in own:
            problems.append(f"{name}: the model has no such parameter")
    if len(inputs) != len(s.inputs):
        problems.append(f"inputs: found {len(inputs)}, expected {len(s.inputs)}: {', '.join(a.name for a in s.inputs)}")
    for t, a in zip(inputs, s.inputs, strict=False):
        shape = list(a.type.shape)
        if s.batch_dim is not None and len(shape) > s.batch_dim:
            shape[s.batch_dim] *= s.num_micro_batches
        if list(t.shape) != shape:
            problems.append(f"input {a.name}: found {list(t.shape)}, expected {shape} (batch size {s.num_rows})")
    count = len({g.optimizer for g in manifest.groups})
    if optimizers and count and len(optimizers) != count:
        problems.append(f"optimizers: found {len(optimizers)}, expected {count}")
    return problems


def differing_operators(here: Graph, there: Graph) -> list[str] | None:
    """None where both graphs compute the same; else the operators that only one of them has, if any."""
    ours, theirs = _operators(here), _operators(there)
    return None if ours == theirs else sorted({n for n, _ in ours} ^ {n for n, _ in theirs})


def _operators(graph: Graph) -> list[tuple[str, Any]]:
    """A graph without the names of its values: operators, what they use (by position) and constants; then what is written."""
    number: dict[str, Any] = {}
    found: list[tuple[str, Any]] = []
    for node in graph.nodes:
        renamed = node.map_refs(lambda r: str(number.get(r, r)))
        found.append((node.op, repr((renamed.args, sorted(renamed.kwargs.items())))))
        number[node.name] = f"#{len(number)}"
    return [*found, *[("write " + buffer, str(number.get(value, value))) for buffer, value in graph.writes]]
