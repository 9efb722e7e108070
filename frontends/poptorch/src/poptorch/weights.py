"""The host's copy of the weights. After a training call it is old, and it is brought up to date once, when somebody reads it:
parameters and buffers of a wrapped model have classes that notice."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from .errors import StateError

_shared: Any = WeakIdKeyDictionary()  # model -> a weak reference to its Shared
_owners: Any = WeakIdKeyDictionary()  # tensor -> a weak reference to its Shared
_stale: weakref.WeakSet[Shared] = weakref.WeakSet()  # whose host copy is old
_wrapped: weakref.WeakSet[Shared] = weakref.WeakSet()
_KEY = "_poptorch_shared"  # in a wrapped model's dict: weights that were trained are not lost when their executor is dropped


class Shared:
    """What the executors of one model know of each other."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self.trainer: Any = None  # the training executor
        self.version = 0  # of the weights, as devices and host have seen them
        self.is_wrapped = False
        self.is_stale = False
        self._busy = False
        self.updated: frozenset[int] = frozenset()  # ids of the parameters that the training executor's optimizer updates

    def pull(self) -> None:
        """The host's copy is about to be read."""
        if self.is_stale and not self._busy and self.trainer is not None:
            self.trainer.copyWeightsToHost()

    def trained(self) -> None:
        self.version += 1
        if not alone():  # buffers may be another one's
            for other in owners(self._model(), self)[1:]:
                other.version += 1
        if not self.is_stale:
            self.is_stale = True
            _stale.add(self)

    def is_fresh(self) -> None:
        self.is_stale = False
        _stale.discard(self)

    # ---- classes ----

    def wrap(self) -> None:
        """Tensors that belong to another wrapped model stay that model's, unless only this one's optimizer updates them."""
        model = self._model()
        kind = type(model)
        if not isinstance(model, _Noticing):
            model.__class__ = _noticing_module(kind)
        for t in _tensors(model):
            if type(t) is nn.Parameter:
                t.__class__ = PoptorchParameter
            elif type(t) is Tensor:
                t.__class__ = PoptorchBuffer
            elif not self._claims(t):
                continue
            _owners[t] = weakref.ref(self)
        vars(model)[_KEY] = self
        self.is_wrapped = True
        _wrapped.add(self)

    def _claims(self, t: Tensor) -> bool:
        owner = _owners[t]() if t in _owners else None
        return id(t) in self.updated and (owner is None or id(t) not in owner.updated)

    def _model(self) -> nn.Module:
        model = self.model()
        assert model is not None
        return model

    def foreign(self, *, buffers: bool) -> set[int]:
        """ids of the model's tensors that another wrapped model trains: what this one's device has of them may be old. With
        buffers or without: every model that has them changes them."""
        tensors = _tensors(self._model()) if buffers else self._model().parameters()
        return {id(t) for t in tensors if (ref := _owners.get(t)) is not None and ref() not in (None, self)}

    def has(self, t: Tensor) -> bool:
        model = self.model()
        return model is not None and any(t is own for own in _tensors(model))

    def unwrap(self) -> None:
        model = self.model()
        if model is not None and self.is_wrapped:
            if isinstance(model, _Noticing):
                model.__class__ = type(model)._plain
            vars(model).pop(_KEY, None)
            for t in _tensors(model):
                if (owner := _owners.get(t)) is None or owner() is not self:
                    continue
                if type(t) is PoptorchParameter:
                    t.__class__ = nn.Parameter  # type: ignore[assignment]
                elif type(t) is PoptorchBuffer:
                    t.__class__ = Tensor  # type: ignore[assignment]
                _owners.pop(t, None)
        self.is_wrapped = False
        _wrapped.discard(self)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """The model as it was before it was wrapped: for the engine, which reads and writes it on purpose."""
        wrapped, before = self.is_wrapped, self._busy
        self._busy = True
        if wrapped:
            self.unwrap()
        try:
            yield
        finally:
            if wrapped:
                self.wrap()
            self._busy = before


def shared(model: nn.Module) -> Shared:
    found: Shared | None = _shared[model]() if model in _shared else None
    if found is None:
        found = Shared(model)
        _shared[model] = weakref.ref(found)
    return found


def alone() -> bool:
    """Whether one model is trained, at most: nobody else can have changed its tensors."""
    return len(_wrapped) <= 1


def owners(model: nn.Module, own: Shared) -> list[Shared]:
    """Whose tensors the model has: its own first, then those of wrapped models that it is a part of, or that are parts of it, or
    that have changed a part of it since the host's copy was new."""
    found = [own]
    tensors = _tensors(model)
    for t in tensors:
        owner = ref() if (ref := _owners.get(t)) is not None else None
        if owner is not None and all(owner is not known for known in found):
            found.append(owner)
    return found + [s for s in _stale if all(s is not known for known in found) and any(s.has(t) for t in tensors)]


def require_unwrapped(model: nn.Module) -> None:
    if shared(model).is_wrapped:
        raise StateError("poptorch-wrapped", "Model has already been wrapped in 'poptorch.trainingModel'. Call "
                                             "model.destroy() on the "
                         "model to unwrap before wrapping again.")  # fmt: skip


def _tensors(model: nn.Module) -> list[Tensor]:
    found = {id(t): t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
    return list(found.values())


def _read(args: Iterable[Any]) -> None:
    for leaf in tree_leaves(args):
        if isinstance(leaf, (PoptorchParameter, PoptorchBuffer)) and (owner := _owners.get(leaf)) is not None:
            known = owner()
            for stale in [s for s in _stale if s is known or s.has(leaf)]:
                stale.pull()


class PoptorchParameter(nn.Parameter):
    """A parameter of a wrapped model: reading it brings the host's copy up to date."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _stale:
            _read((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class PoptorchBuffer(Tensor):
    """A buffer of a wrapped model."""

    __torch_function__ = PoptorchParameter.__dict__["__torch_function__"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone(memory_format=torch.preserve_format)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


class _Noticing:
    """What the generated class of a wrapped model adds: copies and pickles are of the original class."""

    _plain: type

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new: Any = self._plain.__new__(self._plain)  # type: ignore[call-overload]
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(_own(self), memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made, (self._plain,), _own(self)


def _own(model: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(model).items() if k != _KEY}


def _made(kind: Any) -> Any:
    return kind.__new__(kind)


_classes: dict[type, type] = {}


def _noticing_module(kind: type) -> type:
    if kind not in _classes:
        _classes[kind] = type(f"Poptorch{kind.__name__}", (_Noticing, kind), {"_plain": kind, "__module__": kind.__module__})
    return _classes[kind]
