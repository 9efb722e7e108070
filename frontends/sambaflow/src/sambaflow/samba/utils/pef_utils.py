"""What a PEF knows about itself: metadata that apps put in when compiling and read back when running."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilework

from ..compiling import METADATA, _jsonable


@dataclass
class PefInfoStruct:
    """A key that is wanted from a PEF; mock_value is what a run without a device would use."""

    mock_value: Any = None


def get_pefmeta(args: argparse.Namespace, model: Any = None) -> dict[str, Any]:
    return get_pefmeta_dict(vars(args), model)


def get_pefmeta_dict(args: Mapping[str, Any], model: Any = None) -> dict[str, Any]:
    found: dict[str, Any] = _jsonable(dict(args))
    if model is not None:
        found["model"] = type(model).__name__
    return found


def get_pef_info(pef_path: str, wanted: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values of the keys from the PEF's metadata, or all of it. ValueError for a key that it has not."""
    notes = tilework.read_artifact(pef_path).manifest.metadata.get(METADATA, {})
    known = {**notes.get("args", {}), **notes.get("metadata", {})}
    if wanted is None:
        return known
    missing = [k for k in wanted if k not in known]
    if missing:
        raise ValueError(f"{pef_path}: no {missing[0]!r} in its metadata; it has: {', '.join(sorted(known))}")
    return {k: known[k] for k in wanted}
