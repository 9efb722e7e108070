"""Eyes on a real run of the user's step: each read of a tensor's value by Python, each data-dependent shape, print, clock, random
number from elsewhere, and each tensor from outside that is changed. Only this thread is watched."""

from __future__ import annotations

import builtins
import cProfile
import datetime
import os
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from ..artifact.manifest import Check
from ..errors import Place
from .chance import Gate
from .reads import READS, Origins, Read, check_of, has_dynamic_shape, reading_frame, selecting, storage_of
from .seeded import RANDOM_OPERATORS
from .source import is_user_file, line_text, short, user_frame

aten = torch.ops.aten
Line = tuple[str, int]  # path, number

_READS = {
    "__bool__": ("the branch depends on a tensor's value, which does not exist yet when the step is compiled",
                 "choose with tensors: torch.where(condition, a, b); or decide on the host, before the step"),
    "item": (".item() brings a tensor's value to Python, where it would be frozen into the artifact",
             "keep the value as a tensor; to see it, return it from forward"),
    "tolist": (".tolist() brings a tensor's values to Python, where they would be frozen into the artifact",
               "keep the values as a tensor; to see them, return them from forward"),
    "numpy": ("a NumPy array leaves PyTorch, so what happens to it cannot be compiled",
              "use the torch function of the same name; or do the NumPy work on the host, before the step"),
}  # fmt: skip
_READS["__int__"] = _READS["__float__"] = _READS["__index__"] = _READS["item"]
_READS["__array__"] = _READS["numpy"]
_LOOP = (
    "the loop's length depends on a tensor's value, which does not exist yet when the step is compiled",
    "loop a fixed number of times and mask what is not wanted with torch.where",
)
_SHAPE = (
    "the shape of the result depends on a tensor's values; shapes in an artifact are fixed",
    "keep the full shape and mask: x * mask, torch.where(mask, x, 0), or x.masked_fill(~mask, 0)",
)
_NO_RANDOM = (
    "it draws random numbers in a way that has no seeded form",
    "use torch.rand, randn, bernoulli or F.dropout",
)
_PRINT = (
    "forward runs in Python only once, at compile time; this would print then and never again",
    "return the value from forward and print it after the step; or remove the line",
)
CHANCE = (
    "the branch depends on a random number; it would be drawn once, at compile time, and frozen into the artifact",
    "never or always: set the probability to 0 (layerdrop=0.0) or 1; or choose with tensors: x + layer(x) * (torch.rand(()) > p)",
)
_CLOCK = (
    "the time would be read once, at compile time, and frozen into the artifact",
    "measure around the step, on the host; or give the value to the step as an input",
)
OTHER_RANDOM = (
    "random numbers from Python or NumPy would be drawn once, at compile time, and frozen into the artifact",
    "draw them with torch (torch.rand, bernoulli, F.dropout), or on the host and give them to the step as an input",
)
_OUTSIDE = (
    "forward changes a tensor that is neither a parameter nor a registered buffer: the artifact could not keep it",
    "register it: self.register_buffer(...), and change it in place",
)
STATE = (
    "forward changes Python state; it runs in Python only once, at compile time, so this would be frozen",
    "keep the state as a tensor: self.register_buffer(...) and change it in place; or return it from forward",
)
UNSTEADY = (
    "forward does something else at each call; it runs in Python only once, at compile time, so this would be frozen",
    "make what differs an input of the step, or a registered buffer",
)


@dataclass
class Findings:
    places: dict[tuple[str, str], Place] = field(default_factory=dict)  # one a (line, kind)

    def add(self, kind: str, why: str, fix: str, at: Line | None = None, *, where: str = "") -> None:
        """`where`: what to name if no line of the user's is known."""
        at = at or (None if where else user_frame())
        where = short(*at) if at is not None else where or "the model, outside of its own lines (in the backward pass, say)"
        self.places.setdefault((where, kind), Place(where, line_text(*at) if at is not None else "", why, fix))

    def add_read(self, method: str, at: Line | None) -> None:
        why, fix = _READS[method]
        if at is not None:
            text = line_text(*at)
            if (method == "__bool__" and text.startswith("while")) or (
                method in ("__int__", "__index__") and text.startswith("for")
            ):
                why, fix = _LOOP
        # every way to read a value at one line is one finding
        self.add("read", why, fix, at)


class WatchFunctions(TorchFunctionMode):
    """Sees Python-level reads of tensor values, by the name of the method that the user called."""

    def __init__(self, operators: WatchOperators) -> None:
        super().__init__()
        self.operators = operators

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        method = getattr(func, "__name__", "")
        self.operators.differentiates |= func in (torch.autograd.grad, torch.autograd.backward)
        if method not in _READS or "Tensor." not in (resolve_name(func) or f"Tensor.{method}"):
            return func(*args, **(kwargs or {}))
        watch = self.operators
        if method in ("tolist", "numpy", "__array__"):  # these read memory, without an operator
            watch.method = ""
            value = func(*args, **(kwargs or {}))
            if method == "tolist" and watch.origins.is_constant(args[0]):
                # what is traced reads its elements one by one
                watch.reads += [Read(str(READS[0]), v) for v in args[0].detach().reshape(-1).tolist()]
            else:
                watch.findings.add_read(method, user_frame())
        else:
            watch.method = method
            value = func(*args, **(kwargs or {}))
        watch.method = None
        return value


def _is_attention(func: Any) -> bool:
    """Attention operators are marked as random for their dropout; with dropout they are replaced before they get here."""
    return "scaled_dot_product" in str(func)


class WatchOperators(TorchDispatchMode):
    """Sees operators with data-dependent results and writes to tensors from outside, whatever Python path led to them.
    Keeps a log: two runs of a step that can be captured have the same."""

    def __init__(self, findings: Findings, allowed: Iterable[Tensor] = (), inputs: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.findings = findings
        self.allowed = {storage_of(t) for t in allowed}  # what the step may change: parameters, buffers, its inputs
        self.takes(inputs)
        self.reads: list[Read] = []  # that may be
        self.used: set[int] = set()  # memory that operators have read
        self.gate: Gate | None = None  # answers branches on random numbers
        self.undecided: list[Line | None] | None = None  # where it is not there yet: their lines; None: they are findings
        self.fixed: list[str] = []  # what was read from integer inputs, and is fixed
        self.differentiates = False  # whether the model takes gradients inside its own forward
        self.method: str | None = None  # by which the user's code is reading a value right now; "": seen already
        self.made: set[int] = set()  # storages that this run has made
        self.saved: dict[
            int, tuple[UntypedStorage, UntypedStorage]
        ] = {}  # storages from outside, with a copy from before they were changed
        self.log: list[Any] = []
        self.line_at: int | None = None  # number in the log whose line is wanted
        self.line: Line | None = None

    def takes(self, inputs: Iterable[Tensor]) -> None:
        """These are the step's inputs."""
        inputs = list(inputs)
        self.allowed |= {storage_of(t) for t in inputs}
        self.origins = Origins(inputs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if len(self.log) == self.line_at:
            self.line = user_frame()
        self.log.append((str(func), _spelt(args), _spelt(kwargs)))
        dynamic = has_dynamic_shape(func, args)
        constant = (func in READS or dynamic) and self.origins.is_constant(*_tensors(args))
        mask = selecting(func, args) if dynamic and not constant else None
        fixed = mask is not None and self.origins.is_given(mask)  # how many are chosen is checked in each run
        if dynamic and not constant and not fixed:
            self.findings.add("shape", *_SHAPE)
        elif func in READS or dynamic:
            pass
        elif torch.Tag.nondeterministic_seeded in func.tags and func not in RANDOM_OPERATORS and not _is_attention(func):
            self.findings.add("random", *_NO_RANDOM)
        elif func.namespace not in ("aten", "prims", "prim", "tilework"):
            self.findings.add(
                "operator",
                f"operator {func} is not one of PyTorch's own, so no backend has code for it",
                "write it with PyTorch's operators",
            )
        if func._schema.is_mutable:
            self._before_write(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.gate is not None and func is READS[0] and (draw := self.origins.draw_of(args[0])) is not None:
            result, number = self.gate.answer(draw, user_frame(), args[0])
            self.reads.append(Read(str(func), result, chance=number))
            self.log.append(result)
            return result
        inputs = _tensors(args) + _tensors(tuple(kwargs.values()))
        read = {storage_of(t) for t in inputs}
        self.used |= read
        self.made |= _storages(result) - read  # a view is not new memory
        if fixed and mask is not None:
            count = int(mask.count_nonzero())
            self.reads.append(Read(str(func), count, self._fixed(f"{count} elements are chosen here")))
            self.log.append(count)
        elif func in READS or (dynamic and constant):
            self._note_read(func, args, result, constant)
        written = _written_tensors(func, args, kwargs) if func._schema.is_mutable else []
        self.origins.note(func, args, inputs, _tensors(result), written)
        if func is aten.lift_fresh.default and args[0].numel() <= 64:
            with unset_fake_temporarily():
                self.log.append(args[0].tolist())  # a constant that Python made
        return result

    def _note_read(self, func: Any, args: Any, value: Any, constant: bool) -> None:
        """A read that may be goes into the list, any other among the findings."""
        self.log.append(value if not isinstance(value, Tensor) else tuple(value.shape))
        if self.method == "":
            return
        frame = reading_frame(sys._getframe(1))
        check = check_of(frame) if frame is not None and not constant and isinstance(value, bool) and func is READS[0] else None
        whole = isinstance(value, int) and not isinstance(value, bool) and self.origins.is_given(args[0])
        if constant or check is not None:
            self.reads.append(Read(str(func), value, check if isinstance(check, Check) else None))
        elif whole:
            self.reads.append(Read(str(func), value, self._fixed(f"the number that is read here is {value}")))
        elif self.origins.is_chance(args[0]):
            if self.undecided is None:
                self.findings.add("read", *CHANCE)
            else:
                self.undecided.append(user_frame())
        else:
            self.findings.add_read(self.method or "item", user_frame())

    def _fixed(self, words: str) -> Check:
        """What depends on integer inputs alone is fixed in an artifact, said once, and checked in each run."""
        at = user_frame()
        where = short(*at) if at else "the model"
        self.fixed.append(f"{where}: {words}")
        return Check(where, f"{words} in this artifact, and other inputs need a compile of their own")

    def _before_write(self, func: Any, args: Any, kwargs: Any) -> None:
        for t in _written_tensors(func, args, kwargs):
            key = storage_of(t)
            if key in self.made or key in self.saved:
                continue
            storage = t.untyped_storage()
            with unset_fake_temporarily():
                self.saved[key] = (storage, storage.clone())
            if key not in self.allowed:
                self.findings.add("outside", *_OUTSIDE)

    @property
    def changing(self) -> list[UntypedStorage]:
        return [storage for storage, _ in self.saved.values()]

    def put_back(self) -> None:
        """The values of all tensors from outside that were changed."""
        for storage, before in self.saved.values():
            storage.copy_(before)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (tuple, list)) else (value,)
    return [t for t in found if isinstance(t, Tensor) and t.layout == torch.strided]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout == torch.strided else []
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


def _storages(value: Any) -> set[int]:
    return {storage_of(t) for t in _tensors(value)}


def _spelt(value: Any) -> Any:
    """What a log notes of an argument: numbers as they are, tensors by type."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_spelt(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _spelt(v)) for k, v in value.items())
    return repr(value) if isinstance(value, float) else value


_CLOCKS = (time.time, time.time_ns, time.perf_counter, time.perf_counter_ns, time.monotonic, time.monotonic_ns, time.process_time,
           datetime.datetime.now, datetime.datetime.utcnow, datetime.date.today)  # fmt: skip
_WATCHED = {builtins.print: ("print", *_PRINT), os.urandom: ("python random", *OTHER_RANDOM)}
_WATCHED |= dict.fromkeys(_CLOCKS, ("clock", *_CLOCK))
_SET_ATTRIBUTE = nn.Module.__setattr__.__code__


class WatchPython:
    """Sees calls in this thread: print, clocks, other random numbers; and notes the line of every assignment to an attribute of a
    module. Nothing is patched, so other threads are not concerned."""

    def __init__(self, findings: Findings, *, calls: bool = True) -> None:
        """Without `calls` it only puts random numbers from elsewhere back: to see every call takes most of a run's time."""
        self.findings, self._calls = findings, calls
        self.assigned: dict[tuple[int, str], Line | None] = {}

    def __enter__(self) -> WatchPython:
        self._random = random.getstate(), np.random.get_state()
        self._line: Line | None = None
        self._before = sys.getprofile()
        if self._calls:
            sys.setprofile(self._event)
        return self

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            try:
                kind = _WATCHED.get(arg)
            except TypeError:  # a method of something that cannot be hashed
                return
            if kind is not None and is_user_file(frame.f_code.co_filename):
                # Libraries look at the clock for their own ends, also from a garbage collector's call.
                if kind[0] != "clock" or "site-packages" not in frame.f_code.co_filename:
                    self.findings.add(*kind, at=(frame.f_code.co_filename, frame.f_lineno))
            elif self._line is None and isinstance(getattr(arg, "__self__", None), random.Random):
                self._line = user_frame(frame)
        elif event == "call" and frame.f_code is _SET_ATTRIBUTE:
            own = frame.f_locals
            self.assigned.setdefault((id(own.get("self")), str(own.get("name"))), user_frame(frame.f_back))

    def __exit__(self, *_: object) -> None:
        if not self._calls:
            pass
        elif isinstance(self._before, cProfile.Profile):  # it is no function, and takes the place back in its own way
            sys.setprofile(None)
            self._before.enable()
        else:
            sys.setprofile(self._before)
        python, numpy = self._random
        if random.getstate() != python:
            random.setstate(python)
            self.findings.add("python random", *OTHER_RANDOM, at=self._line, where="the model")
        if not all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True)):
            np.random.set_state(numpy)
            self.findings.add("numpy random", *OTHER_RANDOM, where="the model (NumPy's generator)")
