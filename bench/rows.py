"""The rows of the benchmark: which model, how large a batch, which optimizer. No framework is imported here.

    row_named("lenet-64")     a row of the table
    row_named("lenet-b16")    a point of the growth chart: LeNet at batch 16
    row_named("ffn-w256")     another: two hidden layers of width 256 at batch 8

All contenders of a row start from one file of weights and data (`data_file`), so that they do the same arithmetic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

CHECKED_STEPS = 5  # the losses of this many steps must agree before anything is timed
GROWTH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)  # LeNet
GROWTH_WIDTHS = (32, 64, 128, 256, 512, 1024, 2048)  # feed-forward net at batch 8


@dataclass(frozen=True)
class Optimizer:
    kind: str  # "sgd" or "adamw", with PyTorch's defaults for all that is not here
    lr: float
    momentum: float = 0.0


@dataclass(frozen=True)
class Row:
    name: str
    model: str  # a name in models.MODELS and models_jax.MODELS
    batch: int
    optimizer: Optimizer
    steps_per_call: int  # mini-batches in memory; Tilework and jax-scan run them in one call, the others in a Python loop
    sizes: dict[str, int] = field(default_factory=dict)  # what the model takes beside its defaults
    rtol: float = 1e-3  # of the losses of the first steps, beside eager; float32
    spatial: bool = False  # images: the peers are tried with channels first and with channels last
    large: bool = False  # seconds a slice: fewer rounds, and no unrolled loops

    @property
    def samples(self) -> int:
        return self.batch * self.steps_per_call


_SGD = Optimizer("sgd", 0.001)
_MOMENTUM = Optimizer("sgd", 0.001, momentum=0.9)

ROWS = {
    row.name: row
    for row in (
        Row("logreg-1", "logreg", 1, _SGD, 512),
        Row("ffn-1", "ffn", 1, _SGD, 64),
        Row("ffn-64", "ffn", 64, _SGD, 32),
        Row("lenet-1", "lenet", 1, _MOMENTUM, 64, spatial=True),
        Row("lenet-64", "lenet", 64, _MOMENTUM, 16, spatial=True),
        Row("unet-4", "unet", 4, _MOMENTUM, 5, rtol=2e-3, spatial=True, large=True),
        Row("lstm-32", "lstm", 32, _SGD, 5, large=True),
        Row("gpt-4", "gpt", 4, Optimizer("adamw", 1e-4), 5, rtol=2e-3, large=True),
    )
}


def row_named(name: str) -> Row:
    if name in ROWS:
        return ROWS[name]
    match = re.fullmatch(r"(lenet-b|ffn-w)(\d+)", name)
    if match is None:
        raise KeyError(f"no row {name!r}")
    size = int(match[2])
    if match[1] == "lenet-b":
        return Row(name, "lenet", size, _MOMENTUM, max(8, 64 // size), spatial=True)
    return Row(name, "ffn", 8, _SGD, 32 if size < 512 else 8, sizes={"hidden": size, "hidden2": size})


def data_file(out: Path, row: Row) -> Path:
    """x [samples, ...], y [samples, ...] and the initial weights as param/<name> and buffer/<name>, as .npz."""
    return out / "data" / f"{row.name}.npz"
