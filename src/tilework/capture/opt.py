"""The section opt: clipping, and the updates of all parameters. A rule is traced once for all parameters that it treats alike,
and its nodes are copied for each: a model has hundreds of parameters and one or two rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..artifact.graph import Graph, Node, TensorType
from ..artifact.names import NORMS, Kind
from .optimizers import Group, clip, global_norm
from .rules import derived, packed, updated_by
from .trace import to_graph, trace

_COUNT, _HISTORY = Kind.NORM.of("count"), Kind.NORM.of("history")
# The norms of the newest steps: that of step n is at n % NORMS. So a loop of many steps in one call keeps each of them.
_NORM = {_COUNT: TensorType("int64", (), ()), _HISTORY: TensorType.dense("float32", (NORMS,))}


def opt_graph(
    groups: Sequence[Group],
    params: dict[str, Tensor],
    with_gradients: Collection[str],
    hyper: Sequence[str],
    *,
    grad_norm: bool = False,
) -> tuple[Graph, list[str]]:
    """(the section, which parameters it updates): reads gradients, writes parameters and optimizer state.
    `grad_norm`: and the norm of the gradients, as they are before clipping."""
    updated = [k for g in groups for k in g.params if k in with_gradients]
    with torch.no_grad():
        return _Updating(groups, params, updated, hyper, grad_norm).run(), updated


class _Updating:
    def __init__(
        self, groups: Sequence[Group], params: dict[str, Tensor], updated: list[str], hyper: Sequence[str], grad_norm: bool
    ) -> None:
        self.groups, self.updated, self.hyper, self.grad_norm = groups, set(updated), hyper, grad_norm
        self.params = {k: params[k].detach() for k in updated}
        self.rules: dict[Any, _Traced] = {}

    def run(self) -> Graph:
        head = self._head()
        values = dict(head.writes)
        nodes, reads, types = list(head.nodes), dict.fromkeys(head.reads), {b: head.types[b] for b in head.reads}
        writes: list[tuple[str, str]] = []
        made: set[str] = set()  # rules whose scalars are there
        for g in self.groups:
            for k in (k for k in g.params if k in self.updated):
                p = self.params[k]
                traced = self._rule(g, p)
                places = {"p": Kind.PARAM.of(k), "g": values.get(f"clipped/{k}", Kind.GRAD.of(k))}
                places |= {"ran": g.ran} if g.ran else {}
                places |= {f"s/{s}": Kind.STATE.of(f"{k}/{s}") for s in (*g.rule.state, *g.rule.numbers)}
                kind = "wide" if p.dtype == torch.float64 else "scalars"
                places |= {name: values[f"{kind}/{g.counter}/{name}"] for name in traced.graph.reads if name not in places}
                graph = traced.for_parameter(p)
                for name in graph.reads:
                    if "/" in places[name] and places[name] not in values:
                        reads.setdefault(places[name])
                        types[places[name]] = graph.types[name]
                common, mark = f"_{g.counter}_{traced.number}", f"_u{len(writes)}"
                new = {n.name: n.name + (common if n.name in traced.scalars else mark) for n in graph.nodes}

                def rename(name: str, new: dict[str, str] = new, places: dict[str, str] = places) -> str:
                    return new.get(name) or places[name]

                once = traced.scalars if common in made else frozenset()
                made.add(common)
                nodes += [replace(n.map_refs(rename), name=new[n.name]) for n in graph.nodes if n.name not in once]
                for result, value in graph.writes:
                    buffer = Kind.PARAM.of(k) if result == "new/p" else Kind.STATE.of(f"{k}/{result.removeprefix('new/s/')}")
                    writes.append((buffer, rename(value)))
                    types.setdefault(buffer, graph.types[result])
            step = Kind.STATE.of(f"{g.counter}/step")
            writes.append((step, values[f"steps/{g.counter}"]))
            types[step] = TensorType("int64", (), ())
            reads.setdefault(step)
        if self.grad_norm:
            writes += [(buffer, values[buffer]) for buffer in _NORM]
            types |= _NORM
        graph = Graph("opt", tuple(reads), tuple(nodes), tuple(writes), types).prune()
        graph.verify()
        return graph

    def _head(self) -> Graph:
        """What comes before the updates: gradients clipped, their norm before that, and each group's scalars."""
        clipped = list(self.params) if {"clip_norm", "clip_value"} & set(self.hyper) else []
        taken = list(self.params) if self.grad_norm else clipped
        reads = [Kind.GRAD.of(k) for k in taken]
        example = [self.params[k].contiguous() for k in taken]  # gradients and state are dense, whatever the parameter's layout
        reads += [Kind.STATE.of(f"{g.counter}/step") for g in self.groups] + [Kind.HYPER.of(name) for name in self.hyper]
        example += [torch.tensor(0) for _ in self.groups] + [torch.tensor(1.0, dtype=torch.float64) for _ in self.hyper]
        ran = sorted({g.ran for g in self.groups if g.ran})
        reads, example = reads + ran, example + [torch.tensor(1.0) for _ in ran]
        if self.grad_norm:
            reads, example = [*reads, *_NORM], [*example, *(kind.empty().zero_() for kind in _NORM.values())]
        results: list[str] = []

        def head(*args: Tensor) -> list[Tensor]:
            v = dict(zip(reads, args, strict=True))
            results.clear()
            new: list[Tensor] = []

            def result(name: str, value: Tensor) -> None:
                results.append(name)
                new.append(value)

            grads = clip(
                {k: v[Kind.GRAD.of(k)] for k in clipped}, v.get(Kind.HYPER.of("clip_norm")), v.get(Kind.HYPER.of("clip_value"))
            )
            for k, grad in grads.items():
                result(f"clipped/{k}", grad)
            if self.grad_norm:
                made, history = (v[buffer] for buffer in _NORM)
                here = torch.arange(NORMS) == made % NORMS
                result(_COUNT, made + 1)
                result(_HISTORY, torch.where(here, global_norm({k: v[Kind.GRAD.of(k)] for k in taken}), history))
            for g in self.groups:
                before = v[Kind.STATE.of(f"{g.counter}/step")]
                step = before + 1
                result(f"steps/{g.counter}", torch.where(v[g.ran] > 0, step, before) if g.ran else step)
                h = derived({k: v[Kind.HYPER.of(f"{g.prefix}.{k}")] for k in g.rule.hyper}, step)
                h |= g.rule.derive(h, step)
                for kind, scalars in (("wide", h), ("scalars", packed(h))):
                    result(f"{kind}/{g.counter}/t", step)
                    for name, value in scalars.items():
                        result(f"{kind}/{g.counter}/h/{name}", value)
            return new

        return to_graph("opt", trace(head, example), reads, results, "opt")

    def _rule(self, g: Group, p: Tensor) -> _Traced:
        """The group's rule, traced for a parameter like this one."""
        alike = (p.dtype, p.is_contiguous()) if p.dim() and p.numel() > 1 and p.is_contiguous() else _exact(p)
        own = g.prefix, bool(g.ran)
        known = self.rules.get((own, alike)) or self.rules.get((own, _exact(p)))
        if known is not None and (known.any_shape or known.type == TensorType.of(p)):
            return known
        traced = _Traced.of(g, p, len(self.rules))
        self.rules[own, alike if traced.any_shape else _exact(p)] = traced
        return traced


def _exact(p: Tensor) -> Any:
    return p.dtype, tuple(p.shape), p.stride()


@dataclass(frozen=True)
class _Traced:
    """A rule over p (the parameter), g (its gradient), s/... (state), t (the step's number), h/... (scalars), and ran (whether it
    has a gradient), where that is not certain."""

    graph: Graph
    type: TensorType  # of the parameter that it was traced with
    any_shape: bool  # whether other parameters only differ in their shape
    number: int
    scalars: frozenset[str]  # nodes that are the same for all parameters: made of the scalars alone

    @classmethod
    def of(cls, g: Group, p: Tensor, number: int) -> _Traced:
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        scalars = derived({k: torch.tensor(1.0, dtype=torch.float64) for k in g.rule.hyper}, torch.tensor(1))
        scalars |= g.rule.derive(scalars, torch.tensor(1))
        reads = ["p", "g", *(f"s/{s}" for s in (*g.rule.state, *g.rule.numbers)), "t", *(f"h/{name}" for name in scalars)]
        example = [p, p.contiguous(), *(g.rule.state_like(p) for _ in g.rule.state), *(torch.tensor(0.0) for _ in g.rule.numbers)]
        example += [torch.tensor(0), *(torch.tensor(1.0, dtype=wide) for _ in scalars)]
        reads, example = (reads + ["ran"], [*example, torch.tensor(1.0)]) if g.ran else (reads, example)
        results: list[str] = []

        def update(*args: Tensor) -> list[Tensor]:
            v = dict(zip(reads, args, strict=True))
            s = {name: v[f"s/{name}"] for name in (*g.rule.state, *g.rule.numbers)}
            new, state = updated_by(g.rule, v["p"], v["g"], s, {name: v[f"h/{name}"] for name in scalars}, v["t"])
            results[:] = ["new/p", *(f"new/s/{name}" for name in state)]
            made = [(v["p"], new), *((s[name], value) for name, value in state.items())]
            if not g.ran:
                return [value.to(old.dtype) for old, value in made]
            # Without a gradient torch leaves a parameter alone: no decay, no momentum, no count.
            return [torch.where(v["ran"] > 0, value.to(old.dtype), old) for old, value in made]

        graph = to_graph("rule", trace(update, example), reads, results, "opt")
        known = {r for r in graph.reads if r in ("t", "ran") or r.startswith("h/")}
        for node in graph.nodes:
            if set(node.refs()) <= known and all(t is not None and not t.shape for t in node.types):
                known.add(node.name)
        any_shape = bool(p.dim()) and p.numel() > 1 and _is_for_any_shape(graph, TensorType.of(p))
        return cls(graph, TensorType.of(p), any_shape, number, frozenset(known - set(graph.reads)))

    def for_parameter(self, p: Tensor) -> Graph:
        kind = TensorType.of(p)
        if kind == self.type:
            return self.graph

        def changed(t: TensorType | None) -> TensorType | None:
            return replace(kind, dtype=t.dtype) if t is not None and t.shape else t

        nodes = tuple(replace(n, types=tuple(map(changed, n.types))) for n in self.graph.nodes)
        types = {b: changed(t) or t for b, t in self.graph.types.items()}
        return replace(self.graph, nodes=nodes, types=types)


def _is_for_any_shape(graph: Graph, kind: TensorType) -> bool:
    """Whether all that the rule makes is of the parameter's shape and layout, or one number, and no argument is a size."""

    def fits(t: TensorType | None) -> bool:
        return t is not None and (not t.shape or (t.shape, t.stride) == (kind.shape, kind.stride))

    def plain(node: Node) -> bool:
        return not any(isinstance(a, (list, tuple)) and a for a in (*node.args, *node.kwargs.values()))

    return (
        all(fits(t) for n in graph.nodes for t in n.types)
        and all(map(plain, graph.nodes))
        and all(fits(t) for t in graph.types.values())
    )
