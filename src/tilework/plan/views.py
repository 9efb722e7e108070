"""Values of a graph that are views: which part of which other value they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..artifact.graph import DTYPES, Graph, Ref, TensorType
from .aliases import is_view, operator_named

_COPIES = {"clone", "_to_copy", "copy"}  # may share memory, but are not asked to
_AS_VIEW = {"aten._unsafe_view.default": "aten.view.default"}


@dataclass(frozen=True)
class View:
    base: str
    type: TensorType
    offset: int  # elements, beyond the base's own


def find_views(graph: Graph) -> dict[str, View]:
    """Each view of a tensor with the base's dtype, and what it is a view of: a buffer, or a node that makes memory of its own."""
    tensors: dict[str, Any] = {b: _meta(t) for b, t in graph.types.items() if b in graph.reads}
    base: dict[str, str] = {b: b for b in tensors}
    found: dict[str, View] = {}
    lists: dict[str, Any] = {}
    for node in graph.nodes:
        source = node.refs()[0] if node.refs() else ""
        result: Any = None
        if node.op == "getitem" and source in lists:
            result = lists[source][node.args[1]]
        elif node.op != "getitem" and node.op.split(".")[1] not in _COPIES and is_view(node.op) and len(node.refs()) == 1:
            result = _applied(node, tensors.get(source))
            if isinstance(result, (list, tuple)):
                if not all(TensorType.of(r) == t and _shares(r, tensors[base[source]])
                           for r, t in zip(result, node.types, strict=True)):  # fmt: skip
                    continue
                lists[node.name], base[node.name] = result, base[source]
                found[node.name] = View(base[source], TensorType("int64", (), ()), 0)  # the list itself: nobody's argument
                continue
        kind = node.types[0] if len(node.types) == 1 else None
        if result is not None and kind is not None and TensorType.of(result) == kind and _shares(result, tensors[base[source]]):
            tensors[node.name], base[node.name] = result, base[source]
            found[node.name] = View(base[source], kind, int(result.storage_offset()))
        elif kind is not None:
            tensors[node.name], base[node.name] = _meta(kind), node.name
    return found


def _meta(kind: TensorType) -> torch.Tensor:
    return torch.empty_strided(kind.shape, kind.stride, dtype=DTYPES[kind.dtype], device="meta")


def _applied(node: Any, source: torch.Tensor | None) -> Any:
    if source is None:
        return None
    op = operator_named(_AS_VIEW.get(node.op, node.op))

    def value(v: Any) -> Any:
        return source if isinstance(v, Ref) else v

    try:
        return op(*map(value, node.args), **{k: value(v) for k, v in node.kwargs.items()})
    except Exception:  # not a view of this layout: it makes memory of its own, like any other operator
        return None


def _shares(result: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether the result is elements of the base as they are: not the conjugate or the negative of them, which are views too."""
    same = result.untyped_storage()._cdata == base.untyped_storage()._cdata
    return same and result.dtype == base.dtype and not result.is_conj() and not result.is_neg()
