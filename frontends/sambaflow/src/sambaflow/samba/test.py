"""consistency_test: a decorator of the vendor's own tests. It runs the function as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def consistency_test(*args: Any, **_: Any) -> Any:
    if len(args) == 1 and callable(args[0]):
        return args[0]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    return decorate
