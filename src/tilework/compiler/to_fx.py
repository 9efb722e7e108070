"""A Graph as torch's own fx graph, made of the operators that Inductor has code for.

Operators that Inductor wants in terms of simpler ones are replaced here, each once for a set of shapes. torch's own way
there (aot_export) traces the whole program twice more, a quarter of the time that code generation takes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..artifact.graph import DTYPES, Graph, Node, Ref, TensorType
from ..artifact.names import Kind, is_kind
from ..errors import BugError
from ..plan.aliases import operator_named

aten = torch.ops.aten
Otherwise = Callable[..., Any]  # (the translation, the operator's arguments) -> its result, or several
_UPDATE = "tilework.updated_by_product.default"


def to_fx(
    graph: Graph,
    mode: FakeTensorMode,
    called: Sequence[Node] = (),
    *,
    device: str = "cpu",
    otherwise: Mapping[str, Otherwise] | None = None,
) -> torch.fx.GraphModule:
    """One placeholder a buffer, results stored with copy_, no outputs. Inductor stores in place. The nodes `called` become calls
    through torch's dispatcher, by their number; operators in `otherwise` are written as these functions say."""
    return Translation(graph, mode, {n.name: i for i, n in enumerate(called)}, torch.device(device), otherwise or {}).run()


class Translation:
    def __init__(
        self, graph: Graph, mode: FakeTensorMode, called: dict[str, int], device: torch.device, otherwise: Mapping[str, Otherwise]
    ) -> None:
        self.graph, self.mode, self.called, self.device, self.otherwise = graph, mode, called, device, otherwise
        self.simpler = select_decomp_table()
        self.fx = torch.fx.Graph()
        self.env: dict[str, Any] = {}  # name -> fx node, or several of them for an operator with several results
        self.known: dict[Any, torch.fx.GraphModule] = {}
        self.updates: dict[str, Any] = {}  # node -> the arguments of an update in place
        self.types: dict[str, TensorType | None] = dict(graph.types)  # as they were captured, by name
        self.kept: dict[Any, Any] = {}  # for operators that are written otherwise: what one leaves for another

    def run(self) -> torch.fx.GraphModule:
        for i, buffer in enumerate(self.graph.buffers):
            placeholder = self.env[buffer] = self.fx.placeholder(f"arg{i}_1")
            placeholder.meta["val"] = self._fake(self.graph.types[buffer])
        for node in self.graph.nodes:
            op = operator_named(node.op)
            args, kwargs = self._value(node.args), self._value(node.kwargs)
            if node.op == _UPDATE:
                self.updates[node.name] = args  # made in place, when its weight is written
            elif node.name in self.called:
                self.env[node.name] = self._call(node, self.called[node.name])
            elif node.op in self.otherwise:
                self.env[node.name] = self.otherwise[node.op](self, *args, **kwargs)
            elif op is operator.getitem and isinstance(args[0], (list, tuple)):
                self.env[node.name] = args[0][args[1]]
            elif self.device.type == "cpu":
                self.env[node.name] = self.inline(op, args, kwargs) if op in self.simpler else self._plain(node, op, args, kwargs)
            else:
                self.env[node.name] = self._restrided(node, op, args, kwargs)
            self.types[node.name] = node.types[0]
        self._store()
        self.fx.output(())
        for made in self.fx.nodes:
            if made.op == "call_function":
                made.meta["original_aten"] = made.target  # Inductor names its loops by these
        self.fx.eliminate_dead_code()
        graph = fx_graph_cse(self.fx)
        kept = {f"arg{i}_1" for i, b in enumerate(self.graph.buffers) if is_kind(b, Kind.SAVED)}
        _compute_once(graph, kept)
        verify_order(graph, self.graph.name)
        return torch.fx.GraphModule({}, graph)

    def _plain(self, node: Node, op: Any, args: Any, kwargs: Any) -> Any:
        made = self.fx.call_function(op, args, kwargs)
        fakes = tuple(self._fake(t) if t else None for t in node.types)
        several = op is not operator.getitem and len(op._schema.returns) > 1
        made.meta["val"] = fakes if several else fakes[0]
        return made

    def _restrided(self, node: Node, op: Any, args: Any, kwargs: Any) -> Any:
        """Where operators are written otherwise, their results may lie otherwise than in the graph, and so what comes of them.
        An operator that needs the graph's own strides gets copies that have them."""
        if "as_strided" in node.op and not _lies_as(args[0], self.types[node.refs()[0]]):
            raise BugError("compile-launches", f"{node.op} takes a tensor that lies otherwise here than where it was captured",
                           found=str(args[0].meta["val"].stride()))  # fmt: skip
        try:
            return self._followed(op, args, kwargs)
        except (RuntimeError, ValueError):  # a view that there is not with these strides
            pass
        args, kwargs = self._value(node.args, True), self._value(node.kwargs, True)
        try:
            return self._followed(op, args, kwargs)
        except RuntimeError:
            if op in self.simpler:
                raise
            return self._plain(node, op, args, kwargs)  # what runs only where there is such a device

    def _followed(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op in self.simpler:
            return self.inline(op, args, kwargs)
        with self.mode:
            value = op(*pytree.tree_map(_fake_of, args), **pytree.tree_map(_fake_of, kwargs))
        made = self.fx.call_function(op, args, kwargs)
        made.meta["val"] = tuple(value) if isinstance(value, list) else value
        return made

    def _lying(self, value: torch.fx.Node, kind: TensorType | None) -> torch.fx.Node:
        """`value` with the strides of `kind`, where these are a dense tensor's."""
        found = value.meta.get("val")
        if kind is None or not isinstance(found, torch.Tensor) or found.stride() == tuple(kind.stride):
            return value
        order = sorted(range(found.dim()), key=lambda i: -kind.stride[i])
        turned = self.emit(aten.permute.default, value, order)
        copied = self.emit(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self.emit(aten.permute.default, copied, [order.index(i) for i in range(found.dim())])  # type: ignore[no-any-return]

    def _store(self) -> None:
        """Results go to their buffers. One that is a view of a buffer which changes as well is copied before anything changes."""
        results: dict[str, Any] = {buffer: self.env.get(value) for buffer, value in self.graph.writes}
        changing = {self.env[buffer] for buffer in results}
        for buffer, value in results.items():
            if value is not None and base_of(value) in changing - {self.env[buffer]}:
                results[buffer] = self.fx.call_function(torch.ops.tilework.kept.default, (value,))
                results[buffer].meta["val"] = value.meta["val"]
        for buffer, made in self.graph.writes:
            if made in self.updates:
                self.fx.call_function(torch.ops.tilework.update_by_product.default, self.updates[made])
            elif _reads_elsewhere(results[buffer], self.env[buffer]):
                self.fx.call_function(torch.ops.tilework.store.default, (self.env[buffer], results[buffer]))
            else:
                stored = self.fx.call_function(aten.copy_.default, (self.env[buffer], results[buffer]))
                stored.meta["val"] = self.env[buffer].meta["val"]

    def _call(self, node: Node, index: int) -> Any:
        """The first result comes from the call itself, others are asked for after it."""
        ops = torch.ops.tilework
        results: list[torch.fx.Node | None] = []
        first: torch.fx.Node | None = None
        for i, kind in enumerate(node.types):
            if kind is None:
                results.append(None)
                continue
            rest = (index, i, kind.shape, kind.stride, DTYPES[kind.dtype])
            if first is None:
                made = first = self.fx.call_function(
                    ops.called.default, ([self.env[r] for r in dict.fromkeys(node.refs())], *rest)
                )
            else:
                made = self.fx.call_function(ops.called_result.default, (first, *rest))
            made.meta["val"] = self._fake(kind)
            results.append(made)
        return results if len(results) > 1 else results[0]

    def _fake(self, kind: TensorType) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(kind.shape, kind.stride, dtype=DTYPES[kind.dtype], device=self.device)

    def emit(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of `op` as it is, and its results."""
        made = self.fx.call_function(op, args, kwargs)
        with self.mode:
            made.meta["val"] = op(*pytree.tree_map(_fake_of, args), **pytree.tree_map(_fake_of, kwargs))
        if not isinstance(made.meta["val"], (tuple, list)):
            return made
        results = []
        for i, value in enumerate(made.meta["val"]):
            results.append(self.fx.call_function(operator.getitem, (made, i)))
            results[-1].meta["val"] = value
        return results

    def counting(self, n: int) -> torch.fx.Node:
        """0 to n - 1. Made without running anything, as a machine without such a device can."""
        how: dict[str, Any] = {"start": 0, "step": 1, "dtype": torch.int64, "device": self.device, "requires_grad": False}
        made = self.fx.call_function(torch.ops.prims.iota.default, (n,), how)
        with self.mode:
            made.meta["val"] = torch.empty_strided((n,), (1,), dtype=torch.int64, device=self.device)
        return made

    def trace(self, function: Callable[..., Any], *args: torch.fx.Node) -> Any:
        """A function of tensors, in Inductor's operators."""
        with self.mode:
            fresh = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in map(_fake_of, args)]
            made = make_fx(function, decomposition_table=self.simpler)(*fresh)
        return self._copied(made.graph, iter(args))

    def _value(self, value: Any, as_captured: bool = False) -> Any:
        if isinstance(value, Ref):
            found = self.env[value.name]
            return self._lying(found, self.types[value.name]) if as_captured and isinstance(found, torch.fx.Node) else found
        if isinstance(value, dict):
            return {k: self._value(v, as_captured) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._value(v, as_captured) for v in value)
        if isinstance(value, torch.device) and value.type == "cpu":
            return self.device
        return value

    def inline(self, op: Any, args: Any, kwargs: Any) -> Any:
        """`op` in terms of simpler operators (itself, where there are none for these arguments)."""
        flat, structure = pytree.tree_flatten((args, kwargs))
        where = [i for i, v in enumerate(flat) if isinstance(v, torch.fx.Node)]
        key = (op, str(structure), tuple(_kind(v) for v in flat))
        if key not in self.known:

            def call(*tensors: torch.Tensor) -> Any:
                values = list(flat)
                for i, tensor in zip(where, tensors, strict=True):
                    values[i] = tensor
                args, kwargs = pytree.tree_unflatten(values, structure)
                return op(*args, **kwargs)

            with self.mode:  # fresh tensors: copies of one operator's results have the same, and the trace tells by identity
                fresh = [
                    torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
                    for v in (flat[i].meta["val"] for i in where)
                ]
                self.known[key] = make_fx(call, decomposition_table=self.simpler)(*fresh)
        return self._copied(self.known[key].graph, iter(flat[i] for i in where))

    def _copied(self, graph: torch.fx.Graph, args: Iterator[torch.fx.Node]) -> Any:
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(args)
            elif node.op == "output":
                return pytree.tree_map(lambda n: copies.get(n) if isinstance(n, torch.fx.Node) else n, node.args[0])
            else:
                copies[node] = self.fx.node_copy(node, lambda n: copies[n])
        raise AssertionError("a graph ends with its output")


_MAY_SHARE = {"_unsafe_view", "clone", "_to_copy", "convert_element_type", "copy", "getitem"}  # beside what the schema says


def base_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory `node` is, or may be, a view of: itself for a result of its own."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node):
        schema = getattr(node.target, "_schema", None)
        shares = schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not shares and getattr(node.target, "__name__", "").split(".")[0] not in _MAY_SHARE:
            break
        node = node.args[0]
    return node


# Results that are complete before anything reads them: whole reductions, library calls, sums by index.
_COMPLETE = {
    "mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "sum", "mean", "amax", "amin", "var", "var_mean",
    "prod", "any", "all", "argmax", "argmin", "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate",
    "scatter_add", "scatter_reduce", "sort", "topk", "native_layer_norm", "native_group_norm",
}  # fmt: skip
_BY_ELEMENT = {"where", "add", "sub", "mul", "div", "neg", "sqrt", "maximum", "minimum"}  # whatever tags a version of torch gives
_SAME_PLACES = {"once", "kept", "after", "clone", "copy", "_to_copy", "convert_element_type", "alias", "detach"}


def _reads_elsewhere(value: torch.fx.Node, target: torch.fx.Node) -> bool:
    """Whether a loop that computes an element of `value` may read other elements of `target` than that one: then it must not
    store into `target` as it goes, which Inductor would let it (reports 198270, 198033, 197829)."""
    todo, seen = [(value, False)], set()
    while todo:
        node, elsewhere = todo.pop()
        if node is target and elsewhere:
            return True
        if (node, elsewhere) in seen or node.op != "call_function":
            continue
        seen.add((node, elsewhere))
        name = getattr(node.target, "__name__", "").split(".")[0]
        namespace = getattr(node.target, "namespace", "")
        if name in _COMPLETE or (namespace == "tilework" and name not in _SAME_PLACES):
            continue
        by_element = name in _SAME_PLACES or name in _BY_ELEMENT or torch.Tag.pointwise in getattr(node.target, "tags", ())
        for arg in node.all_input_nodes:
            same = by_element and _shape(arg) == _shape(node)
            todo.append((arg, elsewhere or not same))
    return False


def _shape(node: torch.fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


_COMPARISONS = {getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _compute_once(graph: torch.fx.Graph, kept: Collection[str]) -> None:
    """What is compared with another computed value (the gradient of a maximum asks which element it was) is computed once.
    Inductor repeats cheap formulas in every loop that uses them, and loops with and without vectors round them differently. So
    is what goes to the buffers `kept` for another program, which may compare it there."""
    found: dict[torch.fx.Node, None] = {}
    for node in graph.nodes:
        if node.target is aten.copy_.default and node.args[0].name in kept and node.meta["val"].is_floating_point():
            found[base_of(node.args[1])] = None
        if node.target in _COMPARISONS and all(isinstance(a, torch.fx.Node) for a in node.args[:2]):
            found |= dict.fromkeys(base_of(a) for a in node.args[:2] if a.meta["val"].is_floating_point())
    for base in found:
        if base.op == "call_function" and isinstance(base.meta.get("val"), torch.Tensor):
            with graph.inserting_after(base):
                once = graph.call_function(torch.ops.tilework.once.default, (base,))
            once.meta.update(base.meta)
            once.meta["original_aten"] = once.target
            base.replace_all_uses_with(once, delete_user_cb=lambda user, once=once: user is not once)  # type: ignore[misc]


def verify_order(graph: torch.fx.Graph, name: str) -> None:
    """BugError where a buffer is read after it was written: all reads must see the values from before."""
    written: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        changes = schema is not None and schema.is_mutable
        for i, arg in enumerate(node.all_input_nodes):
            if base_of(arg) in written and not (changes and i == 0 and arg.op == "placeholder"):
                raise BugError("verify-order", f"program {name}: {node.format_node()} reads a buffer that was written before")
        if changes:
            target = base_of(node.args[0])
            if target in written:
                raise BugError("verify-order", f"program {name}: a buffer is written twice: {node.format_node()}")
            written.add(target)


def _lies_as(value: torch.fx.Node, kind: TensorType | None) -> bool:
    found = value.meta["val"]
    return kind is None or all(n <= 1 or a == b for n, a, b in zip(kind.shape, found.stride(), kind.stride, strict=True))


def _fake_of(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, torch.fx.Node) else value


def _kind(value: Any) -> Any:
    """What the simpler operators depend on: the type of a tensor, the value of anything else."""
    if isinstance(value, torch.fx.Node):
        tensor = value.meta["val"]
        return tensor.dtype, tuple(tensor.shape), tensor.stride()
    return type(value), repr(value)
