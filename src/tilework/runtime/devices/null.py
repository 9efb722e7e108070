"""null: does no arithmetic. Inputs are taken, outputs are zero, nothing changes: for testing everything around a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...artifact.fingerprint import Part
from ...artifact.reader import Artifact
from ...tiles.page import Slot
from . import Call, Needs
from .host import HostMemory


class Device:
    replays, computes = True, False

    def __init__(self, artifact: Artifact, num_threads: int | None) -> None:
        self.memory = HostMemory(artifact)

    @staticmethod
    def fits(needs: Needs) -> list[Part]:
        return []

    def meter(self, page: Slot) -> bool:
        return False

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
