"""null: does no arithmetic. Inputs are taken, outputs are zero, nothing changes: for testing everything around a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...artifact.reader import Artifact
from . import Call


class Device:
    def __init__(self, artifact: Artifact, buffers: dict[str, torch.Tensor], num_threads: int | None) -> None:
        pass

    def bind(self, call: Call) -> _Bound:
        return _Bound()

    def seed(self, base: int, counter: int = 0, inferred: int = 0) -> None:
        self._random = (base, counter, inferred)

    def random_state(self) -> tuple[int, int, int]:
        return self._random

    def close(self) -> None:
        pass


class _Bound:
    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scheduled: Sequence[torch.Tensor] = ()
    ) -> None:
        for target in outputs:
            target.zero_()
