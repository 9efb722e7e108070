"""The graph of a section or a program: plain data that both sides share, with one text form and one JSON form.

A graph reads named buffers, computes without side effects, and finally writes some results back to named buffers. All
reads see the values from before the call. Nothing else happens, so graphs can be joined, cut and replayed safely.

    %mm = aten.mm.default(%x, %t)  : float32[64,10]   # model.py:12  return self.fc(x)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format, "preserve": torch.preserve_format,
    "channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d,
}  # fmt: skip
# Operators whose results are parts of their first argument, seen otherwise: they move no memory. What may share memory with what
# is read from the operators' schemas (plan/aliases.py).
VIEWS = frozenset((
    "t", "transpose", "permute", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "slice", "select", "alias", "detach",
    "as_strided", "split", "unbind",
))  # fmt: skip
# Views that become copies where the memory lies otherwise than it was traced: aten.reshape does either.
RESHAPES = frozenset(("aten.view.default", "aten._unsafe_view.default"))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class TensorType:
    """Shape, strides (in elements) and dtype of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, t: torch.Tensor) -> TensorType:
        return cls(dtype_name(t.dtype), tuple(t.shape), tuple(t.stride()))

    @classmethod
    def dense(cls, dtype: str, shape: Iterable[int]) -> TensorType:
        shape = tuple(shape)
        stride, step = [], 1
        for size in reversed(shape):
            stride.append(step)
            step *= max(size, 1)
        return cls(dtype, shape, tuple(reversed(stride)))

    def as_dense(self) -> TensorType:
        """The same shape and dtype, row by row without gaps."""
        return TensorType.dense(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    def empty(self) -> torch.Tensor:
        """A tensor of this type, zeroed, with room for its strides, aligned to a cache line.

        NumPy asks the system for zeroed pages, which take no memory until they are touched: buffers of sections that are
        never run one by one cost nothing."""
        dtype, line = DTYPES[self.dtype], 64
        memory = np.zeros(self.extent * dtype.itemsize + line, dtype=np.uint8)
        start = -memory.ctypes.data % line
        dense = torch.from_numpy(memory[start : start + self.extent * dtype.itemsize]).view(dtype)
        return dense.as_strided(self.shape, self.stride)

    @property
    def extent(self) -> int:
        """How many elements of storage the strides reach over."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Ref:
    """An argument that is the result of a node, or a buffer that the graph reads."""

    name: str


@dataclass(frozen=True)
class Node:
    name: str
    op: str  # "aten.mm.default", or "getitem"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    types: tuple[TensorType | None, ...]  # one per result; most operators have one result
    where: str = ""  # "model.py:12", "" where no user line is behind it
    source: str = ""  # the text of that line
    section: str = ""  # fwd, bwd, reduce or opt

    def refs(self) -> list[str]:
        return [r.name for r in _walk_refs((self.args, self.kwargs))]

    def map_refs(self, rename: Callable[[str], str]) -> Node:
        return replace(self, args=_map((self.args), rename), kwargs=_map(self.kwargs, rename))


@dataclass(frozen=True)
class Graph:
    name: str
    reads: tuple[str, ...]  # names of buffers; inside the graph they are referred to by these names
    nodes: tuple[Node, ...]
    writes: tuple[tuple[str, str], ...]  # (buffer, node or read buffer) pairs, carried out together at the end
    types: dict[str, TensorType] = field(default_factory=dict)  # of every buffer that is read or written

    @property
    def buffers(self) -> tuple[str, ...]:
        """Every buffer the graph touches, in the fixed order in which a program takes them: first those only written."""
        read = set(self.reads)
        return tuple(dict.fromkeys([*(b for b, _ in self.writes if b not in read), *self.reads]))

    @property
    def written(self) -> frozenset[str]:
        return frozenset(buffer for buffer, _ in self.writes)

    def prune(self) -> Graph:
        """Without nodes that no write depends on, and without reads that are no longer needed."""
        needed = {value for _, value in self.writes}
        kept = []
        for node in reversed(self.nodes):
            if node.name in needed:
                kept.append(node)
                needed.update(node.refs())
        reads = tuple(r for r in self.reads if r in needed)
        graph = replace(self, nodes=tuple(reversed(kept)), reads=reads)
        return replace(graph, types={b: self.types[b] for b in graph.buffers})

    def with_buffers(self, rename: Callable[[str], str]) -> Graph:
        """The same over buffers of other names."""
        new = {b: rename(b) for b in self.buffers}
        names = {b: new[b] for b in self.reads}
        return replace(
            self,
            reads=tuple(names.values()),
            nodes=tuple(n.map_refs(lambda r: names.get(r, r)) for n in self.nodes),
            writes=tuple((new[b], names.get(value, value)) for b, value in self.writes),
            types={new[b]: t for b, t in self.types.items() if b in new},
        )

    def digest(self) -> str:
        """SHA-256 of what the graph computes: source lines do not count, nor does the graph's own name."""
        body = self.to_json()
        body.pop("name")
        for node in body["nodes"]:
            node.pop("where", None)
            node.pop("source", None)
            node.pop("section", None)
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def abi(self) -> str:
        """SHA-256 of the buffers a program takes: order, dtype, shape, strides, and which of them it writes."""
        spec = [[b, str(self.types[b]), list(self.types[b].stride), b in self.written] for b in self.buffers]
        return hashlib.sha256(json.dumps(spec).encode()).hexdigest()

    # ---- text ----

    def to_text(self) -> str:
        lines = [f"graph {self.name}"]
        for buffer in self.reads:
            lines.append(f"  read  %{buffer}  : {self.types[buffer]}")
        for n in self.nodes:
            call = ", ".join([*map(_text, n.args), *(f"{k}={_text(v)}" for k, v in n.kwargs.items())])
            types = ", ".join(map(str, n.types))
            line = f"  %{n.name} = {n.op}({call})  : {types}"
            if n.where:
                line += f"   # {n.section + ' ' if n.section else ''}{n.where}  {n.source}"
            elif n.section:
                line += f"   # {n.section}"
            lines.append(line)
        for buffer, value in self.writes:
            lines.append(f"  write %{buffer} = %{value}")
        return "\n".join(lines) + "\n"

    # ---- JSON ----

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "reads": list(self.reads),
            "nodes": [
                {
                    "name": n.name,
                    "op": n.op,
                    "args": [_encode(a) for a in n.args],
                    "kwargs": {k: _encode(v) for k, v in n.kwargs.items()},
                    "types": [None if t is None else [t.dtype, list(t.shape), list(t.stride)] for t in n.types],
                    "where": n.where,
                    "source": n.source,
                    "section": n.section,
                }
                for n in self.nodes
            ],
            "writes": [list(w) for w in self.writes],
            "types": {b: [t.dtype, list(t.shape), list(t.stride)] for b, t in self.types.items()},
        }

    @classmethod
    def from_json(cls, data: Any) -> Graph:
        """The inverse of to_json; ValueError for anything that is not a well-formed graph."""
        try:
            nodes = tuple(
                Node(
                    name=_string(n["name"]),
                    op=_string(n["op"]),
                    args=tuple(_decode(a) for a in n["args"]),
                    kwargs={_string(k): _decode(v) for k, v in n["kwargs"].items()},
                    types=tuple(None if t is None else _type(t) for t in n["types"]),
                    where=_string(n["where"]),
                    source=_string(n["source"]),
                    section=_string(n["section"]),
                )
                for n in data["nodes"]
            )
            graph = cls(
                name=_string(data["name"]),
                reads=tuple(_string(r) for r in data["reads"]),
                nodes=nodes,
                writes=tuple((_string(b), _string(v)) for b, v in data["writes"]),
                types={_string(b): _type(t) for b, t in data["types"].items()},
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"not a graph: {type(e).__name__}: {e}") from e
        graph.verify()
        return graph

    def verify(self) -> None:
        """ValueError unless every name is defined once, before its use, and every buffer has a type."""
        defined = set(self.reads)
        if len(defined) != len(self.reads):
            raise ValueError(f"graph {self.name}: a buffer is read twice")
        for node in self.nodes:
            for ref in node.refs():
                if ref not in defined:
                    raise ValueError(f"graph {self.name}: {node.name} uses {ref}, which is not defined before it")
            if node.name in defined:
                raise ValueError(f"graph {self.name}: {node.name} is defined twice")
            defined.add(node.name)
        for buffer, value in self.writes:
            if value not in defined:
                raise ValueError(f"graph {self.name}: {buffer} is written from {value}, which is not defined")
        if len(self.written) != len(self.writes):
            raise ValueError(f"graph {self.name}: a buffer is written twice")
        for buffer in self.buffers:
            if buffer not in self.types:
                raise ValueError(f"graph {self.name}: buffer {buffer} has no type")


# ---- arguments: numbers, strings, lists, references, and torch's few enumerations ----


def name_of(arg: object) -> str:
    """The name that an argument refers to; empty for anything else."""
    return arg.name if isinstance(arg, Ref) else ""


def _walk_refs(value: Any) -> Iterable[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk_refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _walk_refs(item)


def _map(value: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(value, Ref):
        return Ref(rename(value.name))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, rename) for item in value)
    if isinstance(value, dict):
        return {k: _map(item, rename) for k, item in value.items()}
    return value


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.layout):
        return {"layout": str(value)}
    if isinstance(value, torch.memory_format):
        return {"memory_format": next(k for k, v in MEMORY_FORMATS.items() if v == value)}
    raise ValueError(f"a graph cannot hold an argument of type {type(value).__name__}")


def _decode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        kind, v = next(iter(value.items()))
        if kind == "ref":
            return Ref(_string(v))
        if kind == "float" and v in ("inf", "-inf", "nan"):
            return float(v)
        if kind == "complex" and isinstance(v, list) and len(v) == 2 and all(isinstance(part, str) for part in v):
            return complex(float.fromhex(v[0]), float.fromhex(v[1]))
        if kind == "dtype" and v in DTYPES:
            return DTYPES[v]
        if kind == "device" and v in ("cpu", "meta"):
            return torch.device(v)
        if kind == "layout" and v == "torch.strided":
            return torch.strided
        if kind == "memory_format" and v in MEMORY_FORMATS:
            return MEMORY_FORMATS[v]
    raise ValueError(f"no such argument: {str(value)[:80]}")


def _text(value: Any) -> str:
    if isinstance(value, Ref):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).removeprefix("torch.") if isinstance(value, (torch.dtype, torch.layout)) else repr(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a string, found {type(value).__name__}")
    return value


def _type(value: Any) -> TensorType:
    dtype, shape, stride = value
    if dtype not in DTYPES or len(shape) != len(stride) or len(shape) > 16:
        raise ValueError(f"no such tensor type: {str(value)[:80]}")
    for n in (*shape, *stride):
        if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 2**40:
            raise ValueError(f"no such size or stride: {n!r}")
    return TensorType(dtype, tuple(shape), tuple(stride))
