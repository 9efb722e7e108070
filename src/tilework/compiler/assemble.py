"""The C++ that puts a program together from its pieces: tables of values and calls (kernels/pieces.h), and loops of updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..artifact.graph import DTYPES, TensorType
from ..plan.pieces import Cut
from ..plan.together import Updates
from .calls import DTYPE_NUMBERS
from .codegen_cpu import program_entry
from .memory import Place, arrange, own_temporaries, whole_lines

# Operators over vectors of floats, where a scalar is a vector of one value.
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_METHODS = ("sqrt", "neg", "abs", "reciprocal")


def assemble(cut: Cut, names: Sequence[str]) -> str:
    """C++ source of a program whose i-th piece is called names[i]."""
    graph = cut.graph
    numbers, values, total = _values(cut)
    operands = [numbers[v] for call in cut.calls for v in call.values]
    calls, at = [], 0
    for call in cut.calls:
        calls.append(f"{{{call.piece}, {at}, {len(call.values)}}}")
        at += len(call.values)
    declared = "\n".join(
        f'extern "C" const size_t tilework_bytes_{n}; extern "C" void tilework_drop_{n}(void*);\n'
        f'extern "C" void tilework_piece_{n}(void*&, AtenTensorHandle*, char*);'
        for n in dict.fromkeys(names)
    )
    pieces = ", ".join(f"{{tilework_piece_{n}, tilework_drop_{n}, &tilework_bytes_{n}}}" for n in names)
    updates = "".join(_update(u, i, numbers) for i, u in enumerate(cut.updates))
    prepared = "".join(f"\n    updates{i}.prepare(*made, table{i});" for i in range(len(cut.updates)))
    run = "".join(f"\n  updates{i}.run(update{i});" for i in range(len(cut.updates)))
    counts = f"{len(names)}, calls, {len(cut.calls)}, operands, {len(operands)}, values, {len(values)}, {total}"
    code = f"""
static const tilework::PieceCode codes[] = {{{pieces}}};
{values_text(values)}
static const int operands[] = {{{", ".join(map(str, operands))}}};
static const tilework::PieceCall calls[] = {{{", ".join(calls)}}};
static tilework::Pieces* made = nullptr;
static AtenTensorHandle* prepared_for = nullptr;
static tilework::Watcher watcher;
{updates}
static void release() {{
  if (made) made->release();
  prepared_for = nullptr;
}}
static void run(AtenTensorHandle* buffers) {{
  if (!made) made = new tilework::Pieces(codes, {counts}, {str(own_temporaries()).lower()});
  if (prepared_for != buffers) {{
    made->prepare(buffers);{prepared}
    prepared_for = buffers;
  }}
  made->run(watcher);{run}
}}
"""
    watch = f"""
extern "C" __attribute__((visibility("default"))) void tilework_watch_{graph.name}(void (*after)(void*, int64_t), void* whom) {{
  entry_{graph.name}::watcher = {{after, whom}};
}}
"""
    return f"// Tilework program {graph.name}, in pieces\n{declared}\n" + program_entry(graph, code, graph.name) + watch


def _values(cut: Cut) -> tuple[dict[str, int], list[tuple[str, int, int, TensorType]], int]:
    """(value -> its number, (kind, from, offset, type) of each, bytes of all temporaries)"""
    numbers = {b: i for i, b in enumerate(cut.graph.buffers)}
    found = [("buffer", i, 0, cut.graph.types[b]) for b, i in numbers.items()]
    places = [
        Place(name, whole_lines(kind.extent * DTYPES[kind.dtype].itemsize), *cut.lifetimes[name])
        for name, kind in cut.temporaries.items()
    ]
    total = arrange(places)
    for place in places:
        numbers[place.name] = len(found)
        found.append(("temporary", place.size, place.offset, cut.temporaries[place.name]))
    for name, number in cut.numbers.items():
        numbers[name] = len(found)
        found.append(("number", number, 0, TensorType("int64", (), ())))
    for name, view in cut.views.items():
        numbers[name] = len(found)
        found.append(("view", numbers[view.base], view.offset, view.type))
    return numbers, found, total


def values_text(values: Sequence[tuple[str, int, int, TensorType]]) -> str:
    sizes: dict[tuple[int, ...], str] = {}
    rows = []
    for kind, source, offset, type_ in values:
        shape, stride = (sizes.setdefault(s, f"sizes{len(sizes)}") for s in (type_.shape, type_.stride))
        dtype = DTYPE_NUMBERS[type_.dtype]
        rows.append(f"    {{tilework::From::{kind}, {source}, {offset}, {dtype}, {len(type_.shape)}, {shape}, {stride}}},")
    arrays = [f"static const int64_t {name}[] = {{{', '.join(map(str, s)) or '0'}}};" for s, name in sizes.items()]
    return "\n".join([*arrays, "static const tilework::Value values[] = {", *rows, "};"])


def _update(updates: Updates, index: int, numbers: dict[str, int]) -> str:
    first = updates.instances[0]
    rows = [numbers[v] for i in updates.instances for v in (*i.tensors, *i.outputs, *i.scalars)]
    tensors = len(first.tensors) + len(first.outputs)
    shape = f"{len(updates.instances)}, {tensors}, {len(first.scalars)}"
    return f"""
static const int rows{index}[] = {{{", ".join(map(str, rows))}}};
static const int64_t numels{index}[] = {{{", ".join(str(i.numel) for i in updates.instances)}}};
static const tilework::UpdateTable table{index} = {{rows{index}, numels{index}, {shape}}};
static tilework::Updates updates{index};
{_loop(updates, f"update{index}")}
"""


def _loop(updates: Updates, name: str) -> str:
    """Reads t<i>, computes v<i>, writes the results to the tensors after those that it reads."""
    inputs = len(updates.instances[0].tensors)
    lines = [
        f"  const bool s{i} = *(const bool*)scalars[{i}];" if flag else f"  const Vec s{i} = Vec(*(const float*)scalars[{i}]);"
        for i, flag in enumerate(updates.flags)
    ]
    for count, condition, step in (("", "i + Vec::size() <= end", "i += Vec::size()"), (", end - i", "i < end", "i = end")):
        lines.append(f"  for (; {condition}; {step}) {{")
        lines += [f"    const Vec t{i} = Vec::loadu(tensors[{i}] + i{count});" for i in range(inputs)]
        lines += [f"    const Vec v{i} = {_expression(op, args)};" for i, (op, args) in enumerate(updates.rule)]
        lines += [f"    v{v}.store(tensors[{inputs + i}] + i{count});" for i, v in enumerate(updates.results)]
        lines.append("  }")
    head = f"static void {name}(float* const* tensors, void* const* scalars, int64_t begin, int64_t end) {{"
    return "\n".join([head, "  using Vec = at::vec::Vectorized<float>;", "  int64_t i = begin;", *lines, "}"])


def _expression(op: str, args: Sequence[Any]) -> str:
    words = [a if isinstance(a, str) else f"Vec(static_cast<float>({a!r}))" for a in args]
    name = op.split(".")[1]
    if name in _SIGNS:
        return f"{words[0]} {_SIGNS[name]} {words[1]}"
    if name == "where":
        return f"{words[0]} ? {words[1]} : {words[2]}"
    if name in _METHODS:
        return f"{words[0]}.{name}()"
    return f"at::vec::{name}({words[0]}, {words[1]})"  # maximum, minimum: NaN where one is
