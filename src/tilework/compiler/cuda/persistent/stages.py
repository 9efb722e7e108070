"""Graph -> stages. Inductor writes every operator as a formula over the elements of its result and fuses what belongs together;
here its loops are taken before they become Triton."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy
import torch
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from ....artifact.graph import Graph
from ....process import without_warnings
from ... import inductor_fixes, lowerings
from ...to_fx import to_fx
from ..launches import DEVICE, settings
from ..target import Target, assumed
from .formulas import WRITTEN, NotSmall

_DTYPES = {torch.float32: "float", torch.float64: "double", torch.int64: "long long", torch.int32: "int", torch.bool: "bool",
           torch.uint8: "unsigned char", torch.int16: "short", torch.int8: "signed char"}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """A tensor that stages read or write: a buffer of the session, or a temporary of the kernel's own."""

    name: str
    kind: str  # the C++ type of an element
    num_elements: int
    buffer: str | None  # of the session

    @property
    def size(self) -> int:
        return {"float": 4, "double": 8, "long long": 8, "int": 4, "bool": 1, "unsigned char": 1, "short": 2, "signed char": 1}[
            self.kind
        ]

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.size


@dataclass(frozen=True)
class Access:
    """Which elements a node touches: an index over its own variables; None where it is only known at run time."""

    memory: str
    index: sympy.Expr | None
    write: bool


@dataclass
class Loop:
    """One of Inductor's nodes: for every element x (and r, where it sums), a formula."""

    body: Any
    sizes: tuple[int, ...]  # of its variables for the elements
    inner: tuple[int, ...]  # of those that it sums over; empty: an element each
    accesses: list[Access] = field(default_factory=list)

    @property
    def symbols(self) -> tuple[list[sympy.Symbol], list[sympy.Symbol]]:
        outer = [sympy.Symbol(f"x{i}", integer=True, nonnegative=True) for i in range(len(self.sizes))]
        return outer, [sympy.Symbol(f"r{i}", integer=True, nonnegative=True) for i in range(len(self.inner))]


@dataclass
class Stage:
    """Loops over the same elements: `segments` are (inside a loop over r, the loops)."""

    numel: int
    rnumel: int
    segments: list[tuple[bool, list[Loop]]]

    @property
    def loops(self) -> list[Loop]:
        return [loop for _, loops in self.segments for loop in loops]

    @property
    def work(self) -> int:
        return self.numel * self.rnumel * max(1, len(self.loops))

    def touched(self) -> Iterator[tuple[Loop, Access]]:
        for loop in self.loops:
            for access in loop.accesses:
                yield loop, access


@dataclass
class Stages:
    stages: list[Stage]
    memories: dict[str, Memory]
    real: dict[str, tuple[str, int]]  # Inductor's names -> ours, and where in it

    @property
    def work(self) -> int:
        return sum(s.work for s in self.stages)


MOST_WORK = 40_000_000  # multiplications in a step: beyond it kernels of their own are better at them


def stages(graph: Graph, target: Target) -> Stages:
    """Raises NotSmall where the program is not made of loops alone, or is too large."""
    lowerings.register()
    mode = FakeTensorMode(static_shapes=True, shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    chosen = {**settings(), "split_reductions": False, "unroll_reductions_threshold": 1, "layout_optimization": False,
              "triton.cooperative_reductions": False, "triton.mix_order_reduction": False}  # fmt: skip
    chosen = {k: v for k, v in chosen.items() if _known(k)}
    with torch.no_grad(), without_warnings(), inductor_fixes.applied(), assumed(target), config.patch(chosen):
        module = to_fx(graph, mode, device=DEVICE, otherwise=WRITTEN)
        inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        with V.set_fake_mode(mode), DebugContext():
            lowering = GraphLowering(module, example_inputs=inputs, is_inference=True)
            with V.set_graph_handler(lowering):
                lowering.run(*inputs)
                lowering._update_scheduler()
                return _Reader(graph, lowering).read()


def _known(option: str) -> bool:
    owner: Any = config
    for part in option.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


class _Reader:
    def __init__(self, graph: Graph, lowering: Any) -> None:
        self.graph, self.lowering, self.scheduler = graph, lowering, lowering.scheduler
        self.memories: dict[str, Memory] = {}
        self.real: dict[str, tuple[str, int]] = {}
        self.buffers = {f"arg{i}_1": b for i, b in enumerate(graph.buffers)}

    def read(self) -> Stages:
        from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

        if self.lowering.constants:
            raise NotSmall("constants in the generated code")
        made = []
        for node in self.scheduler.nodes:
            if isinstance(node, NopKernelSchedulerNode):
                continue
            if isinstance(node, ExternKernelSchedulerNode):
                raise NotSmall(f"a library call: {getattr(node.node, 'python_kernel_name', None) or type(node.node).__name__}")
            made.append(self._stage([n for n in node.get_nodes() if n.get_name() not in self.scheduler.removed_ops]))
        found = Stages(made, self.memories, self.real)
        if found.work > MOST_WORK:
            raise NotSmall(f"{found.work / 1e6:.0f} million operations a step")
        return found

    def _stage(self, nodes: Sequence[Any]) -> Stage:
        from torch._inductor.codegen.simd_kernel_features import DisableReduction, EnableReduction

        _, (numel, rnumel) = max(nodes, key=lambda n: int(n.is_reduction())).group
        numel, rnumel = int(numel), int(rnumel)
        backend = self.scheduler.get_backend(torch.device(DEVICE))
        backend = getattr(backend, "_triton_scheduling", backend)
        order = backend.generate_node_schedule(list(nodes), numel, rnumel)
        segments: list[tuple[bool, list[Loop]]] = [(rnumel > 1, [])]
        for item in order:
            if item is DisableReduction or item is EnableReduction:
                segments.append((item is EnableReduction, []))
            else:
                segments[-1][1].append(self._loop(item))
        return Stage(numel, rnumel, [s for s in segments if s[1]])

    def _loop(self, node: Any) -> Loop:
        outer, inner = node.get_ranges()
        loop = Loop(node._body, tuple(int(s) for s in outer), tuple(int(s) for s in inner))
        noting = _Noting(self, loop)
        with V.set_ops_handler(noting):
            loop.body(*loop.symbols)
        return loop

    def memory(self, name: str) -> tuple[str, int]:
        """Ours for Inductor's name, and the offset in it."""
        if name not in self.real:
            self.real[name] = self._find(name)
        return self.real[name]

    def _find(self, name: str) -> tuple[str, int]:
        from torch._inductor.ir import NonOwningLayout

        name = self.scheduler.mutation_real_name.get(name, name)
        if name in self.buffers:
            buffer = self.buffers[name]
            kind = self.graph.types[buffer]
            dtype = self.lowering.get_dtype(name)
            extent = kind.extent
        else:
            found = self.lowering.get_buffer(name)
            layout = found.get_layout() if found is not None else None
            if layout is None:
                raise NotSmall(f"no buffer {name}")
            if isinstance(layout, NonOwningLayout):
                base, offset = self.memory(layout.view.get_name())
                return base, offset + int(layout.view.get_layout().offset)
            buffer, dtype = None, found.get_dtype()
            sizes = [(int(n), int(s)) for n, s in zip(layout.size, layout.stride, strict=True)]
            extent = 1 + sum((n - 1) * s for n, s in sizes) + int(layout.offset)
        if dtype not in _DTYPES:
            raise NotSmall(f"elements of type {dtype}")
        self.memories[name] = Memory(name, _DTYPES[dtype], int(extent), buffer)
        return name, 0


class _Noting(DefaultHandler):
    """Walks through a body and notes what it touches. Values are nothing but what depends on memory."""

    def __init__(self, reader: _Reader, loop: Loop) -> None:
        self.reader, self.loop = reader, loop

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("scan", "sort", "bucketize", "load_seed", "rand", "randn", "inline_asm_elementwise", "frexp", "dot"):
            raise NotSmall(f"an operation that is not known here: {name}")
        return None

    def load(self, name: str, index: sympy.Expr) -> Any:
        self._note(name, index, False)

    def store(self, name: str, index: sympy.Expr, value: Any, mode: Any = None) -> None:
        if mode is not None:
            raise NotSmall("sums by index")
        self._note(name, index, True)

    def store_reduction(self, name: str, index: sympy.Expr, value: Any) -> None:
        self._note(name, index, True)

    def reduction(self, dtype: Any, src_dtype: Any, kind: str, value: Any) -> Any:
        if kind not in ("sum", "max", "min", "prod", "any"):
            raise NotSmall(f"a reduction of kind {kind}")

    def masked(self, mask: Any, body: Any, other: Any) -> Any:
        return body()

    def indirect_indexing(self, index: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> sympy.Symbol:
        return sympy.Symbol("at_run_time", integer=True)

    def _note(self, name: str, index: sympy.Expr, write: bool) -> None:
        memory, offset = self.reader.memory(name)
        known = not any(s.name == "at_run_time" for s in index.free_symbols)
        self.loop.accesses.append(Access(memory, index + offset if known else None, write))


# ---- which elements, in numbers ----


def coordinates(loop: Loop, stage: Stage, x: np.ndarray[Any, Any], r: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The loop's own variables for elements x and summands r of its stage."""
    outer, inner = loop.symbols
    summed = math.prod(loop.inner) if loop.inner else 1
    flat = x
    if not inner and math.prod(loop.sizes) == stage.numel * stage.rnumel and stage.rnumel > 1:
        flat = x * stage.rnumel + r
    found = dict(zip((s.name for s in outer), _apart(flat, loop.sizes), strict=True))
    if inner:
        assert summed == stage.rnumel
        found |= dict(zip((s.name for s in inner), _apart(r, loop.inner), strict=True))
    return found


def _apart(flat: np.ndarray[Any, Any], sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    found = []
    for i, size in enumerate(sizes):
        found.append(flat // math.prod(sizes[i + 1 :]) % size)
    return found


def elements(access: Access, values: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The elements that an access touches."""
    assert access.index is not None
    return np.asarray(eval(as_python(access.index), {"np": np}, values))


def as_python(expr: sympy.Expr) -> str:
    """An index as an expression that numpy computes, and C++ as well: only +, *, //, %."""
    return _printed(expr, "//")


def as_cpp(expr: sympy.Expr) -> str:
    return _printed(expr, "/")


def _printed(e: Any, divide: str) -> str:
    from torch.utils._sympy.functions import CleanDiv, FloorDiv, ModularIndexing, PythonMod

    def p(x: Any) -> str:
        return _printed(x, divide)

    if isinstance(e, (int, sympy.Integer)):
        return str(int(e))
    if isinstance(e, sympy.Symbol):
        return str(e.name)
    if isinstance(e, sympy.Add):
        return "(" + " + ".join(map(p, e.args)) + ")"
    if isinstance(e, sympy.Mul):
        return "(" + " * ".join(map(p, e.args)) + ")"
    if isinstance(e, ModularIndexing):
        base, by, modulus = e.args
        return f"(({p(base)} {divide} {p(by)}) % {p(modulus)})"
    if isinstance(e, (FloorDiv, CleanDiv)):
        return f"({p(e.args[0])} {divide} {p(e.args[1])})"
    if isinstance(e, (PythonMod, sympy.Mod)):
        return f"({p(e.args[0])} % {p(e.args[1])})"
    if getattr(e, "func", None) is not None and e.func.__name__ == "Identity":
        return p(e.args[0])
    raise NotSmall(f"an index of an unknown form: {e}")
