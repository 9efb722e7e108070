"""Hyperparameters as the caller gives them: numbers, or schedules with a value for each step, by full or by bare names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artifact.manifest import Manifest
from ..errors import UserError, did_you_mean


def resolve(manifest: Manifest, values: Mapping[str, Any], num_steps: int | None) -> dict[str, Any]:
    """Values by full name, checked: numbers, or for schedules (where `num_steps` is given) a value for each step."""
    wrong, found = [], {}
    for name, value in values.items():
        if num_steps is not None:
            try:
                value = _dense(value)
            except (TypeError, ValueError, RuntimeError):
                wrong.append(f"{name}: found {value!r:.80}, expected numbers")
                continue
            if len(value) != num_steps:
                wrong.append(f"{name}: found {len(value)} values, expected one for each of {num_steps} steps")
                continue
        elif not isinstance(value, (int, float)) or isinstance(value, bool):
            wrong.append(f"{name}: found {value!r}, expected a number")
            continue
        known = [k for k in manifest.hyperparameters if k == name or _bare(k) == name]
        if not known:
            wrong.append(f"{name}: {did_you_mean(name, {*manifest.hyperparameters, *map(_bare, manifest.hyperparameters)})}")
        for full in known:
            found[full] = float(value) if num_steps is None else value
    if wrong:
        hint = "compile with keep_momentum=True to leave room for it" if "momentum" in values else ""
        raise UserError("hyper-unknown", "these hyperparameters cannot be set:\n    " + "\n    ".join(wrong), fix=hint)
    return found


def _dense(schedule: Any) -> Tensor:
    """One number after the other in memory: the driver takes them by address. Columns and reversed arrays are copied."""
    if isinstance(schedule, np.ndarray):
        schedule = np.ascontiguousarray(schedule)  # torch takes no negative strides
    return torch.as_tensor(schedule, dtype=torch.float64, device="cpu").detach().resolve_neg().reshape(-1).contiguous()


def _bare(full: str) -> str:
    """opt0.g1.lr -> lr, encoder.drop.p#1 -> p"""
    return full.split("#")[0].rsplit(".", 1)[-1]


def part_of(name: str, value: Any, start: int, count: int) -> Any:
    """The part of a schedule for steps start to start + count; numbers as they are."""
    if not hasattr(value, "__len__"):
        return value
    part = value[start : start + count]
    if len(part) < count:
        raise UserError("hyper-unknown", f"the schedule of {name} is shorter than the data",
                        found=f"{len(value)} values", expected=f"one for each step, {start + count} by now")  # fmt: skip
    return part
