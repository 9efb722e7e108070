"""What a call returns: plain tensors, except that backward() says that the device has done that already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import Error


class Returned(Tensor):
    """Everything that is computed from one, copied or saved is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        raise Error("poptorch-backward", "backward() was called on an output of a PopTorch model: the call has already made "
                                         "the backward "
                    "pass and the update", fix="remove loss.backward() and optimizer.step()")  # fmt: skip

    def _as_plain(self) -> Tensor:
        return self.as_subclass(Tensor)  # type: ignore[arg-type]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return self._as_plain().__repr__(**kwargs)

    def __format__(self, spec: str) -> str:
        return self._as_plain().__format__(spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._as_plain().clone()
        return memo[id(self)]


def returned(t: Tensor) -> Tensor:
    return t.as_subclass(Returned)  # type: ignore[arg-type]
