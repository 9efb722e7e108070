"""Which values may share memory, read from the operators' own schemas."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch

from ..artifact import operators  # noqa: F401  (defines our own operators)
from ..artifact.graph import Node

# Without a mark in their schema, yet a backend may make them views of their first argument.
_MAY_SHARE = {"_unsafe_view", "clone", "_to_copy", "copy", "getitem"}


def operator_named(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, op, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload)


@functools.cache
def is_view(op: str) -> bool:
    """Whether a result of the operator is, or may be, a view of its first argument."""
    namespace, _, rest = op.partition(".")
    base, _, _ = rest.partition(".")
    if (base or namespace) in _MAY_SHARE:
        return True
    returns = operator_named(op)._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def shares_with(name: str, made: Mapping[str, Node]) -> frozenset[str]:
    """All names whose memory the value `name` may be: itself, and what it is a view of, down to a buffer."""
    found = [name]
    while found[-1] in made and is_view(made[found[-1]].op) and made[found[-1]].refs():
        found.append(made[found[-1]].refs()[0])
    return frozenset(found)
