"""OrderedSet: a set that keeps its order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any


class OrderedSet(MutableSet[Any]):
    """By identity where a value has no usable equality (tensors)."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._values: dict[Any, Any] = {_key(v): v for v in values}

    def __contains__(self, value: object) -> bool:
        return _key(value) in self._values

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: Any) -> None:
        self._values.setdefault(_key(value), value)

    def discard(self, value: Any) -> None:
        self._values.pop(_key(value), None)

    def update(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def __repr__(self) -> str:
        return f"OrderedSet({list(self)!r})"


def _key(value: Any) -> Any:
    return id(value) if hasattr(value, "data_ptr") else value
