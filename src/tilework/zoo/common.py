"""What the models of the zoo share: sizes by name, and a check of what was asked for.

Each model is one file with

Config      what can be chosen, a frozen dataclass
SIZES       "tiny" (seconds on a laptop, for tests), "small" (minutes on a laptop), "full" (as published, or as on the systems
            whose users train it)
build(size, batch_size, ...)        the training step:  tilework compile tilework.zoo.unet:build --set size=small
synthetic(config, rows, seed)       data with something to learn: the step's inputs and then its targets, `rows` of each
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..errors import UserError, did_you_mean

MODELS = ("bert", "braggnn", "cosmic", "dcrnn", "fno", "gpt", "llama", "phase", "resnet", "uno", "unet", "vit")
C = TypeVar("C")
M = TypeVar("M", bound=nn.Module)


def chosen(sizes: Mapping[str, C], size: str, changes: Mapping[str, Any]) -> C:
    """The configuration of this size, with the fields in `changes` that are not None replaced."""
    if size not in sizes:
        raise UserError("zoo-size", f"no size {size!r} of this model", expected=did_you_mean(size, sizes))
    config = sizes[size]
    known = [f.name for f in fields(config)]  # type: ignore[arg-type]
    unknown = next((name for name in changes if name not in known), None)
    if unknown is not None:
        raise UserError("zoo-field", f"this model has no setting {unknown!r}", expected=did_you_mean(unknown, known))
    given = {k: v for k, v in changes.items() if v is not None}
    return replace(config, **given)  # type: ignore[type-var]


def fitting(make: Callable[[], M]) -> M:
    """The model; on the meta device, without weights, where they would take most of this machine's memory. So its plan can be
    printed anywhere, and it can be compiled without weights."""
    with torch.device("meta"):
        empty = make()
    size = sum(p.nbytes for p in empty.parameters())
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return empty if size > room // 2 else make()


def examples(size: str) -> Literal["data", "shapes"]:
    """Nobody runs a large model on all rows of a large batch to compile it."""
    return "data" if size in ("tiny", "small") else "shapes"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
