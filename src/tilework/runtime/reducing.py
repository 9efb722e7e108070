"""What makes one set of gradients out of those of all replicas, between bwd and opt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Reducer(Protocol):
    def reduce(self, buckets: Sequence[Tensor]) -> None:
        """Each bucket, in place, becomes the mean (or the sum) of what it is in all replicas. Buckets are flat, in the order in
        which the backward pass fills them, and the same in every replica."""
