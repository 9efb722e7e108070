"""Nested inputs and outputs as plain JSON: a structure with numbered leaves, so that no pickle is ever needed.

flatten((x, {"y": y, "z": None}))  ->  [x, y],  ["tuple", ["leaf"], ["dict", {"y": ["leaf"], "z": ["value", null]}]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..errors import UserError

Structure = list[Any]  # JSON


def flatten_outputs(value: Any) -> tuple[list[Any], Structure, list[str]]:
    """As flatten, for what a model returns: objects that an artifact cannot describe (a cache, say) are None and named."""
    dropped: list[str] = []
    leaves, structure = flatten(value, dropped=dropped)
    return leaves, structure, dropped


def flatten(
    value: Any,
    is_leaf: Callable[[Any], bool] = lambda v: isinstance(v, torch.Tensor),
    dropped: list[str] | None = None,
) -> tuple[list[Any], Structure]:
    """The leaves in order, and the structure around them. Mappings become dicts; named tuples become tuples. Objects of other
    types are an error; or None, and named in `dropped`, where that is given."""
    leaves: list[Any] = []

    def walk(v: Any, path: str) -> Structure:
        if is_leaf(v):
            leaves.append(v)
            return ["leaf"]
        if v is None or isinstance(v, (bool, int, float, str)):
            return ["value", v]
        if isinstance(v, Mapping):
            bad = [k for k in v if not isinstance(k, str)]
            if bad:
                raise UserError(
                    "structure-key",
                    f"a dictionary among the inputs or outputs has a key that is not a string, at {path or 'the top'}",
                    found=repr(bad[0]),
                    expected="string keys, which a JSON manifest can name",
                    fix="use strings, for example str(key)",
                )
            return ["dict", {k: walk(item, f"{path}.{k}") for k, item in v.items()}]
        if isinstance(v, (tuple, list)):
            kind = "list" if isinstance(v, list) else "tuple"
            return [kind, *(walk(item, f"{path}[{i}]") for i, item in enumerate(v))]
        if dropped is not None:
            dropped.append(f"{path.lstrip('.') or 'the output'} ({type(v).__name__})")
            return ["value", None]
        raise UserError(
            "structure-type",
            f"an input or output has a type that cannot be described in an artifact, at {path or 'the top'}",
            found=type(v).__name__,
            expected="tensors, numbers, strings, None, and tuples, lists and dicts of them",
            fix="take the object apart before the call, and put it together afterwards",
        )

    return leaves, walk(value, "")


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The inverse of flatten: takes the next leaf wherever the structure says so."""
    kind, *rest = structure
    if kind == "leaf":
        return next(leaves)
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return {k: unflatten(item, leaves) for k, item in rest[0].items()}
    items = [unflatten(item, leaves) for item in rest]
    return items if kind == "list" else tuple(items)


def names(structure: Structure, prefix: str) -> list[str]:
    """A readable name for every leaf: the dict keys and positions that lead to it, or the prefix alone."""
    found: list[str] = []

    def walk(s: Structure, path: str) -> None:
        kind, *rest = s
        if kind == "leaf":
            found.append(path or prefix)
        elif kind == "dict":
            for k, item in rest[0].items():
                walk(item, f"{path}.{k}" if path else k)
        elif kind in ("tuple", "list"):
            for i, item in enumerate(rest):
                walk(item, f"{path}.{i}" if path else f"{prefix}{i}")

    walk(structure, "")
    return found


def check(structure: Any) -> None:
    """ValueError unless this is a well-formed structure: what a reader does with a manifest from outside."""
    if not isinstance(structure, list) or not structure:
        raise ValueError("a structure is a list that starts with its kind")
    kind, *rest = structure
    if kind == "leaf" and not rest:
        return
    if kind == "value" and len(rest) == 1 and (rest[0] is None or isinstance(rest[0], (bool, int, float, str))):
        return
    if kind == "dict" and len(rest) == 1 and isinstance(rest[0], dict):
        for item in rest[0].values():
            check(item)
        return
    if kind in ("tuple", "list"):
        for item in rest:
            check(item)
        return
    raise ValueError(f"no such structure: {kind!r} with {len(rest)} parts")
