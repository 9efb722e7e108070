"""Sources by what a user types, as records of the types that a step takes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError, did_you_mean
from . import formats, kept
from .kept import Report
from .source import Arrays, BadRecord, Record, Source

Wanted = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]  # of each input and target: name, type, shape without the batch
FORMS = {
    "digits": "digits, or digits:FOLDER with the MNIST files",
    "synthetic": "synthetic:MODEL:SIZE:ROWS, such as synthetic:unet:tiny:512",
    "idx": "idx:FILE,FILE",
    "npy": "npy:FILE,FILE",
    "hdf5": "hdf5:FILE:NAME,NAME",
    "csv": "csv:FILE:TARGET,TARGET",
    "images": "images:FOLDER:SIZE",
    "tokens": "tokens:FILE:LENGTH, or tokens:FILE:LENGTH:same",
}


def source_of(
    text: str, wanted: Wanted, *, in_memory: bool = False, cache: Path | None = None, report: Report = lambda _: None
) -> Source:
    """The source that `text` names, checked against what the step takes."""
    kind, _, rest = text.partition(":")
    if kind == "random":
        raise UserError("data-option", "random data have no records, so that a run could not be continued with them",
                        expected=", ".join(FORMS), fix="name the data: --data (docs/runs.md)")  # fmt: skip
    if kind not in FORMS:
        raise UserError("data-option", f"data {text!r}", expected=did_you_mean(kind, FORMS))
    parts = rest.split(":") if rest else []
    try:
        source = _MAKE[kind](parts)
    except (IndexError, ValueError) as e:
        raise UserError("data-option", f"data {text!r}", expected=FORMS[kind]) from e
    return fitted(source, wanted, text, in_memory=in_memory, cache=cache, report=report)


def fitted(
    source: Source,
    wanted: Wanted,
    what: str = "the data",
    *,
    in_memory: bool = False,
    cache: Path | None = None,
    report: Report = lambda _: None,
) -> Source:
    """The source, with records of the types and shapes that the step takes. Bytes of idx files become numbers in [0, 1].
    `cache`: a folder in which they are kept like that; in_memory: they are read once, now."""
    if not len(source):
        raise UserError("data-empty", f"{what} has no records", expected="at least a batch")
    as_taken = Fitted(source, wanted, what)
    _tell_of_bytes(as_taken, report)
    found: Source = as_taken
    if cache is not None:
        found = kept.on_disk(found, cache, what, wanted, report)
    return kept.in_memory(found) if in_memory else found


class Fitted:
    def __init__(self, source: Source, wanted: Wanted, what: str) -> None:
        self.source, self.wanted, self.what = source, wanted, what
        self.pictures = bool(getattr(source, "pictures", False))

    def __len__(self) -> int:
        return len(self.source)

    def place(self, number: int) -> str:
        return self.source.place(number)

    def rows(self, numbers: np.ndarray) -> Record:
        found = self.source.rows(numbers)
        shapes = [tuple(t.shape[1:]) for t in found]
        fits = len(found) == len(self.wanted) and all(_fits(s, w[2]) for s, w in zip(shapes, self.wanted, strict=True))
        if not fits:
            raise UserError("data-shape", f"{self.what}: the records are not what this step takes",
                            found=", ".join(str(list(s)) for s in shapes),
                            expected=", ".join(f"{n} {list(s)}" for n, _, s in self.wanted))  # fmt: skip
        return tuple(self._as(t, numbers, *w) for t, w in zip(found, self.wanted, strict=True))

    def _as(self, tensor: Tensor, numbers: np.ndarray, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Of the type that the step takes. What is no whole number is not cut to one."""
        if self.pictures and tensor.dtype == torch.uint8 and tensor.ndim > 2 and dtype.is_floating_point:
            return (tensor.to(dtype) / 255).reshape(len(numbers), *shape)
        made = tensor.to(dtype)
        if tensor.dtype != dtype and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
            changed = torch.nonzero(made.to(tensor.dtype) != tensor)
            if len(changed):
                at = changed[0].tolist()
                kind = str(dtype).removeprefix("torch.")
                number = int(numbers[at[0]])
                raise BadRecord(number, self.place(number), f"{name} has {tensor[tuple(at)].item()}, which is no {kind}")
        return made.reshape(len(numbers), *shape)


def _tell_of_bytes(fitted: Fitted, report: Report) -> None:
    try:
        found = fitted.source.rows(np.array([0]))
    except BadRecord:  # whoever trains with it will hear of it
        return
    names = [n for t, (n, dtype, _) in zip(found, fitted.wanted, strict=False)
             if t.dtype == torch.uint8 and dtype.is_floating_point and not fitted.pictures]  # fmt: skip
    if names:
        report(f"{fitted.what}: {', '.join(names)}: bytes are taken as they are, as numbers from 0 to 255")


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """The same but for dimensions of 1, or the same numbers in one row."""
    own, theirs = [n for n in shape if n != 1], [n for n in wanted if n != 1]
    return own == theirs or (math.prod(own) == math.prod(theirs) and min(len(own), len(theirs)) == 1)


def _same(parts: list[str]) -> bool:
    if parts not in ([], ["same"]):
        raise ValueError(parts)
    return bool(parts)


def _digits(parts: list[str]) -> Source:
    from ..zoo import digits

    return Arrays(digits.load("train", parts[0] if parts else None), ["digits"])


def _synthetic(parts: list[str]) -> Source:
    from ..artifact.structure import flatten
    from ..zoo.common import MODELS, chosen

    model, size, rows = parts[0], parts[1], int(parts[2])
    if model not in MODELS:
        raise UserError("data-option", f"synthetic data of {model!r}", expected=did_you_mean(model, MODELS))
    zoo: Any = importlib.import_module(f"tilework.zoo.{model}")
    return Arrays(flatten(zoo.synthetic(chosen(zoo.SIZES, size, {}), rows, seed=1))[0], [f"synthetic {model}"])


_MAKE: dict[str, Callable[[list[str]], Source]] = {
    "digits": _digits,
    "synthetic": _synthetic,
    "idx": lambda p: formats.idx(p[0].split(",")),
    "npy": lambda p: formats.npy(p[0].split(",")),
    "hdf5": lambda p: formats.Hdf5(p[0], p[1].split(",")),
    "csv": lambda p: formats.csv(p[0], p[1].split(",")),
    "images": lambda p: formats.pictures(str(Path(p[0])), int(p[1])),
    "tokens": lambda p: formats.tokens(p[0], int(p[1]), same=_same(p[2:])),
}
