"""Values that Python reads from tensors while the step runs: in branches, as numbers, as lists.

Most of them would be frozen into the artifact and are refused (watch.py). Some may be read, because they cannot be otherwise at
run time, or because being otherwise is an error: what follows from constants alone; a random number below 1 compared with 1;
checks, whose other side raises; and whole numbers that follow from integer inputs alone, such as how many graphs a batch has.
A random number may decide whether a part of the model is called (chance.py).
Those are answered while the step is traced, and what could be otherwise becomes a check of every run."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from ..artifact.manifest import Check
from ..errors import BugError
from .seeded import RANDOM_OPERATORS, current_site
from .source import short, user_frame

aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.equal.default)
# Operators whose results have shapes that depend on values.
DYNAMIC_SHAPES = {
    aten.nonzero.default, aten.nonzero_numpy.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.unique_dim_consecutive.default,
    aten.bincount.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
_UNIFORM = {aten.rand.default, aten.rand_like.default}
_COMPARED = {aten.lt.Scalar, aten.ge.Scalar, aten.le.Scalar, aten.gt.Scalar}


def has_dynamic_shape(func: Any, args: Any) -> bool:
    return func in DYNAMIC_SHAPES or (
        func is aten.index.Tensor and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    )


def selecting(func: Any, args: Any) -> Tensor | None:
    """The mask of nonzero(mask), x[..., mask, ...] or x.masked_select(mask); None for others whose shape depends on values."""
    if func is aten.nonzero.default:
        return args[0]
    if func is aten.masked_select.default:
        return args[1] if args[0].shape == args[1].shape else None
    masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if func is aten.index.Tensor else []
    return masks[0] if len(masks) == 1 and not any(i is not None and i.dtype == torch.uint8 for i in args[1]) else None


@dataclass(frozen=True)
class Read:
    """One value that Python got: a number, or a tensor whose shape depends on values (with a check: its number of rows)."""

    kind: str  # the operator
    value: Any
    check: Check | None = None  # at run time it must be the same
    chance: int | None = None  # it decides whether a part of the model is called: which of those decisions (chance.py)


@dataclass(frozen=True)
class Draw:
    """A uniform random number that was compared to a limit."""

    site: int
    index: int  # among the numbers that were drawn there
    test: Literal["lt", "le", "gt", "ge"]
    limit: float


class Origins:
    """Which tensors follow from constants alone, or from integer inputs too: those that this run has made of nothing else.
    Whatever comes from elsewhere may be another at the next step."""

    def __init__(self, inputs: Iterable[Tensor] = ()) -> None:
        # Memory is held, so that no other takes its place.
        self._constant: dict[int, UntypedStorage] = {}
        self._given = {storage_of(t): t.untyped_storage() for t in inputs if not (t.is_floating_point() or t.is_complex())}
        self._uniform: dict[int, UntypedStorage] = {}  # random numbers in [0, 1)
        self._chance: dict[int, UntypedStorage] = {}  # what they were compared to
        self._sites: dict[int, int] = {}  # where they were drawn
        self._draws: dict[int, Draw] = {}  # of comparisons, with the index of the first element

    def is_constant(self, *tensors: Tensor) -> bool:
        return all(storage_of(t) in self._constant for t in tensors)

    def is_given(self, *tensors: Tensor) -> bool:
        return all(storage_of(t) in self._constant or storage_of(t) in self._given for t in tensors)

    def is_chance(self, *tensors: Tensor) -> bool:
        return any(storage_of(t) in self._chance for t in tensors)

    def draw_of(self, outcome: Tensor) -> Draw | None:
        """The number behind one outcome of a comparison, where it is known."""
        draw = self._draws.get(storage_of(outcome)) if self.is_chance(outcome) else None
        return replace(draw, index=draw.index + int(outcome.storage_offset())) if draw is not None else None

    def _compared(self, func: Any, args: Any) -> Draw | None:
        """Elements of the outcome lie as the numbers do."""
        numbers, site = args[0], self._sites.get(storage_of(args[0]))
        if site is None or not numbers.is_contiguous():
            return None
        return Draw(site, numbers.storage_offset(), func.overloadpacket.__name__, float(args[1]))

    def note(self, func: Any, args: Any, inputs: Sequence[Tensor], results: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """An operator has run."""
        if func is aten.lift_fresh.default:  # torch.tensor(...) of numbers, which are the program's own
            self._put(self._constant, storage_of(results[0]), results[0], True)
            return
        same = func.namespace != "tilework" and func not in RANDOM_OPERATORS
        same = same and torch.Tag.nondeterministic_seeded not in func.tags
        constant, given = same and self.is_constant(*inputs), same and self.is_given(*inputs)
        compared = func in _COMPARED and storage_of(inputs[0]) in self._uniform
        if compared:
            limit = args[1]  # a number in [0, 1) is always on the same side of these: a layer that is dropped never, or always
            constant = limit < 0 or limit >= 1 or (limit == 0 and func in (aten.lt.Scalar, aten.ge.Scalar))
        read = {storage_of(t) for t in inputs}
        for t in results:
            key = storage_of(t)
            if key not in read:
                self._put(self._constant, key, t, constant)
                self._put(self._given, key, t, given and not constant and not (t.is_floating_point() or t.is_complex()))
                self._put(self._uniform, key, t, func in _UNIFORM)
                self._put(self._chance, key, t, compared and not constant)
                self._sites.pop(key, None)
                self._draws.pop(key, None)
                if func in _UNIFORM:
                    self._sites[key] = current_site() - 1
                draw = self._compared(func, args) if compared and not constant else None
                if draw is not None:
                    self._draws[key] = draw
        for t in written:
            if not constant:
                self._constant.pop(storage_of(t), None)
            if not given:
                self._given.pop(storage_of(t), None)
            self._uniform.pop(storage_of(t), None)
            self._sites.pop(storage_of(t), None)
            self._draws.pop(storage_of(t), None)

    @staticmethod
    def _put(where: dict[int, UntypedStorage], key: int, t: Tensor, yes: bool) -> None:
        if yes:
            where[key] = t.untyped_storage()
        else:
            where.pop(key, None)


def storage_of(t: Tensor) -> int:
    return t.untyped_storage()._cdata


class Answers(TorchDispatchMode):
    """While the step is traced: reads get the values that they had in the watched run, in the same order."""

    def __init__(self, reads: Iterable[Read], decide: Callable[[int, Tensor], None] | None = None) -> None:
        """`decide` hears of each read that decides whether a part is called: which one, and whether it is left out."""
        super().__init__()
        self._left = iter(reads)
        self._decide = decide
        self.violated: list[Tensor] = []  # one bool for each check

    def _next(self, kind: str) -> Read:
        read = next(self._left, None)
        if read is None or read.kind != kind:
            raise BugError("capture-reads", "the trace reads different values than the run before it",
                           found=kind, expected=read.kind if read else "no more reads")  # fmt: skip
        return read

    def _of_fixed_size(self, func: Any, args: Any, count: int) -> Tensor:
        """nonzero, or indexing with a mask, where the number of chosen elements is as it was."""
        mask = selecting(func, args)
        assert mask is not None
        self.violated.append(mask.count_nonzero() != count)
        places = aten.nonzero_static(mask, size=count)
        if func is aten.nonzero.default:
            return places
        if func is aten.masked_select.default:
            return aten.index(args[0], places.unbind(1))
        indices = [part for i in args[1] for part in (places.unbind(1) if i is mask else (i,))]
        return aten.index(args[0], indices)

    def values(self) -> list[Tensor]:
        """One tensor with a number for each check, NaN where it is violated; nothing where there are none."""
        if not self.violated:
            return []
        return [torch.where(torch.stack(self.violated), float("nan"), 0.0)]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in READS:
            read = self._next(str(func))
            if read.check is not None:
                self.violated.append(args[0].reshape(()) != read.value)
            if read.chance is not None and self._decide is not None:
                self._decide(read.chance, args[0].reshape(()) != read.value)
            return read.value
        if has_dynamic_shape(func, args):
            read = self._next(str(func))
            return read.value if read.check is None else self._of_fixed_size(func, args, read.value)
        return func(*args, **(kwargs or {}))


# ---- checks in the user's source ----

_BETWEEN = ("/torch/overrides.py", "/torch/_tensor.py", "/torch/_compile.py", "/torch/_dynamo/eval_frame.py",
            "/torch/utils/_python_dispatch.py", "/torch/utils/_contextlib.py")  # fmt: skip


def reading_frame(start: FrameType) -> FrameType | None:
    """The Python code that read the value: the innermost that is neither ours nor torch's machinery."""
    frame: FrameType | None = start
    while frame is not None:
        name = frame.f_code.co_filename
        if "/tilework/" not in name and not name.endswith(_BETWEEN):
            return frame
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=64)
def _statements(path: str) -> list[ast.If | ast.Assert]:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.Assert))]


def check_of(frame: FrameType) -> Check | str | None:
    """What a branch on a value at this place is: a check that raises; "" if it only warns or logs; None if it does more."""
    line, found = frame.f_lineno, None
    for node in _statements(frame.f_code.co_filename):
        if node.test.lineno <= line <= (node.test.end_lineno or node.test.lineno):
            found = node
    if isinstance(found, ast.Assert):
        return Check(_where(frame), _text(found.msg, frame) or f"assert {ast.unparse(found.test)}")
    for body in (found.body, found.orelse) if isinstance(found, ast.If) else ():
        if body and isinstance(body[-1], ast.Raise):
            return Check(_where(frame), _text(_message(body[-1]), frame) or ast.unparse(body[-1]))
    if isinstance(found, ast.If) and not found.orelse and all(_only_says(s) for s in found.body):
        return ""
    return None


def _where(frame: FrameType) -> str:
    at = user_frame(frame) or (frame.f_code.co_filename, frame.f_lineno)
    return short(*at)


def _message(node: ast.Raise) -> ast.expr | None:
    return node.exc.args[0] if isinstance(node.exc, ast.Call) and node.exc.args else None


def _text(node: ast.expr | None, frame: FrameType) -> str:
    """The message as the program would put it together, without the tensors' values, which are other ones by then."""
    if node is None:
        return ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, frame) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, frame) + _text(node.right, frame)
    if isinstance(node, ast.FormattedValue):
        node = node.value
    try:
        value = eval(compile(ast.Expression(node), "<message>", "eval"), frame.f_globals, frame.f_locals)
    except Exception:
        return f"{{{ast.unparse(node)}}}"
    return "..." if isinstance(value, Tensor) else str(value)


def _only_says(statement: ast.stmt) -> bool:
    """warnings.warn(...), logger.warning(...) and the like."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    name = ast.unparse(statement.value.func)
    return name.split(".")[-1].startswith("warn") or name.split(".")[0] in ("logger", "logging", "log", "warnings")
