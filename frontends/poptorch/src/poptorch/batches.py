"""Dimension 0 of what a call takes and returns: [device iterations][accumulation][replicas][rows]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .enums import OutputMode
from .errors import ArgumentError
from .options import Options


class Batches:
    """D, G and R of an executor."""

    def __init__(self, options: Options, *, training: bool) -> None:
        self.iterations: int = options.device_iterations
        self.accumulation: int = options.Training.gradient_accumulation if training else 1
        self.replicas: int = options.replication_factor
        mode = options.output_mode
        if mode == OutputMode.Default:
            mode = OutputMode.Final if training else OutputMode.All
        self.mode: OutputMode = mode
        self.period: int = options.output_return_period
        self.count = self.iterations * self.accumulation  # micro-batches of one replica
        if mode == OutputMode.EveryN and self.count % self.period:
            raise ArgumentError("poptorch-options", "EveryN: the period must divide the number of micro-batches of a call",
                                found=f"period {self.period}, {self.count} micro-batches")  # fmt: skip

    @property
    def blocks(self) -> int:
        return self.count * self.replicas

    def check(self, tensors: Sequence[Tensor]) -> None:
        for i, t in enumerate(tensors):
            if t.dim() and (t.shape[0] % self.blocks or not t.shape[0]):
                raise ArgumentError(
                    "poptorch-batch", f"Invalid batch dimension: input {i} has {t.shape[0]} rows, which is not a multiple of "
                    f"{self.blocks} (deviceIterations {self.iterations} * gradientAccumulation {self.accumulation} * "
                    f"replicationFactor "
                    f"{self.replicas})", fix="the batch of a call has all micro-batches of all iterations and replicas"
                )  # fmt: skip

    def micro(self, t: Tensor) -> Tensor:
        """The first micro-batch."""
        return t.detach() if t.dim() == 0 else t.detach()[: t.shape[0] // self.blocks]

    def share(self, t: Tensor, replica: int) -> Tensor:
        """What one replica gets of a call's batch."""
        if t.dim() == 0 or self.replicas == 1:
            return t
        parts = t.reshape(self.count, self.replicas, t.shape[0] // self.blocks, *t.shape[1:])
        return parts[:, replica].reshape(-1, *t.shape[1:])

    def together(self, shares: Sequence[Tensor]) -> Tensor:
        """[micro-batches of a replica, ...] of each, as one batch."""
        return shares[0] if len(shares) == 1 else torch.stack(list(shares), 1).flatten(0, 1)

    # ---- outputs ----

    def asked(self, dtypes: Sequence[torch.dtype], *, whole: bool) -> str:
        """What the engine is asked to bring back; the rest is picked here."""
        if whole or self.mode in (OutputMode.All, OutputMode.EveryN):
            return "all"
        if self.mode == OutputMode.Sum:
            return "sum" if all(d in (torch.float32, torch.float64, torch.int64) for d in dtypes) else "all"
        return "last"

    def output(self, shares: Sequence[Tensor], asked: str) -> Tensor:
        """One output of all replicas. Each share is [micro-batches, ...] where all were asked for and there are several."""
        several = self.count > 1 and asked == "all"
        shares = [self._picked(s) if several else s.unsqueeze(0) for s in shares]
        if len(shares) == 1 and shares[0].shape[0] == 1:
            return shares[0][0]
        blocks = self.together(shares)
        return blocks if blocks.dim() == 1 else blocks.flatten(0, 1)

    def _picked(self, t: Tensor) -> Tensor:
        if self.mode == OutputMode.Final:
            return t[-1:]
        if self.mode == OutputMode.Sum:
            return t.sum(0, keepdim=True, dtype=t.dtype)
        if self.mode == OutputMode.EveryN:
            return t[self.period - 1 :: self.period]
        return t
