"""Tilework: compiled to an artifact that holds the fused step, loaded, and run with all steps of a pass in one native call.

Nothing is chosen or tried: there is one variant, and what Tilework decides for itself (layouts, threads) is its own business.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilework

from .contender import Contender, Variant
from .models import optimizer_for, read_data
from .rows import Row

# Sessions that can leave a step's outputs out of what they bring back are asked to: no other contender returns them either.
ONLY_LOSS: dict[str, Any] = {"outputs": "loss"} if "outputs" in inspect.signature(tilework.Session.run).parameters else {}


def compiled(row: Row, out: Path) -> tuple[tilework.Session, Tensor, Tensor]:
    """The row's step as an artifact below `out`, loaded; and all samples."""
    model, loss, x, y = read_data(row, out)
    step = tilework.Step(
        model=model,
        inputs=(x[: row.batch],),
        targets=(y[: row.batch],),
        loss=loss,
        optimizer=optimizer_for(row, model.parameters()),
    )
    path = out / "artifacts" / f"{row.name}.pef"
    path.parent.mkdir(parents=True, exist_ok=True)
    tilework.compile(step, path, options=tilework.Options(programs="fused"))
    return tilework.load(path, num_threads=torch.get_num_threads()), x, y


class TileworkContender(Contender):
    def variants(self, row: Row) -> list[Variant]:
        return [{"programs": "fused step"}]

    def make_ready(self, variant: Variant) -> None:
        self.session, self.x, self.y = compiled(self.row, self.out)
        self.initial = self.session.tensors()

    def reset(self) -> None:
        self.session.load_tensors(self.initial)

    def run_pass(self) -> Tensor:
        losses = self.session.run(self.x, self.y, num_steps=self.row.steps_per_call, **ONLY_LOSS).losses
        assert losses is not None
        return losses


def make(name: str, out: Path) -> Any:
    return TileworkContender(name, out)
