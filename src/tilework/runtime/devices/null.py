"""null: does no arithmetic. Inputs are taken, outputs are zero, nothing changes: for testing everything around a device."""

from __future__ import annotations

import torch

from ...artifact.reader import Artifact
from . import Call


class Device:
    def __init__(self, artifact: Artifact, buffers: dict[str, torch.Tensor], num_threads: int | None) -> None:
        self.buffers = buffers

    def seed(self, base: int) -> None:
        pass

    def run(self, call: Call) -> None:
        for _, target in call.outputs:
            target.zero_()

    def close(self) -> None:
        pass
