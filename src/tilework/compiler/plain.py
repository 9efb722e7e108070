"""A graph without operators of our own: each is written out as what it is made of (its definition in operators.py, random.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ..artifact import operators, random
from ..artifact.graph import DTYPES, RESHAPES, Graph, Node, Ref, TensorType, name_of

_DEFINITIONS = {
    f"tilework.{op._name}.default": op._init_fn
    for op in (
        operators.product, operators.batch_product, operators.updated_by_product, operators.max_pool, operators.max_pool_grad,
        operators.small_conv, operators.small_conv_input_grad, operators.small_conv_weight_grad, random._random_bits,
    )
}  # fmt: skip


def plain(graph: Graph) -> Graph:
    """The same arithmetic in torch's own operators."""
    kinds: dict[str, TensorType] = dict(graph.types)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op in RESHAPES:  # a kernel may lay its result out otherwise than it was traced
            node = replace(node, op="aten.reshape.default")
        if node.types and node.types[0] is not None:
            kinds[node.name] = node.types[0]
        nodes += _written_out(node, kinds) if node.op in _DEFINITIONS else [node]
    return replace(graph, nodes=tuple(nodes))


def _written_out(node: Node, kinds: dict[str, TensorType]) -> list[Node]:
    where = [i for i, a in enumerate(node.args) if isinstance(a, Ref)]

    def define(*tensors: torch.Tensor) -> Any:
        args = list(node.args)
        for i, tensor in zip(where, tensors, strict=True):
            args[i] = tensor
        return _DEFINITIONS[node.op](*args)

    with FakeTensorMode():
        fakes = [
            torch.empty_strided(k.shape, k.stride, dtype=DTYPES[k.dtype]) for k in (kinds[name_of(node.args[i])] for i in where)
        ]
        traced = make_fx(define)(*fakes).graph
    names: dict[torch.fx.Node, str] = {}
    given = iter(where)
    made: list[Node] = []

    def value(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return Ref(names[arg])
        return [value(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

    for fx_node in traced.nodes:
        if fx_node.op == "placeholder":
            names[fx_node] = name_of(node.args[next(given)])
        elif fx_node.op == "output":
            last = Ref(names[fx_node.args[0]])
            made.append(replace(node, op="aten.alias.default", args=(last,), kwargs={}))
        else:
            names[fx_node] = f"{node.name}.{fx_node.name}"
            op = "getitem" if "getitem" in str(fx_node.target) else str(fx_node.target)
            values = fx_node.meta.get("val")
            several = values if isinstance(values, (tuple, list)) else [values]
            types = tuple(TensorType.of(v) if isinstance(v, torch.Tensor) else None for v in several)
            made.append(replace(node, name=names[fx_node], op=op, args=value(fx_node.args), types=types,
                                kwargs={k: value(v) for k, v in fx_node.kwargs.items()}))  # fmt: skip
    return made
