"""Graph -> what is launched, in order: kernels that Inductor has written, and calls of torch's library between them.

Inductor's output for a GPU is a Python function. It is run here once, on tensors that have shapes and no memory, and every launch
and every call is written down. What a session carries out is that list: it has no Python of the model's and no code of
Inductor's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_joint_graph_passes, _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...artifact.graph import DTYPES, MEMORY_FORMATS, Graph, dtype_name
from ...errors import BugError
from ...process import without_warnings
from .. import inductor_fixes, lowerings
from ..to_fx import to_fx
from . import attention, convolutions, losses, products
from .target import Target, assumed, patterns_without_a_gpu

DEVICE = "cuda:0"
ALIGNED = 256  # bytes: where a temporary begins


@dataclass(frozen=True)
class Place:
    """Memory that a launch reads or writes: a buffer of the session, a temporary, or a result of an earlier call."""

    kind: str  # buffer, temporary, result
    name: str | int  # of the buffer; the number of the temporary; "call.index" of the result


@dataclass(frozen=True)
class View:
    """A tensor: where it lies and how. Offset and strides in elements."""

    place: Place
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Launch:
    """A kernel by its name, and what it takes."""

    kernel: str
    args: tuple[Any, ...]  # View, int or float


@dataclass(frozen=True)
class LibraryCall:
    op: str
    args: Any
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]  # the tensors that it makes


@dataclass
class Launches:
    """What a program does on a GPU."""

    kernels: dict[str, str] = field(default_factory=dict)  # name -> Triton source
    steps: list[Launch | LibraryCall] = field(default_factory=list)
    temporaries: list[int] = field(default_factory=list)  # bytes of each


def settings() -> dict[str, Any]:
    """Inductor's options. They are part of the cache key."""
    return {
        "fx_graph_cache": False,
        "joint_graph_constant_folding": False,  # x * 0 is not 0 where x is not a number
        "size_asserts": False,
        "nan_asserts": False,
        "scalar_asserts": False,
        "alignment_asserts": False,
        "cpp_wrapper": False,
        "graph_partition": False,
        "benchmark_kernel": False,
        "triton.unique_kernel_names": True,
        "triton.descriptive_names": False,
        "max_autotune": False,
        "max_autotune_gemm": False,
        "fallback_random": True,
        "freezing": False,
        "comprehensive_padding": False,  # temporaries lie as they were traced
    }


def launches(graph: Graph, target: Target) -> Launches:
    """Raises what Inductor raises where it has no code for an operator."""
    lowerings.register()
    mode = FakeTensorMode(static_shapes=True, shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    chosen = {k: v for k, v in settings().items() if hasattr(config, k.split(".")[0])}
    with torch.no_grad(), without_warnings(), inductor_fixes.applied(), assumed(target), config.patch(chosen):
        last = convolutions.channels_last(graph)
        otherwise = attention.WRITTEN | losses.WRITTEN | products.WRITTEN | (convolutions.WRITTEN if last else {})
        source = _wrapper(to_fx(graph, mode, device=DEVICE, otherwise=otherwise), mode, target, last)
        return _Recorder(graph, mode).record(source)


def _wrapper(module: torch.fx.GraphModule, mode: FakeTensorMode, target: Target, channels_last: bool) -> str:
    """The text of Inductor's Python function."""
    inputs = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    with V.set_fake_mode(mode), DebugContext():
        with patterns_without_a_gpu(target):
            module = _recursive_joint_graph_passes(module, input_device=torch.device(DEVICE))
            _recursive_post_grad_passes(module, is_inference=True)
        lowering = GraphLowering(module, example_inputs=inputs, is_inference=True, layout_opt=channels_last)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            code = lowering.codegen()[0]
    if lowering.constants:
        raise BugError("compile-constants", f"the generated code has constants of its own: {list(lowering.constants)[:3]}")
    return str(getattr(code, "value", code))


_STREAM = re.compile(r"^(?:from torch\._C import _cuda_getCurrentRawStream as get_raw_stream|get_raw_stream = .*)$", re.M)
_OPENED = re.compile(r"^( *)(?:with torch\.cuda\._DeviceGuard\(\d+\):|torch\.cuda\.set_device\(\d+\))$", re.M)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph, mode: FakeTensorMode) -> None:
        super().__init__()
        self.graph, self.mode, self.made = graph, mode, Launches()
        self.places: dict[int, Place] = {}  # by storage
        self.alive: list[torch.Tensor] = []  # a storage that is gone would lend its number to another

    def record(self, source: str) -> Launches:
        source = _STREAM.sub("", source).replace("async_compile = AsyncCompile()", "async_compile = _recorder")
        source = _OPENED.sub(lambda m: m.group(1) + ("if True:" if "with" in m.group(0) else "pass"), source)
        names: dict[str, Any] = {"__name__": "tilework_wrapper", "_recorder": self}
        exec(compile(source, "<inductor>", "exec"), names)  # Inductor's own text, just written
        names |= {
            "get_raw_stream": lambda device: 0,
            "empty_strided_cuda": self._temporary,
            "reinterpret_tensor": lambda t, size, stride, offset=0: t.as_strided(size, stride, t.storage_offset() + offset),
            "assert_size_stride": lambda *_: None,
            "assert_alignment": lambda *_: None,
        }
        with self.mode, torch.no_grad():
            buffers = []
            for name in self.graph.buffers:
                kind = self.graph.types[name]
                tensor = torch.empty_strided(kind.shape, kind.stride, dtype=DTYPES[kind.dtype], device=DEVICE)
                self._name(tensor, Place("buffer", name))
                buffers.append(tensor)
            with self:
                names["call"](buffers)
        return self.made

    # ---- what Inductor's text calls ----

    def triton(self, name: str, source: str, device_str: str = "cuda") -> _Kernel:
        self.made.kernels[name] = source
        return _Kernel(name, self._launch)

    def wait(self, scope: Any) -> None:
        pass

    def _temporary(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with _quiet(self):
            made = torch.empty_strided(size, stride, dtype=dtype, device=DEVICE)
        number = len(self.made.temporaries)
        self.made.temporaries.append(made.untyped_storage().nbytes())
        self._name(made, Place("temporary", number))
        return made

    def _launch(self, name: str, args: Sequence[Any]) -> None:
        values = tuple(self._view(a) if isinstance(a, torch.Tensor) else a for a in args)
        self.made.steps.append(Launch(name, values))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        func = _IN_MEMORY.get(func, func)
        result = func(*args, **kwargs)
        if getattr(self, "_silent", False) or func.namespace == "prim" or _is_view(func):
            return result
        if func in _ALLOCATES:
            self.made.temporaries.append(result.untyped_storage().nbytes())
            self._name(result, Place("temporary", len(self.made.temporaries) - 1))
            return result
        at = len(self.made.steps)
        results: list[View | None] = []
        changes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        for i, value in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            if isinstance(value, torch.Tensor) and not changes:
                if value.untyped_storage()._cdata in self.places:
                    raise BugError("compile-launches", f"{func} returns memory of its arguments")
                self._name(value, Place("result", f"{at}.{i}"))
                results.append(self._view(value))
            else:
                results.append(None)
        encode = self._encoded
        self.made.steps.append(LibraryCall(str(func), encode(args), {k: encode(v) for k, v in kwargs.items()}, tuple(results)))
        return result

    # ---- tensors ----

    def _name(self, tensor: torch.Tensor, place: Place) -> None:
        self.places[tensor.untyped_storage()._cdata] = place
        self.alive.append(tensor)

    def _view(self, tensor: torch.Tensor) -> View:
        place = self.places.get(tensor.untyped_storage()._cdata)
        if place is None:
            raise BugError("compile-launches", f"a launch takes a tensor that nothing has made: {tuple(tensor.shape)}")
        return View(place, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._view(value)
        if isinstance(value, (list, tuple)):
            return [self._encoded(v) for v in value]
        return value


class _Kernel:
    def __init__(self, name: str, launch: Callable[[str, Sequence[Any]], None]) -> None:
        self.name, self._launch = name, launch

    def run(self, *args: Any, **_: Any) -> None:
        self._launch(self.name, args)


class _quiet:
    """Operators inside are not written down."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def __enter__(self) -> None:
        self.recorder._silent = True

    def __exit__(self, *_: Any) -> None:
        self.recorder._silent = False


_ALLOCATES = {torch.ops.aten.empty_strided.default, torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty_strided.default,
              torch.ops.aten.new_empty.default}  # fmt: skip


# Views that are seen otherwise by a mark on the tensor, which a launch plan does not have: made for real.
_IN_MEMORY = {torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
              torch.ops.aten._neg_view.default: torch.ops.aten.neg.default}  # fmt: skip


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


# ---- as it stands in the artifact ----


def lifetimes(made: Launches) -> dict[int, tuple[int, int]]:
    """Temporary -> the first and the last step that touches it."""
    found: dict[int, tuple[int, int]] = {}
    for at, step in enumerate(made.steps):
        for view in views_of(step):
            if view.place.kind == "temporary":
                number = int(view.place.name)
                found[number] = (found.get(number, (at, at))[0], at)
    return found


def views_of(step: Launch | LibraryCall) -> list[View]:
    found: list[View] = []

    def collect(value: Any) -> None:
        if isinstance(value, View):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for v in value:
                collect(v)

    collect(step.args)
    if isinstance(step, LibraryCall):
        collect(list(step.kwargs.values()))
    return found


def placed(sizes: Mapping[int, int], alive: Mapping[int, tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Where each temporary lies, and how much memory they need: large ones first, each in the lowest gap that is free while it
    lives."""
    places: dict[int, int] = {}
    end = 0
    for number in sorted(alive, key=lambda n: -sizes[n]):
        size = -(-max(1, sizes[number]) // ALIGNED) * ALIGNED
        first, last = alive[number]
        taken = sorted(
            (places[n], places[n] + -(-max(1, sizes[n]) // ALIGNED) * ALIGNED)
            for n in places if alive[n][0] <= last and alive[n][1] >= first
        )  # fmt: skip
        at = 0
        for begin, stop in taken:
            if begin - at >= size:
                break
            at = max(at, stop)
        places[number] = at
        end = max(end, at + size)
    return places, end


def as_json(made: Launches, kernels: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The launch plan: `kernels` says of each what there is to launch (member, grid, block, shared, takes)."""
    places, num_bytes = placed(dict(enumerate(made.temporaries)), lifetimes(made))

    def place(p: Place) -> dict[str, Any]:
        return {"temporary": places[int(p.name)]} if p.kind == "temporary" else {p.kind: p.name}

    def view(v: View) -> dict[str, Any]:
        return {**place(v.place), "dtype": dtype_name(v.dtype), "shape": v.shape, "stride": v.stride, "offset": v.offset}

    def value(v: Any) -> Any:
        if isinstance(v, View):
            return {"tensor": view(v)}
        if isinstance(v, (list, tuple)):
            return [value(x) for x in v]
        if isinstance(v, torch.dtype):
            return {"dtype": dtype_name(v)}
        if isinstance(v, torch.device):
            return {"device": "cuda"}
        if isinstance(v, float) and (v != v or v in (float("inf"), float("-inf"))):
            return {"float": str(v)}
        if v is None or isinstance(v, (bool, int, float, str)):
            return v
        if isinstance(v, torch.memory_format):
            return {"memory_format": next(name for name, known in MEMORY_FORMATS.items() if known == v)}
        if isinstance(v, torch.layout):
            return {"layout": str(v)}
        raise BugError("compile-launches", f"a call takes an argument of type {type(v).__name__}")

    steps = []
    for step in made.steps:
        if isinstance(step, Launch):
            kernel = kernels[step.kernel]
            args = [value(a) for a, kind in zip(step.args, kernel["takes"], strict=False) if kind != "constexpr"]
            types = [kind for kind in kernel["takes"][: len(step.args)] if kind != "constexpr"]
            grid = kernel["grid"](step.args)
            steps.append({"kernel": kernel["function"], "member": kernel["member"], "grid": grid, "threads": kernel["threads"],
                          "shared": kernel["shared"], "args": [[t, a] for t, a in zip(types, args, strict=True)]})  # fmt: skip
        else:
            results = [None if r is None else [r.place.name, r.shape, r.stride] for r in step.results]
            kwargs = {k: value(v) for k, v in step.kwargs.items()}
            steps.append({"call": step.op, "args": value(step.args), "kwargs": kwargs, "results": results})
    return {"temporary_bytes": num_bytes, "result_bytes": _result_bytes(made), "steps": steps}


def _result_bytes(made: Launches) -> int:
    """The most memory that results of calls take at one time: each lives until its last use."""
    size: dict[str, int] = {}
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, step in enumerate(made.steps):
        for r in step.results if isinstance(step, LibraryCall) else ():
            if r is not None:
                extent = 1 + sum((n - 1) * s for n, s in zip(r.shape, r.stride, strict=True)) if 0 not in r.shape else 0
                size[str(r.place.name)] = -(-extent * r.dtype.itemsize // 512) * 512
                born[str(r.place.name)] = last[str(r.place.name)] = at
        for v in views_of(step):
            if v.place.kind == "result":
                last[str(v.place.name)] = at
    return max((sum(size[n] for n in size if born[n] <= at <= last[n]) for at in range(len(made.steps))), default=0)
