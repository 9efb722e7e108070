"""PyTorch in the rows `epoch` and `call-item`: the step that is fastest in the row logreg-1, around it PyTorch's own tools."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from .contenders_torch import TorchContender
from .epochs import ROW, EpochContender


class TorchEpoch(EpochContender):
    def __init__(self, kind: str, name: str, out: Path) -> None:
        super().__init__(kind, name)
        self.inner = TorchContender("eager" if name == "eager-arrays" else name, out)

    def variants(self) -> list[str]:
        around = "slices of tensors, .item() each step"
        if self.kind == "epoch":
            around = "arrays in memory, index by randperm" if self.name == "eager-arrays" else "DataLoader, shuffle=True"
        return [f"{step}; {around}" for step in self.inner.start(ROW)]

    def make_ready(self, number: int) -> None:
        self.inner.build(number)
        self.samples_x, self.samples_y = torch.from_numpy(self.x), torch.from_numpy(self.y)

    def reset(self) -> None:
        self.inner.reset()

    def run_epoch(self, samples: int) -> Any:
        step, x, y, loss = self.inner.step, self.samples_x, self.samples_y, None
        if self.name == "eager-arrays":
            for i in torch.randperm(len(x))[:samples].tolist():
                loss = step(x[i : i + 1], y[i : i + 1])
            return loss
        loader = DataLoader(TensorDataset(x, y), batch_size=1, shuffle=True)  # no workers: the data is in memory
        for a, b in islice(loader, samples):
            loss = step(a, b)
        return loss

    def run_calls(self, samples: int) -> list[float]:
        step, x, y = self.inner.step, self.samples_x, self.samples_y
        return [step(x[i : i + 1], y[i : i + 1]).item() for i in range(samples)]


def make(kind: str, name: str, out: Path) -> Any:
    return TorchEpoch(kind, name, out)
