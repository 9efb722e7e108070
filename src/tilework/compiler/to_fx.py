"""A Graph as torch's own fx graph, made of the operators that Inductor has code for.

Operators that Inductor wants in terms of simpler ones are replaced here, each once for a set of shapes. torch's own way
there (aot_export) traces the whole program twice more, a quarter of the time that code generation takes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..artifact.graph import DTYPES, Graph, Ref, TensorType

aten = torch.ops.aten
_UPDATE = "tilework.updated_by_product.default"


def to_fx(graph: Graph, mode: FakeTensorMode) -> torch.fx.GraphModule:
    """One placeholder a buffer, results stored with copy_, no outputs. Inductor stores in place."""
    return _Translation(graph, mode).run()


def operator_named(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


class _Translation:
    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.simpler = select_decomp_table()
        self.fx = torch.fx.Graph()
        self.env: dict[str, Any] = {}  # name -> fx node, or several of them for an operator with several results
        self.known: dict[Any, torch.fx.GraphModule] = {}
        self.updates: dict[str, Any] = {}  # node -> the arguments of an update in place

    def run(self) -> torch.fx.GraphModule:
        for i, buffer in enumerate(self.graph.buffers):
            placeholder = self.env[buffer] = self.fx.placeholder(f"arg{i}_1")
            placeholder.meta["val"] = self._fake(self.graph.types[buffer])
        for node in self.graph.nodes:
            op = operator_named(node.op)
            args, kwargs = self._value(node.args), self._value(node.kwargs)
            if node.op == _UPDATE:
                self.updates[node.name] = args  # made in place, when its weight is written
            elif op in self.simpler:
                self.env[node.name] = self._inline(op, args, kwargs)
            elif op is operator.getitem and isinstance(args[0], (list, tuple)):
                self.env[node.name] = args[0][args[1]]
            else:
                made = self.env[node.name] = self.fx.call_function(op, args, kwargs)
                fakes = tuple(self._fake(t) if t else None for t in node.types)
                several = op is not operator.getitem and len(op._schema.returns) > 1
                made.meta["val"] = fakes if several else fakes[0]
        results = dict(self.graph.writes)
        for buffer in self.graph.buffers:  # their order: copies of a buffer's old value before it gets its new one
            if results.get(buffer) in self.updates:
                self.fx.call_function(torch.ops.tilework.update_by_product.default, self.updates[results[buffer]])
            elif buffer in results:
                stored = self.fx.call_function(aten.copy_.default, (self.env[buffer], self.env[results[buffer]]))
                stored.meta["val"] = self.env[buffer].meta["val"]
        self.fx.output(())
        for made in self.fx.nodes:
            if made.op == "call_function":
                made.meta["original_aten"] = made.target  # Inductor names its loops by these
        self.fx.eliminate_dead_code()
        return torch.fx.GraphModule({}, fx_graph_cse(self.fx))

    def _fake(self, kind: TensorType) -> torch.Tensor:
        with self.mode:
            return torch.empty_strided(kind.shape, kind.stride, dtype=DTYPES[kind.dtype])

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.env[value.name]
        if isinstance(value, dict):
            return {k: self._value(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._value(v) for v in value)
        return value

    def _inline(self, op: Any, args: Any, kwargs: Any) -> Any:
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
                fresh = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in (flat[i].meta["val"] for i in where)]
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


def _kind(value: Any) -> Any:
    """What the simpler operators depend on: the type of a tensor, the value of anything else."""
    if isinstance(value, torch.fx.Node):
        tensor = value.meta["val"]
        return tensor.dtype, tuple(tensor.shape), tensor.stride()
    return type(value), repr(value)
