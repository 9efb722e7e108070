"""The verifier: rules that every graph keeps, after capture and after each pass. A pass that breaks one is found here, at compile
time, and not in somebody's numbers.

- every name is defined once, before it is used, and every buffer has a type;
- a node's types are those that its operator gives for its arguments;
- no operator draws random numbers that are not seeded, and none changes its arguments;
- an operator that native code carries out in place (an update of a weight) changes the buffer that it is written to, and reads no
  other memory that the step changes.

That generated code reads nothing after it was written is checked where it is ordered: compiler/to_fx.py, verify_order."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..artifact import operators  # noqa: F401  (defines our own operators)
from ..artifact.graph import DTYPES, Graph, Node, Ref, TensorType, name_of
from ..errors import BugError
from .aliases import shares_with

_IN_PLACE = "tilework.updated_by_product.default"
_ATTENTION = "scaled_dot_product"  # marked as random for its dropout


def verify(graph: Graph, stage: str, before: Graph | None = None, seen: dict[Any, Any] | None = None) -> None:
    """BugError where the graph breaks a rule. Types are checked of nodes that were not in the graph `before`; `seen` remembers
    what operators give, from graph to graph."""
    try:
        graph.verify()
    except ValueError as e:
        raise _broken(graph, stage, str(e)) from e
    made = {n.name: n for n in graph.nodes}
    known = {n.name: n for n in before.nodes} if before is not None else {}
    changed_buffers = {b for b, t in graph.types.items() if before is None or before.types.get(b) != t}
    seen = {} if seen is None else seen
    for node in graph.nodes:
        _check_operator(graph, stage, node)
        if node.op == _IN_PLACE:
            _check_in_place(graph, stage, node, made)
        same = known.get(node.name) == node and not changed_buffers.intersection(node.refs())
        if not same:
            _check_types(graph, stage, node, made, seen)


def _broken(graph: Graph, stage: str, what: str) -> BugError:
    fix = (
        f"leave it out (--disable {stage.removeprefix('pass ')}) to go on, and report this" if "pass" in stage else "report this"
    )
    return BugError("verify-graph", f"after {stage}, graph {graph.name} breaks a rule: {what}", fix=fix)


def _operator(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


def _check_operator(graph: Graph, stage: str, node: Node) -> None:
    op = _operator(node.op)
    if op is operator.getitem:
        return
    if op._schema.is_mutable:
        raise _broken(graph, stage, f"{node.name} = {node.op} changes its arguments")
    if torch.Tag.nondeterministic_seeded in op.tags and not (_ATTENTION in node.op and not _dropout_of(node)):
        raise _broken(graph, stage, f"{node.name} = {node.op} draws random numbers that are not seeded")


def _dropout_of(node: Node) -> float:
    schema = _operator(node.op)._schema
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    return float(given.get("dropout_p") or 0.0)


def _check_in_place(graph: Graph, stage: str, node: Node, made: Mapping[str, Node]) -> None:
    weight, *rest = (name_of(a) for a in node.args)
    if (weight, node.name) not in graph.writes:
        raise _broken(graph, stage, f"{node.name} updates {weight} in place, but is not what is written to it")
    if sum(node.name in n.refs() for n in graph.nodes) or sum(value == node.name for _, value in graph.writes) > 1:
        raise _broken(graph, stage, f"{node.name} updates {weight} in place, and its result is used elsewhere as well")
    for operand in filter(None, rest):
        shared = shares_with(operand, made) & graph.written
        if shared:
            names = ", ".join(sorted(shared))
            raise _broken(graph, stage, f"{node.name} reads {operand}, which is memory of {names}, while the step changes it")


def _check_types(graph: Graph, stage: str, node: Node, made: Mapping[str, Node], seen: dict[Any, Any]) -> None:
    """Shapes and dtypes as the operator itself would have them. Layouts may be chosen otherwise."""

    def kinds_of(name: str) -> tuple[TensorType | None, ...]:
        return made[name].types if name in made else (graph.types[name],)

    def spelt(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return kinds_of(arg.name)
        return tuple(map(spelt, arg)) if isinstance(arg, (list, tuple)) else (type(arg), repr(arg))

    def value(arg: Any) -> Any:
        if isinstance(arg, Ref):
            kinds = kinds_of(arg.name)
            return [_fake(k) for k in kinds] if node.op == "getitem" else _fake(kinds[0])
        return [value(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

    key = (node.op, spelt(node.args), tuple((k, spelt(v)) for k, v in node.kwargs.items()))
    if key not in seen:
        with FakeTensorMode(), torch.no_grad():
            try:
                found = _operator(node.op)(*[value(a) for a in node.args], **{k: value(v) for k, v in node.kwargs.items()})
            except Exception as e:
                text = str(e).splitlines()[0][:200]
                raise _broken(graph, stage, f"{node.name} = {node.op} cannot take its arguments: {text}") from e
        results = list(found) if isinstance(found, (list, tuple)) else [found]
        seen[key] = [(tuple(r.shape), r.dtype) if isinstance(r, torch.Tensor) else None for r in results]
    for i, (result, kind) in enumerate(zip(seen[key], node.types, strict=False)):
        if kind is not None and result is not None and result != (kind.shape, DTYPES[kind.dtype]):
            real = f"{str(result[1]).removeprefix('torch.')}{list(result[0])}"
            raise _broken(graph, stage, f"result {i} of {node.name} = {node.op} is declared {kind}, and is {real}")


def _fake(kind: TensorType | None) -> torch.Tensor | None:
    if kind is None:
        return None
    return torch.empty_strided(kind.shape, kind.stride, dtype=DTYPES[kind.dtype])
