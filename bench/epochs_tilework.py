"""Tilework in the rows `epoch` and `call-item`: its loader around PyTorch's DataLoader, and run(x, y).loss.item()."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import tilework

from .contenders_tilework import ONLY_LOSS, compiled
from .epochs import ROW, EpochContender
from .rows import row_named

STEPS_PER_CALL = 512
HAS_LOADER = hasattr(tilework, "Loader") and hasattr(tilework.Session, "loop")


class TileworkEpoch(EpochContender):
    def __init__(self, kind: str, name: str, out: Path) -> None:
        super().__init__(kind, name)
        self.out = out
        self.whole = kind == "epoch"

    def variants(self) -> list[str]:
        if self.kind == "call":
            return ["session.run(x, y).loss.item()"]
        with_loader = f"Loader around DataLoader, {STEPS_PER_CALL} steps per call"
        return [with_loader if HAS_LOADER else "chunks of a permuted copy: no Loader yet"]

    def make_ready(self, number: int) -> None:
        self.session, _, _ = compiled(row_named(ROW), self.out)
        self.initial = self.session.tensors()
        self.samples_x, self.samples_y = torch.from_numpy(self.x), torch.from_numpy(self.y)

    def reset(self) -> None:
        self.session.load_tensors(self.initial)

    def run_epoch(self, samples: int) -> Any:
        if HAS_LOADER:
            torch_loader = DataLoader(TensorDataset(self.samples_x, self.samples_y), batch_size=1, shuffle=True)
            results = self.session.loop(tilework.Loader(torch_loader, num_steps=STEPS_PER_CALL), **ONLY_LOSS)
            return deque(results, maxlen=1)  # run to the end, keep the last
        result = None
        order = torch.randperm(len(self.samples_x))
        for pick in order.split(STEPS_PER_CALL):
            result = self.session.run(self.samples_x[pick], self.samples_y[pick], num_steps=len(pick), **ONLY_LOSS)
        return result

    def run_calls(self, samples: int) -> list[float]:
        run, x, y = self.session.run, self.samples_x, self.samples_y
        return [run(x[i : i + 1], y[i : i + 1]).loss.item() for i in range(samples)]


def make(kind: str, name: str, out: Path) -> Any:
    return TileworkEpoch(kind, name, out)
