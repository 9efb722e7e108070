"""Blocks: parts of a model that belong together. Numerically they are nothing; strategies check and show them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from .errors import Error, StateError
from .losses import watching

_HOOK = "_poptorch_block"


def _began(name: str | None, ipu: int | None) -> None:
    now = watching()
    if now is not None and now.observer is not None:
        now.observer.begin(name, ipu)


class Block:
    """`with poptorch.Block("name", ipu_id=0): ...` in forward."""

    _auto = False

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        _check(user_id, ipu_id)
        self.user_id, self.ipu_id = user_id, ipu_id

    def __enter__(self) -> Block:
        _began(self.user_id, self.ipu_id)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @staticmethod
    def useAutoId() -> None:
        """Blocks without a name are numbered; they always are."""

    @staticmethod
    def start(user_id: str | None = None, ipu_id: int | None = None) -> None:
        """Everything from here on belongs to this block."""
        _began(user_id, ipu_id)


def _check(user_id: Any, ipu_id: Any) -> None:
    if user_id is not None and not isinstance(user_id, str):
        raise Error("poptorch-block", "a block's name is a text", found=repr(user_id))
    if ipu_id is not None and (not isinstance(ipu_id, int) or isinstance(ipu_id, bool) or ipu_id < 0):
        raise Error("poptorch-block", "a block's device is a whole number", found=repr(ipu_id))


def BeginBlock(layer_to_call: Any, user_id: str | None = None, ipu_id: int | None = None) -> Any:
    """Everything from this layer on belongs to the block, until the next one begins. Returns the same layer."""
    _check(user_id, ipu_id)
    if not isinstance(layer_to_call, nn.Module):
        if not callable(layer_to_call):
            raise Error("poptorch-block", "BeginBlock takes a module or a function", found=type(layer_to_call).__name__)
        return BlockFunction(user_id, ipu_id)(layer_to_call)
    if _HOOK in vars(layer_to_call):
        raise StateError("poptorch-block", "BeginBlock has already been called on this layer", found=type(layer_to_call).__name__,
                         fix="poptorch.removeBlocks(model) takes blocks away")  # fmt: skip
    handle = layer_to_call.register_forward_pre_hook(functools.partial(_hook, user_id, ipu_id))
    vars(layer_to_call)[_HOOK] = handle
    vars(layer_to_call)["extra_repr"] = functools.partial(_shown, layer_to_call, user_id, ipu_id)
    return layer_to_call


def _hook(user_id: str | None, ipu_id: int | None, module: nn.Module, args: Any) -> None:
    _began(user_id, ipu_id)


def _shown(layer: nn.Module, user_id: str | None, ipu_id: int | None) -> str:
    own = type(layer).extra_repr(layer)
    return f"BeginBlock(user_id={user_id}, ipu_id={ipu_id})" + (f", {own}" if own else "")


def BlockFunction(user_id: str | None = None, ipu_id: int | None = None) -> Callable[..., Any]:
    """A decorator: the function's body is the block."""
    _check(user_id, ipu_id)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def in_block(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return function(*args, **kwargs)

        return in_block

    return decorate


def removeBlocks(module: nn.Module) -> None:
    """Takes every block of the model away."""
    for m in module.modules():
        handle = vars(m).pop(_HOOK, None)
        if handle is not None:
            handle.remove()
            vars(m).pop("extra_repr", None)
