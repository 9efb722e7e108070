"""Stages -> CUDA C++: one kernel that runs all steps of a call.

What every block has for itself lies in its shared memory. Everything else lies in the GPU's memory, where a block's own part
stays in its first-level cache; what other blocks write is read past it."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sympy
import torch
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.virtualized import V

from ....artifact.names import KEPT, SEED, Kind, is_kind
from .formulas import NotSmall
from .owners import MOST_ENUMERATED, Owned, Split, lanes
from .stages import _DTYPES, Access, Loop, Memory, Stage, Stages, as_cpp, coordinates, elements

MOST_FETCHED = 8 << 10  # bytes of an input that every block fetches ahead
MOST_UNROLLED = 8
MOST_AT_A_TIME = 8
PRELUDE = Path(__file__).parent / "prelude.cuh"


@dataclass(frozen=True)
class Emitted:
    source: str
    buffers: tuple[str, ...]  # of the session: the kernel takes an address and a step between slices for each
    shared: int  # bytes of shared memory of a block
    scratch: int  # bytes of the GPU's memory, zeroed before the launch
    threads: int
    blocks: int
    cluster: bool = False  # of all its blocks


def emit(made: Stages, owned: Owned, threads: int, name: str, *, cluster: bool = False) -> Emitted:
    return _Emitter(made, owned, threads, name, cluster).run()


class _Emitter:
    def __init__(self, made: Stages, owned: Owned, threads: int, name: str, cluster: bool) -> None:
        self.made, self.owned, self.threads, self.name, self.cluster = made, owned, threads, name, cluster
        self.written = {a.memory for s in made.stages for _, a in s.touched() if a.write}
        self.forwarded = _forwarded(made)
        used = {a.memory for s in made.stages for _, a in s.touched()}
        self.used = [m for n, m in made.memories.items() if n in used]
        self.buffers = [m for m in self.used if m.buffer is not None]
        # Numbers that no stage changes (hyperparameters, a label) are read once a step.
        self.single = {m.name for m in self.buffers if m.num_elements == 1 and m.name not in self.written and m.buffer != SEED}
        for m in self.buffers:
            assert m.buffer is not None
            if is_kind(m.buffer, Kind.INPUT) and m.name in self.written:
                raise NotSmall(f"the step changes its input {m.buffer}")
        self.homes = owned.homes
        # Slices of the caller's that are brought into the block's memory one step ahead: memory -> where.
        self.fetched = {m.name: 0 for m in self.buffers if m.buffer is not None and is_kind(m.buffer, Kind.INPUT)
                        and m.name not in self.single and m.num_bytes <= MOST_FETCHED and m.size >= 4}  # fmt: skip
        self.scratch: dict[str, int] = {}

    def run(self) -> Emitted:
        blocks, threads = self.owned.blocks, self.threads
        head: list[str] = []
        scratch = 64  # the barrier's counter
        shared = 256 + 16 * len(self.buffers)  # partial sums of warps, then the addresses of the session's buffers
        for m in self.used:
            if m.name in self.forwarded or m.name in self.single or m.buffer == SEED:
                continue
            if m.name in self.owned.private:
                head.append(f"  {m.kind}* const {m.name} = ({m.kind}*)(shared + {shared});")
                shared += _rounded(m.num_bytes)
            elif m.name in self.homes:
                parts = self.homes[m.name]
                head += _by_block(f"{m.name}_first", [begin for begin, _ in parts])
                head += _by_block(f"{m.name}_end", [end for _, end in parts])
                head.append(f"  {m.kind}* const {m.name} = ({m.kind}*)(shared + {shared}) - {m.name}_first;")
                shared += _rounded(max(end - begin for begin, end in parts) * m.size)
            elif m.name in self.fetched:
                self.fetched[m.name] = shared
                shared += 2 * _rounded(m.num_bytes)
            elif m.buffer is None:
                self.scratch[m.name] = scratch
                scratch += -(-m.num_bytes // 128) * 128
        lines = [f"  for (int i = tid; i < {2 * len(self.buffers)}; i += {threads}) at[i] = places[i];", "  __syncthreads();"]
        lines += [*head, *self._copies(into=True), *self._fetch("0", "true"), *self._numbers("0", "  ", declare=True)]
        lines.append("  for (long long step = 0; step < steps; ++step) {")
        lines += self._current()
        if self.fetched:
            lines += ["    tw_fetched();", "    __syncthreads();", *self._fetch("step + 1", "step + 1 < steps")]
        for i in self.owned.order:
            wait = {"": "", "block": "    __syncthreads();", "grid": "    tw_grid_barrier(scratch, epoch);"}[self.owned.before[i]]
            lines += [wait] if wait else []
            lines += ["    {  // " + self._title(i), *self._pointers(i), *_Writer(self, i).lines(), "    }"]
        lines += self._given()
        lines.append("  }")
        lines.append("  tw_grid_barrier(scratch, epoch);" if blocks > 1 else "  __syncthreads();")
        lines += self._copies(into=False)
        kind = f"__cluster_dims__({blocks}, 1, 1) " if self.cluster else ""
        source = "\n".join(
            [
                *(["#define TW_CLUSTER"] if self.cluster else []),
                PRELUDE.read_text(),
                f'extern "C" __global__ void __launch_bounds__({threads}, 1) {kind}{self.name}(',
                "    const long long* __restrict__ places, unsigned char* scratch, unsigned int* wrong,",
                "    long long steps, unsigned long long base, unsigned long long counter) {",
                "  TW_SHARED",
                "  const int tid = threadIdx.x, block = blockIdx.x;",
                "  long long* const at = (long long*)(shared + 256);",
                "  unsigned int epoch = 0;",
                *lines,
                "}",
                "",
            ]
        )
        return Emitted(source, tuple(str(m.buffer) for m in self.buffers), shared, scratch, threads, blocks, self.cluster)

    def _place(self, m: Memory) -> int:
        return 2 * self.buffers.index(m)

    def _pointers(self, number: int) -> list[str]:
        """Where the memories of a stage lie that have no fixed place in the block."""
        lines = []
        for name in dict.fromkeys(a.memory for _, a in self.made.stages[number].touched()):
            m = self.made.memories[name]
            if m.name in self.forwarded or m.name in self.single or m.buffer == SEED or m.name in self.owned.private:
                continue
            if m.name in self.homes:
                continue
            if m.name in self.fetched:
                size = _rounded(m.num_bytes)
                lines.append(f"      const {m.kind}* const {m.name} = "
                             f"(const {m.kind}*)(shared + {self.fetched[m.name]} + (step & 1) * {size});")  # fmt: skip
            elif m.buffer is None:
                lines.append(f"      {m.kind}* const {m.name} = ({m.kind}*)(scratch + {self.scratch[m.name]});")
            else:
                place = self._place(m)
                lines.append(f"      {m.kind}* const {m.name} = ({m.kind}*)(at[{place}] + step * at[{place + 1}]);")
        return lines

    def _fetch(self, step: str, when: str) -> list[str]:
        """The caller's slices of a step are on their way into the block's memory while the step before is computed."""
        lines = []
        for name, where in self.fetched.items():
            m = self.made.memories[name]
            place = self._place(m)
            to = f"shared + {where} + (({step}) & 1) * {_rounded(m.num_bytes)}"
            source = f"(const unsigned char*)(at[{place}] + ({step}) * at[{place + 1}])"
            lines.append(f"    if ({when}) tw_fetch({to}, {source}, {m.num_bytes}, tid, {self.threads});")
        return [*lines, "    tw_fetch_sent();"] if lines else []

    def _numbers(self, step: str, indent: str, *, declare: bool) -> list[str]:
        """Numbers of the step, read one step ahead."""
        lines = []
        for m in self.buffers:
            if m.name in self.single:
                place = self._place(m)
                kind = f"{m.kind} " if declare else ""
                lines.append(f"{indent}{kind}{m.name}_next = *(const {m.kind}*)(at[{place}] + ({step}) * at[{place + 1}]);")
        return lines

    def _current(self) -> list[str]:
        lines = [f"    const {m.kind} {m.name}_value = {m.name}_next;" for m in self.buffers if m.name in self.single]
        seed = next((m.name for m in self.used if m.buffer == SEED), None)
        if seed is not None:
            lines.append(f"    const long long {seed}_value = (long long)tw_next_seed(base, counter + (unsigned long long)step);")
        return lines + self._numbers("step + 1 < steps ? step + 1 : step", "    ", declare=False)

    def _title(self, i: int) -> str:
        names = sorted({self.made.memories[a.memory].buffer or a.memory for _, a in self.made.stages[i].touched() if a.write})
        return f"{' '.join(n for n in names if not n.startswith('buf')) or ' '.join(names)}"

    def _copies(self, *, into: bool) -> list[str]:
        """Every block's own copies come from the session's buffers before the loop, and one block's go back after it."""
        lines = []
        for m in self.buffers:
            if m.name in self.forwarded or m.buffer is None:
                continue
            if m.name in self.homes:
                there = f"(({m.kind}*)at[{self._place(m)}])"
                loop = f"for (int i = {m.name}_first + tid; i < {m.name}_end; i += {self.threads})"
                lines.append(f"  {loop} {m.name}[i] = {there}[i];" if into else f"  {loop} {there}[i] = {m.name}[i];")
            if m.name not in self.owned.private or not is_kind(m.buffer, *KEPT):
                continue
            there = f"(({m.kind}*)at[{self._place(m)}])"
            loop = f"for (int i = tid; i < {m.num_elements}; i += {self.threads})"
            if into:
                lines.append(f"  {loop} {m.name}[i] = {there}[i];")
            else:
                lines.append(f"  if (block == 0) {loop} {there}[i] = {m.name}[i];")
        return lines + (["  __syncthreads();"] if lines and into else [])

    def _given(self) -> list[str]:
        """Outputs that every block has for itself: one of them gives them to the caller, slice by slice."""
        lines: list[str] = []
        for m in self.buffers:
            own = m.name in self.owned.private and m.buffer is not None and m.name not in self.forwarded
            if own and not is_kind(str(m.buffer), *KEPT):
                place = self._place(m)
                to = f"(({m.kind}*)(at[{place}] + step * at[{place + 1}]))"
                loop = f"for (int i = tid; i < {m.num_elements}; i += {self.threads})"
                lines.append(f"    if (block == 0) {loop} {to}[i] = {m.name}[i];")
        return ["    __syncthreads();", *lines] if lines else []


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def _by_block(name: str, numbers: list[int]) -> list[str]:
    """A number of each block: a formula, where there is a simple one, else a table."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(steps) == 1:
        return [f"  const int {name} = {numbers[0]} + block * {steps.pop()};"]
    return [f"  const int {name}s[] = {{{', '.join(map(str, numbers))}}};", f"  const int {name} = {name}s[block];"]


def _forwarded(made: Stages) -> set[str]:
    """Temporaries that are read where they are made alone, by the thread that made them: they need no memory."""
    by_stage: dict[str, set[int]] = {}
    for i, stage in enumerate(made.stages):
        for _, access in stage.touched():
            by_stage.setdefault(access.memory, set()).add(i)
    found = set()
    for name, where in by_stage.items():
        if made.memories[name].buffer is None and len(where) == 1 and _passed_on(made.stages[next(iter(where))], name):
            found.add(name)
    return found


def _passed_on(stage: Stage, name: str) -> bool:
    """Whether every read comes after the write, of the same element in the same thread, where its value is still at hand."""
    written: tuple[int, Any] | None = None
    for number, (_, loops) in enumerate(stage.segments):
        for loop in loops:
            for access in loop.accesses:
                if access.memory != name:
                    continue
                key = _element(loop, stage, access)
                if access.write:
                    if written is not None:
                        return False
                    written = (number, key)
                elif written is None or key is None or key != written[1] or (key[0] == "xr" and number != written[0]):
                    return False
    return True


def _element(loop: Loop, stage: Stage, access: Access) -> tuple[str, Any] | None:
    """Which element a thread touches: ("x", ...) where it depends on x alone, ("xr", ...) where it depends on r as well. The same
    for two loops if they touch the same elements, whatever their variables. None: known at run time only, or too large to
    look."""
    if access.index is None:
        return None
    reduced = access.write and bool(loop.inner)
    within = not reduced and stage.rnumel > 1 and (bool(loop.inner) or _over_all(loop, stage))
    rows = stage.rnumel if within else 1
    if stage.numel * rows > MOST_ENUMERATED:
        return None
    values = coordinates(loop, stage, np.arange(stage.numel)[:, None], np.arange(rows)[None, :])
    at = np.broadcast_to(elements(access, values), (stage.numel, rows))
    if rows > 1 and (at != at[:, :1]).any():
        return "xr", hashlib.sha256(np.ascontiguousarray(at).tobytes()).hexdigest()
    return "x", hashlib.sha256(np.ascontiguousarray(at[:, 0]).tobytes()).hexdigest()


def _over_all(loop: Loop, stage: Stage) -> bool:
    return not loop.inner and stage.rnumel > 1 and math.prod(loop.sizes) == stage.numel * stage.rnumel


# ---- one stage ----


class _Writer:
    def __init__(self, emitter: _Emitter, number: int) -> None:
        self.e, self.number = emitter, number
        self.stage: Stage = emitter.made.stages[number]
        self.split: Split = emitter.owned.splits[number]
        self.lanes = lanes(self.stage, self.split, emitter.owned.blocks, emitter.threads)
        self.out: list[str] = []
        self.count = 0
        self.values: dict[tuple[str, Any], str] = {}  # what was just computed: (memory, flat index) -> variable
        self.changed: set[str] = set()  # memories that the stage has written so far
        self.own: set[tuple[str, Any]] = set()  # elements that a thread reads again itself
        self.late: list[tuple[str, str, str, tuple[str, str]]] | None = (
            None  # stores that wait: type, value, index, (memory, when)
        )
        self.indent = "      "

    def line(self, text: str) -> None:
        self.out.append(self.indent + text)

    def fresh(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def lines(self) -> list[str]:
        stage, threads, lanes_ = self.stage, self.e.threads, self.lanes
        groups = threads // lanes_
        if self.split.repeated:
            self.line(f"const int mine = {stage.numel};")
            place = "const int x = n;"
        else:
            s, n, blocks = self.split.stride, self.split.size, self.e.owned.blocks
            outer = stage.numel // (s * n)
            self.line(f"const int first = ({n} * (long long)block + {blocks - 1}) / {blocks};")
            self.line(f"const int width = (int)(({n} * (long long)(block + 1) + {blocks - 1}) / {blocks}) - first;")
            self.line(f"const int mine = {outer * s} * width;")
            place = (f"const int x = ((n / ({s} * width)) * {n} + first + (n / {s}) % width) * {s} + n % {s};"
                     if (s, outer) != (1, 1) else "const int x = first + n;")  # fmt: skip
        self.line(f"const int lane = tid % {lanes_};")
        several = self._at_a_time()
        if several > 1:
            return self._several(several, place)
        if lanes_ == 1:
            self.line(f"for (int n = tid; n < mine; n += {groups}) {{")
            self.line("  const bool active = true;")
            self.line(f"  {place}")
        else:  # all threads take part, so that they can add up together
            self.line(f"for (int from = 0; from < mine; from += {groups}) {{")
            self.line(f"  const bool active = from + tid / {lanes_} < mine;")
            if lanes_ <= 32:  # warps that have nothing to do leave the others the multiprocessor
                self.line(f"  if (from + tid / 32 * {32 // lanes_} >= mine) continue;")
            self.line(f"  const int n = active ? from + tid / {lanes_} : from;")
            self.line(f"  {place}")
        self.indent += "  "
        for inside, loops in stage.segments:
            if inside:
                self._inside(loops)
            else:
                for loop in loops:
                    self._variables(loop, "x")
                    self._body(loop, summed=False)
        self.indent = self.indent[:-2]
        self.line("}")
        return self.out

    def _at_a_time(self) -> int:
        """Elements that a thread computes before it stores them: what it must read for them is then on its way at once."""
        if self.lanes != 1 or self.stage.rnumel != 1:
            return 1
        mine = self.stage.numel if self.split.repeated else -(-self.stage.numel // min(self.e.owned.blocks, self.split.size))
        return min(MOST_AT_A_TIME, -(-mine // self.e.threads))

    def _several(self, count: int, place: str) -> list[str]:
        threads = self.e.threads
        self.late = []
        head, self.out, self.indent = self.out, [], "          "
        for _, loops in self.stage.segments:
            for loop in loops:
                self._variables(loop, "x")
                self._body(loop, summed=False)
        body, self.out, self.indent = self.out, head, "      "
        for k, (kind, _, _, _) in enumerate(self.late):
            self.line(f"{kind} s{k}[{count}]; int i{k}[{count}];")
        self.line(f"for (int from = tid; from < mine; from += {threads * count}) {{")
        self.line("#pragma unroll")
        self.line(f"  for (int u = 0; u < {count}; ++u) {{")
        self.line(f"    const int n = from + u * {threads} < mine ? from + u * {threads} : from;")
        self.line(f"    {place}")
        self.out += body
        for k, (_, value, index, _) in enumerate(self.late):
            self.line(f"    s{k}[u] = {value}; i{k}[u] = {index};")
        self.line("  }")
        self.line("#pragma unroll")
        self.line(f"  for (int u = 0; u < {count}; ++u) {{")
        self.line(f"    const bool active = from + u * {threads} < mine;")
        for k, (_, _, _, target) in enumerate(self.late):
            self.line(f"    if ({target[1]}) {target[0]}[i{k}[u]] = s{k}[u];")
        self.line("  }")
        self.line("}")
        return self.out

    def _variables(self, loop: Loop, flat: str) -> None:
        self.names = {}
        for i, size in enumerate(loop.sizes):
            after = math.prod(loop.sizes[i + 1 :])
            name = self.fresh()
            text = flat if after == 1 else f"{flat} / {after}"
            self.line(f"const int {name} = {text};" if i == 0 else f"const int {name} = ({text}) % {size};")
            self.names[f"x{i}"] = name
        if loop.inner:
            for i, size in enumerate(loop.inner):
                after = math.prod(loop.inner[i + 1 :])
                name = self.fresh()
                self.line(f"const int {name} = (r / {after})" + (f" % {size};" if i else ";"))
                self.names[f"r{i}"] = name

    def _inside(self, loops: list[Loop]) -> None:
        """A loop over r. Sums that it makes are complete after it."""
        sums: list[tuple[str, str, str, list[tuple[str, sympy.Expr, Loop]]]] = []
        self.sums = sums
        head = len(self.out)
        kept = dict(self.values)
        self.indent += "  "
        for loop in loops:
            self._variables(loop, f"(x * {self.stage.rnumel} + r)" if _over_all(loop, self.stage) else "x")
            self._body(loop, summed=bool(loop.inner))
        self.indent = self.indent[:-2]
        body, self.out = self.out[head:], self.out[:head]
        # what was computed for an r is not at hand after the loop
        self.values = kept
        for acc, kind, start, _ in sums:
            self.line(f"{kind.split(':')[0]} {acc} = {start};")
        turns = -(-self.stage.rnumel // self.lanes)
        self.line(f"#pragma unroll {min(turns, MOST_UNROLLED)}")
        self.line(f"for (int turn = 0; turn < {turns}; ++turn) {{")
        self.line(f"  const int r = turn * {self.lanes} + lane;")
        conditions = [f"r < {self.stage.rnumel}"] * (self.stage.rnumel % self.lanes != 0) + ["active"] * (self.lanes > 32)
        self.line(f"  if ({' && '.join(conditions)}) {{" if conditions else "  {")
        self.out += body
        self.line("  }")
        self.line("}")
        for acc, kind, _, stores in sums:
            ctype, how = kind.split(":")
            if self.lanes > 1:
                self.line(f"{acc} = tw_together<{self.lanes}, Tw{how}>({acc}, ({ctype}*)shared);")
            for name, index, loop in stores:
                self._variables_outer(loop)
                self._store(name, index, acc, loop)
        self.sums = []

    def _variables_outer(self, loop: Loop) -> None:
        self._variables(Loop(loop.body, loop.sizes, (), loop.accesses), "x")

    def _body(self, loop: Loop, *, summed: bool) -> None:
        handler = _Printing(self, loop)
        with V.set_ops_handler(handler):
            loop.body(*loop.symbols)

    # ---- memory ----

    def text(self, index: sympy.Expr) -> str:
        replaced = {s: sympy.Symbol(self.names.get(str(s), str(s)), integer=True) for s in index.free_symbols}
        return as_cpp(index.xreplace(replaced))

    def key(self, name: str, index: sympy.Expr, loop: Loop, *, write: bool) -> tuple[str, Any]:
        known = not any(str(s).startswith("t") for s in index.free_symbols)
        return name, _element(loop, self.stage, Access(name, index if known else None, write))

    def load(self, name: str, index: sympy.Expr, loop: Loop) -> str:
        memory, offset = self.e.made.real[name]
        index = index + offset
        m: Memory = self.e.made.memories[memory]
        if m.buffer == SEED or memory in self.e.single:
            return f"{m.name}_value"
        if memory in self.changed or memory in self.e.forwarded:
            key = self.key(memory, index, loop, write=False)
            if key[1] is not None and key in self.values:
                return self.values[key]
            if memory in self.e.forwarded or key not in self.own:  # other threads have made it, in this very stage
                raise NotSmall(f"a value is not at hand where it is read: {memory}")
        at = f"{m.name}[{self.text(index)}]"
        found = self.fresh()
        far = (self.number, memory) in self.e.owned.far
        self.line(f"const {m.kind} {found} = {f'tw_far(&{at})' if far else at};")
        return found

    def store(self, name: str, index: sympy.Expr, value: str, loop: Loop) -> None:
        self._store(name, index, value, loop)

    def _store(self, name: str, index: sympy.Expr, value: str, loop: Loop) -> None:
        memory, offset = self.e.made.real[name]
        index = index + offset
        m: Memory = self.e.made.memories[memory]
        kept = self.fresh()
        self.line(f"const {m.kind} {kept} = ({m.kind})({value});")
        key = self.key(memory, index, loop, write=True)
        self.changed.add(memory)
        if key[1] is not None:
            self.values[key] = kept
            self.own.add(key)
        if memory in self.e.forwarded:
            return
        once = not _over_all(loop, self.stage)
        guard = "active && lane == 0" if once and self.lanes > 1 else "active"
        if self.split.repeated and memory not in self.e.owned.private:
            guard += " && block == 0"
        if self.late is not None:
            self.late.append((m.kind, kept, self.text(index), (m.name, guard)))
        else:
            self.line(f"if ({guard}) {m.name}[{self.text(index)}] = {kept};")


_BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
           "ne": "!=", "and_": "&", "or_": "|", "xor": "^", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
           "logical_and": "&&", "logical_or": "||", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>", "lshift": "<<",
           "rshift": ">>", "div": "/"}  # fmt: skip
_FUNCTIONS = frozenset((
    "abs", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "tanh", "sinh", "cosh",
    "asin", "acos", "atan", "atan2", "sigmoid", "erf", "erfc", "pow", "maximum", "minimum", "floor", "ceil", "trunc", "round",
    "fmod", "remainder", "relu", "square", "reciprocal", "isnan", "isinf", "sign", "signbit", "floordiv", "truncdiv", "mod",
    "copysign", "hypot", "lgamma",
))  # fmt: skip
_SUMS = {"sum": ("Sum", "0"), "max": ("Max", None), "min": ("Min", None), "prod": ("Product", "1"), "any": ("Any", "false")}


class _Printing(DefaultHandler):
    """Walks through a body and writes it down. Values are names of C++ variables."""

    def __init__(self, writer: _Writer, loop: Loop) -> None:
        self.w, self.loop = writer, loop

    def _let(self, text: str) -> str:
        name = self.w.fresh()
        self.w.line(f"const auto {name} = {text};")
        return name

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _BINARY:
            return self._let(f"tw_narrow({args[0]}, {args[1]}, {args[0]} {_BINARY[name]} {args[1]})")
        if name in _FUNCTIONS:
            return self._let(f"tw_{name}({', '.join(map(str, args))})")
        raise NotSmall(f"an operation that is not known here: {name}")

    def neg(self, x: str) -> str:
        return self._let(f"tw_narrow({x}, {x}, -{x})")

    def logical_not(self, x: str) -> str:
        return self._let(f"!{x}")

    def bitwise_not(self, x: str) -> str:
        return self._let(f"tw_narrow({x}, {x}, ~{x})")

    def identity(self, x: str) -> str:
        return x

    def where(self, condition: str, a: str, b: str) -> str:
        return self._let(f"{condition} ? {a} : {b}")

    def constant(self, value: Any, dtype: torch.dtype) -> str:
        return _literal(value, dtype)

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> str:
        return self._let(f"({_kind(dtype)})({self.w.text(expr)})")

    def to_dtype(self, x: str, dtype: torch.dtype, src_dtype: Any = None, use_compute_types: bool = True) -> str:
        return self._let(f"({_kind(dtype)})({x})")

    def load(self, name: str, index: sympy.Expr) -> str:
        return self.w.load(name, index, self.loop)

    def store(self, name: str, index: sympy.Expr, value: str, mode: Any = None) -> None:
        self.w.store(name, index, value, self.loop)

    def store_reduction(self, name: str, index: sympy.Expr, value: str) -> None:
        next(s for s in self.w.sums if s[0] == value)[3].append((name, index, self.loop))

    def reduction(self, dtype: torch.dtype, src_dtype: torch.dtype, kind: str, value: str) -> str:
        how, start = _SUMS[kind]
        name = self.w.fresh()
        ctype = _kind(dtype)
        self.w.sums.append((name, f"{ctype}:{how}", start or f"tw_worst_{kind}<{ctype}>()", []))
        self.w.line(f"{name} = Tw{how}::of({name}, ({ctype}){value});")
        return name

    def masked(self, mask: str, body: Callable[[], Any], other: Any) -> str:
        w = self.w
        made, name, kept = w.fresh(), w.fresh(), dict(w.values)
        before, w.out, w.indent = w.out, [], w.indent + "  "
        value = body()
        inner, w.out, w.indent = w.out, before, w.indent[:-2]
        w.values = kept
        w.line(f"const auto {made} = [&]() {{")
        w.out += inner
        w.line(f"  return {value};")
        w.line("};")
        w.line(f"decltype({made}()) {name} = (decltype({made}())){_literal(other, torch.float32)};")
        w.line(f"if ({mask}) {name} = {made}();")
        return name

    def indirect_indexing(self, index: str, size: Any, check: bool = True, wrap_neg: bool = True) -> sympy.Symbol:
        name = self.w.fresh()
        self.w.line(f"const int {name} = tw_within((long long){index}, {int(size)}, {str(wrap_neg).lower()}, wrong);")
        return sympy.Symbol(name, integer=True)

    def check_bounds(self, *_: Any) -> None:
        return None


def _kind(dtype: torch.dtype) -> str:
    if dtype not in _DTYPES:
        raise NotSmall(f"values of type {dtype}")
    return _DTYPES[dtype]


def _literal(value: Any, dtype: torch.dtype) -> str:
    kind = _kind(dtype)
    if isinstance(value, bool) or dtype == torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        return f"({kind}){int(value)}" if abs(int(value)) < 2**31 else f"({kind}){int(value)}ll"
    value = float(value)
    if math.isnan(value):
        return f"({kind})tw_nan()"
    if math.isinf(value):
        return f"({kind})({'-' if value < 0 else ''}tw_infinity())"
    return f"({kind}){value!r}"
