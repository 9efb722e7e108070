"""Operators that are called through torch's dispatcher, as text for compiler/calls.cpp: names, arguments, where results go.

Used where there is no generated code for an operator, or where it was found to be wrong: then a program is made of calls
altogether, or only the operators in question are, amid generated loops."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..artifact.graph import Graph, Node, Ref, dtype_name
from ..artifact.operators import SYNCHRONISES
from ..errors import BugError
from ..plan.aliases import operator_named, shares_with
from .plain import plain

_DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.complex128: 10,
    torch.bool: 11,
    torch.bfloat16: 15,
}  # fmt: skip  (c10::ScalarType)
DTYPE_NUMBERS = {dtype_name(dtype): number for dtype, number in _DTYPES.items()}
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3}
_LISTS = {"int": "I", "SymInt": "I", "float": "F", "bool": "B", "Tensor": "T", "Optional[Tensor]": "O"}


def program_of_calls(graph: Graph) -> str:
    """C++ source of a program that calls one operator after the other."""
    if any(n.op == SYNCHRONISES for n in graph.nodes):  # called like that, it would know of no other replica
        raise BugError("compile-inductor", f"program {graph.name}: there is no generated code for statistics of all replicas",
                       fix="compile without sync_batch_norm, and report this")  # fmt: skip
    graph = _taken_once(plain(graph))
    slots = {b: i for i, b in enumerate(graph.buffers)}
    operators: list[str] = []
    made: dict[str, Node] = {n.name: n for n in graph.nodes}
    parts = _parts(graph)
    last = _last_uses(graph)
    for at, node in enumerate(graph.nodes):
        if node.op == "getitem":
            continue
        inputs = list(dict.fromkeys(node.refs()))
        outputs = parts.get(node.name, {0: node.name})
        for name in outputs.values():
            slots[name] = len(slots)
        numbers = [slots[outputs[i]] if i in outputs else -1 for i in range(max(outputs, default=-1) + 1)]
        finished = [slots[name] for name in last.get(at, ()) if name in slots and name in made]
        operators.append(_operator(node, inputs, [slots[i] for i in inputs], numbers, finished))
    written = graph.written
    writes = [f"{slots[b]} {slots[v]} {int(_is_view_of(v, b, made, written))}" for b, v in graph.writes]
    text = (
        f"{len(graph.buffers)} {len(slots)} {len(operators)}\n" + "\n".join(operators) + f"\n{len(writes)}\n" + "\n".join(writes)
    )
    name = graph.name
    return f"""// Tilework program {name}, by calls
#include <torch/csrc/inductor/cpp_prefix.h>
namespace program_{name} {{
{open_calls(text)}
}}
extern "C" __attribute__((visibility("default"))) const char tilework_abi_{name}[] = "{graph.abi()}";
extern "C" __attribute__((visibility("default"))) void tilework_release_{name}() {{}}
extern "C" __attribute__((visibility("default"))) int tilework_run_{name}(
    AtenTensorHandle* buffers, char* error, size_t size) {{
  try {{
    tilework::run_calls(program_{name}::calls(), buffers);
    return 0;
  }} catch (const std::exception& e) {{
    snprintf(error, size, "%s", e.what());
    return 1;
  }}
}}
"""


def table_of_calls(nodes: Sequence[Node]) -> str:
    """Source of the operators that a generated program calls; the i-th is called with index i."""
    operators = [_operator(node, list(dict.fromkeys(node.refs())), [], [], []) for node in nodes]
    return open_calls(f"0 0 {len(operators)}\n" + "\n".join(operators) + "\n0\n")


def open_calls(text: str) -> str:
    pieces = [text[i : i + 8000] for i in range(0, len(text), 8000)]  # compilers limit the length of a string
    literal = "\n".join(f'    R"calls({piece})calls"' for piece in pieces)
    made = f"static tilework::Calls* made = tilework::open_calls(\n{literal});"
    return f"static tilework::Calls* calls() {{\n  {made}\n  return made;\n}}"


def _parts(graph: Graph) -> dict[str, dict[int, str]]:
    """Operators with several results: node -> {which result: the getitem that takes it}."""
    found: dict[str, dict[int, str]] = {n.name: {} for n in graph.nodes if n.op != "getitem" and _has_several(n)}
    for n in graph.nodes:
        if n.op == "getitem":
            found[n.args[0].name][n.args[1]] = n.name
    return found


def _taken_once(graph: Graph) -> Graph:
    """With one getitem a result: two of the same are one."""
    first: dict[Any, str] = {}
    same = {n.name: first.setdefault((n.args[0].name, n.args[1]), n.name) for n in graph.nodes if n.op == "getitem"}

    def rename(name: str) -> str:
        return same.get(name, name)

    nodes = tuple(n.map_refs(rename) for n in graph.nodes if rename(n.name) == n.name)
    return replace(graph, nodes=nodes, writes=tuple((b, rename(v)) for b, v in graph.writes))


def _has_several(node: Node) -> bool:
    returns = operator_named(node.op)._schema.returns
    return len(returns) > 1 or "List" in str(returns[0].type)


def _last_uses(graph: Graph) -> dict[int, list[str]]:
    """Position of a node -> names that nobody needs after it."""
    kept = {value for _, value in graph.writes}
    last: dict[str, int] = {}
    for at, node in enumerate(graph.nodes):
        if node.op == "getitem":
            continue
        for ref in node.refs():
            last[ref] = at
    found: dict[int, list[str]] = {}
    for name, at in last.items():
        if name not in kept:
            found.setdefault(at, []).append(name)
    return found


def _is_view_of(value: str, buffer: str, made: dict[str, Node], written: frozenset[str]) -> bool:
    """Whether the value may be memory of a buffer that changes, other than the one it is written to."""
    return bool(shares_with(value, made) & written - {buffer}) or (value != buffer and buffer in shares_with(value, made))


def _operator(node: Node, inputs: list[str], slots: list[int], outputs: list[int], finished: list[int]) -> str:
    op = operator_named(node.op)
    schema = op._schema
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    words = []
    for argument in schema.arguments:
        value = given.get(argument.name, argument.default_value)
        words.append(_word(value, _kind_of(str(argument.real_type)), inputs, node))
    numbers = " ".join(" ".join(map(str, [len(n), *n])) for n in (slots, outputs, finished))
    return f"{schema.name} {schema.overload_name or '-'} {numbers} {len(words)} {' '.join(words)}"


@functools.cache
def _kind_of(kind: str) -> str:
    """The type of an argument without its first Optional."""
    return kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind


def _word(value: Any, kind: str, inputs: list[str], node: Node) -> str:
    if value is None:
        return "_"
    if isinstance(value, Ref):
        return f"t{inputs.index(value.name)}"
    if kind == "Tensor":  # a number where a tensor is expected
        return f"w {_word(value, 'number', inputs, node)}"
    if kind.startswith("List["):
        inner = kind.removeprefix("List[").removesuffix("]")
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if inner in _LISTS:
            return " ".join([f"{_LISTS[inner]}{len(items)}", *(_word(v, inner, inputs, node) for v in items)])
    if isinstance(value, bool):
        return f"b{int(value)}"
    if kind in ("float",) or isinstance(value, float):
        return f"f{float(value).hex()}"
    if isinstance(value, int):
        return f"i{value}"
    if isinstance(value, complex):
        return f"c{value.real.hex()} {value.imag.hex()}"
    if isinstance(value, torch.dtype):
        return f"i{_DTYPES[value]}"
    if isinstance(value, torch.memory_format):
        return f"i{_FORMATS[value]}"
    if isinstance(value, torch.layout):
        return "i0"
    if isinstance(value, torch.device):
        return "D"
    if isinstance(value, str):
        return f"s{len(value.encode())} {value}"
    raise BugError("calls-argument", f"{node.op}: no call can pass an argument of type {kind} ({type(value).__name__})")
