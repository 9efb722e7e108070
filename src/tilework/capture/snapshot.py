"""What a model holds in Python: attributes, containers, hooks, objects, closures, globals. Taken before the model runs, put back
afterwards; two of them show what a run of the model has changed.

Tensors are held as objects here. Their values are looked after where they are written (watch.py)."""

from __future__ import annotations

import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (int, float, str, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_OPAQUE = (
    Tensor,
    torch.Generator,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_MANY = 10_000  # longer containers, and larger arrays, are looked at as a whole and not item by item


@dataclass(frozen=True)
class Change:
    """Something that differs between two snapshots. `module` and `name`: the attribute of the user's module that leads there."""

    path: str
    module: nn.Module | None
    name: str
    before: Any = None
    after: Any = None


@dataclass
class _Held:
    path: str
    module: nn.Module | None
    name: str  # attribute of that module
    thing: Any
    contents: Any
    put_back: Callable[[Any, Any], None]


class Snapshot:
    def __init__(self, roots: Iterable[tuple[str, nn.Module]]) -> None:
        self._held: dict[int, _Held] = {}
        for prefix, root in roots:
            for name, module in root.named_modules(prefix=prefix.rstrip(".")):
                self._module(name, module)

    # ---- taking ----

    def _module(self, path: str, module: nn.Module) -> None:
        if id(module) in self._held:
            return
        self._hold(path, module, "", module.__dict__, dict(module.__dict__), _put_dict)
        for name, value in list(module.__dict__.items()):
            if name != "_modules":
                self._walk(f"{path}.{name}" if path else name, module, name, value)
        for cls in type(module).__mro__:
            if not cls.__module__.startswith(("torch.", "builtins", "abc", "typing")):
                self._class(cls, module)

    def _class(self, cls: type, module: nn.Module) -> None:
        own = {k: v for k, v in vars(cls).items() if not k.startswith("__")}
        self._hold(cls.__name__, module, "", cls, own, _put_class)
        for name, value in own.items():
            self._walk(f"{cls.__name__}.{name}", module, name, value)
            if isinstance(value, types.FunctionType):
                here = value.__globals__
                self._hold(value.__module__, module, "", here, {k: v for k, v in here.items() if type(v) in _PLAIN}, _put_some)
                for key, item in list(here.items()):
                    if isinstance(item, (list, dict, set, deque, np.ndarray)) and not key.startswith("__"):
                        self._walk(f"{value.__module__}.{key}", module, key, item, deep=False)

    def _hold(
        self, path: str, module: nn.Module | None, name: str, thing: Any, contents: Any, put_back: Callable[[Any, Any], None]
    ) -> bool:
        if id(thing) in self._held:
            return False
        self._held[id(thing)] = _Held(path, module, name, thing, contents, put_back)
        return True

    def _walk(self, path: str, module: nn.Module, name: str, value: Any, deep: bool = True) -> None:
        todo: list[tuple[str, Any]] = [(path, value)]
        while todo:
            path, value = todo.pop()
            inside: Iterable[tuple[str, Any]] = ()
            if isinstance(value, (*_PLAIN, *_OPAQUE)):
                continue
            if isinstance(value, nn.Module):
                for own, child in value.named_modules():
                    self._module(f"{path}.{own}" if own else path, child)
            elif isinstance(value, dict):
                contents = _entries(value)
                if self._hold(path, module, name, value, contents, _put_dict):
                    inside = ((f"{path}[{k!r}]", v) for k, v in contents.items())
            elif isinstance(value, (list, deque)):
                if self._hold(path, module, name, value, list(value), _put_list):
                    inside = ((f"{path}[{i}]", v) for i, v in enumerate(value))
            elif isinstance(value, set):
                self._hold(path, module, name, value, set(value), _put_set)
            elif isinstance(value, tuple):
                inside = ((f"{path}[{i}]", v) for i, v in enumerate(value))
            elif isinstance(value, np.ndarray):
                if value.size <= _MANY:
                    self._hold(path, module, name, value, value.copy(), np.copyto)
            elif isinstance(value, random.Random):
                self._hold(path, module, name, value, value.getstate(), random.Random.setstate)
            elif isinstance(value, (np.random.Generator, np.random.RandomState)):
                bits = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
                self._hold(path, module, name, bits, bits.state, _put_state)
            elif isinstance(value, types.MethodType):
                inside = [(path, value.__self__), (path, value.__func__)]
            elif isinstance(value, types.FunctionType):
                if self._hold(path, module, name, value, dict(value.__dict__), _put_function):
                    inside = [
                        (f"{path}.{k}", c) for k, c in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                    ]
            elif isinstance(value, types.CellType):
                contents = _contents(value)
                if self._hold(path, module, name, value, contents, _put_cell):
                    inside = [(path, contents)]
            elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):  # an object
                own = value.__dict__
                if self._hold(path, module, name, own, dict(own), _put_dict):
                    inside = ((f"{path}.{k}", v) for k, v in own.items())
            if deep and not (isinstance(value, (dict, list, tuple, deque)) and len(value) > _MANY):
                todo += inside

    # ---- what changed, and putting it back ----

    def changed_since(self, earlier: Snapshot) -> list[Change]:
        """What differs from the earlier snapshot, in things that both have seen."""
        found = []
        for key, now in self._held.items():
            before = earlier._held.get(key)
            if before is None or before.thing is not now.thing or _same(before.contents, now.contents):
                continue
            if not isinstance(now.contents, dict):
                found.append(Change(now.path, now.module, now.name))
                continue
            for k in {*before.contents, *now.contents}:
                if not _same(before.contents.get(k, _ABSENT), now.contents.get(k, _ABSENT)) and not _is_reassigned(now, k):
                    name = now.name or str(k)
                    path = f"{now.path}.{k}" if now.path else str(k)
                    found.append(Change(path, now.module, name, before.contents.get(k), now.contents.get(k)))
        return found

    def restore(self) -> None:
        for held in self._held.values():
            held.put_back(held.thing, held.contents)


_ABSENT = object()


def _is_reassigned(held: _Held, key: Any) -> bool:
    """A registered buffer in whose place forward puts another tensor: capture knows about those."""
    return held.name == "_buffers" or (held.name == "" and key == "_buffers")


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor) or type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    try:
        return bool(a == b)
    except Exception:  # a user's type with its own idea of equality
        return False


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _ABSENT


def _as_it_was(now: Iterable[Any], before: Iterable[Any]) -> bool:
    """The very same objects in the same order: nothing to put back."""
    return [id(v) for v in now] == [id(v) for v in before]


def _plain(thing: dict) -> type[dict]:
    """Whose methods are used on it: not a subclass's own, which may do anything."""
    return OrderedDict if isinstance(thing, OrderedDict) else dict


def _entries(thing: dict) -> dict:
    return {k: dict.__getitem__(thing, k) for k in _plain(thing).__iter__(thing)}


def _put_dict(thing: dict, contents: dict) -> None:
    now, own = _entries(thing), _plain(thing)
    if not (_as_it_was(now, contents) and _as_it_was(now.values(), contents.values())):
        own.clear(thing)
        for k, v in contents.items():
            own.__setitem__(thing, k, v)


def _put_some(thing: dict, contents: dict) -> None:
    for k, v in contents.items():
        if thing.get(k, _ABSENT) is not v:
            thing[k] = v


def _put_class(thing: type, contents: dict) -> None:
    for k in [k for k in vars(thing) if not k.startswith("__") and k not in contents]:
        delattr(thing, k)
    for k, v in contents.items():
        if vars(thing).get(k, _ABSENT) is not v:
            setattr(thing, k, v)


def _put_list(thing: Any, contents: list) -> None:
    if not _as_it_was(thing, contents):
        thing.clear()
        thing.extend(contents)


def _put_set(thing: set, contents: set) -> None:
    if thing != contents:
        thing.clear()
        thing.update(contents)


def _put_state(thing: Any, contents: Any) -> None:
    thing.state = contents


def _put_function(thing: types.FunctionType, contents: dict) -> None:
    _put_dict(thing.__dict__, contents)


def _put_cell(thing: types.CellType, contents: Any) -> None:
    if contents is not _ABSENT and _contents(thing) is not contents:
        thing.cell_contents = contents
