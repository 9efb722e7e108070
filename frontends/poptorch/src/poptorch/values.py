"""A group of options: values with defaults, readable as attributes, checked by type, and frozen once somebody uses them."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import Any, ClassVar

from tilework.errors import did_you_mean

from .errors import ArgumentError, Error, FrozenError


class UnknownOption(Error, AssertionError, AttributeError):
    """Programs and tests match on either."""


class Values:
    """Setters return self. `_defaults` is what the values are in a new one."""

    _defaults: ClassVar[dict[str, Any]] = {}
    _title = "Options"

    def __init__(self) -> None:
        vars(self).update(_values=copy.deepcopy(self._defaults), _is_frozen=False, _given=set())

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownOption("poptorch-options", f"Invalid option: {self._title} has no option {name!r}",
                            expected=did_you_mean(name, [*values, *self._setters()]))  # fmt: skip

    def _setters(self) -> list[str]:
        return [n for n in dir(type(self)) if not n.startswith("_") and callable(getattr(type(self), n))]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") and name not in self._values:
            vars(self)[name] = value
            return
        self._set(name, value)

    def _set(self, name: str, value: Any, *, any_type: bool = False) -> Values:
        self._check_frozen()
        if name not in self._values:
            raise UnknownOption("poptorch-options", f"Invalid option: {self._title} has no option {name!r}",
                                expected=did_you_mean(name, self._values))  # fmt: skip
        default = self._defaults[name]
        if not any_type and default is not None and not _same_kind(value, default):
            raise ArgumentError("poptorch-options", f"Unexpected type {type(value).__name__} for option {name!r}",
                                found=repr(value), expected=type(default).__name__)  # fmt: skip
        self._values[name] = value
        self._given.add(name)
        return self

    def _check_frozen(self) -> None:
        if self._is_frozen:
            raise FrozenError("poptorch-frozen", "Can't modify frozen Options", fix="change a clone: options.clone()")

    def exists(self, name: str) -> bool:
        return name in self._values

    def deleteIfExists(self, name: str) -> bool:
        self._check_frozen()
        return self._values.pop(name, None) is not None

    def toDict(self) -> dict[str, Any]:
        """Every value, plain enough for JSON."""
        return {k: _plain(v) for k, v in self._values.items()}

    def _freeze(self) -> None:
        vars(self)["_is_frozen"] = True

    def __repr__(self) -> str:
        inside = ", ".join(f"{k}={v!r}" for k, v in sorted(self._values.items()))
        return f"{self._title}({inside})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Never frozen."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        vars(new).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items()}, _is_frozen=False)
        return new

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _same_kind(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, enum.Enum):
        return isinstance(value, type(default))
    return isinstance(value, type(default)) or (isinstance(default, float) and isinstance(value, int))


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Values):
        return value.toDict()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def recorded(name: str, doc: str) -> Callable[[Any, Any], Any]:
    """A setter for what has no effect here: the value is checked, kept and shown."""

    def setter(self: Any, value: Any) -> Any:
        return self._set(name, value)

    setter.__doc__ = f"{doc} Recorded; it has no effect here."
    return setter


def switch(name: str, doc: str, effect: str = "Recorded; it has no effect here.") -> Callable[..., Any]:
    """The same for what is turned on by default when the setter is called."""

    def setter(self: Any, enabled: bool = True) -> Any:
        return self._set(name, enabled)

    setter.__doc__ = f"{doc} {effect}"
    return setter


def positive(name: str, value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError("poptorch-options", f"{what} must be greater than 0", found=f"{name}({value!r})",
                            expected="a whole number, 1 or more")  # fmt: skip
    return value
