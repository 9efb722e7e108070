"""The artifact's own graphs in float64: where float32 results of two sides differ, this says which of the two is off, or whether
the arithmetic is such that both have to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..artifact.graph import Graph, TensorType
from ..artifact.manifest import Argument, Manifest
from ..artifact.manifest import Tensor as TensorEntry
from ..artifact.reader import Artifact
from ..runtime.session import Session
from .sides import SEED, Results, run_artifact


def run_wide(artifact: Artifact, start: dict[str, Tensor], inputs: list[Tensor]) -> Results:
    """What the reference device computes from the weights `start`, in float64."""
    wide = replace(
        artifact,
        manifest=_manifest(artifact.manifest),
        graphs={name: _graph(graph) for name, graph in artifact.graphs.items()},
        constants={k: _value(t) for k, t in artifact.constants.items()},
        weights=None,
    )
    with Session(wide, device="reference", seed=SEED, weights=False) as session:
        session.load_tensors({k: _value(t) for k, t in start.items()})
        return run_artifact(session, [_value(t) for t in inputs])


def _value(t: Tensor) -> Tensor:
    return t.double() if t.dtype == torch.float32 else t


def _dtype(name: str) -> str:
    return "float64" if name == "float32" else name


def _type(kind: TensorType) -> TensorType:
    return replace(kind, dtype=_dtype(kind.dtype))


def _entry(kind: TensorEntry) -> TensorEntry:
    return msgspec.structs.replace(kind, dtype=_dtype(kind.dtype))


def _manifest(manifest: Manifest) -> Manifest:
    def arguments(those: list[Argument]) -> list[Argument]:
        return [msgspec.structs.replace(a, type=_entry(a.type)) for a in those]

    return msgspec.structs.replace(
        manifest,
        inputs=arguments(manifest.inputs),
        outputs=arguments(manifest.outputs),
        infer_outputs=arguments(manifest.infer_outputs),
        parameters=[msgspec.structs.replace(p, type=_entry(p.type)) for p in manifest.parameters],
        buffers={k: _entry(t) for k, t in manifest.buffers.items()},
    )


def _graph(graph: Graph) -> Graph:
    nodes = tuple(
        replace(
            n, args=_argument(n.args), kwargs=_argument(n.kwargs), types=tuple(None if t is None else _type(t) for t in n.types)
        )
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes, types={k: _type(t) for k, t in graph.types.items()})


def _argument(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if isinstance(value, (list, tuple)):
        return type(value)(_argument(v) for v in value)
    if isinstance(value, dict):
        return {k: _argument(v) for k, v in value.items()}
    return value
