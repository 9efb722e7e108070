"""Two rows about what is around the step: `epoch` and `call-item`. Both train logistic regression at batch 1.

epoch      60 000 samples end to end, shuffled. PyTorch through its DataLoader (eager, compile-step) or over arrays in memory
           with a shuffled index (eager-arrays); JAX as one scan over arrays on the device; Tilework with its loader around
           the same DataLoader.
call-item  one call and one .item() for each step, from Python, over samples in memory in order.

Here are the data and the common clock; the contenders are in epochs_torch.py, epochs_jax.py and epochs_tilework.py. Slow
contenders run the first 6 000 samples of the epoch, which is scaled and recorded (measured_samples), unless --whole-epoch.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

EPOCH_SAMPLES = 60_000
PART_SAMPLES = 6_000  # of the epoch, for contenders that need tens of microseconds a step
CALLED_SAMPLES = 2_000
WARM_SAMPLES = 200
ROW = "logreg-1"  # weights and optimizer of both rows


def epoch_arrays() -> tuple[np.ndarray, np.ndarray]:
    """x float32 [60 000, 784], y int64 [60 000]: the same in every process."""
    generator = np.random.default_rng(1)
    return generator.standard_normal((EPOCH_SAMPLES, 784), np.float32), generator.integers(0, 10, EPOCH_SAMPLES)


class EpochContender(ABC):
    whole = False  # fast enough to run all samples in every slice

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name  # kind is "epoch" or "call"

    @abstractmethod
    def variants(self) -> list[str]:
        """In words, as in contender.py."""

    @abstractmethod
    def make_ready(self, number: int) -> None:
        """Make a variant ready; self.x and self.y are there."""

    @abstractmethod
    def reset(self) -> None:
        """Back to the initial weights."""

    @abstractmethod
    def run_epoch(self, samples: int) -> Any:
        """The first `samples` of a freshly shuffled epoch, one step each; done when it returns."""

    @abstractmethod
    def run_calls(self, samples: int) -> list[float]:
        """One call and one number back a step, over the samples in order."""

    def start(self, row: str, whole_epoch: bool = False) -> list[str]:
        self.x, self.y = epoch_arrays()
        part = EPOCH_SAMPLES if self.whole or whole_epoch else PART_SAMPLES
        self.samples = part if self.kind == "epoch" else CALLED_SAMPLES
        return self.variants()

    def build(self, number: int) -> None:
        self.make_ready(number)
        self._run(self.samples if self.whole else WARM_SAMPLES)

    def losses(self, n: int) -> list[float]:
        self.reset()
        return self.run_calls(n)

    def time(self, seconds: float) -> dict[str, float]:
        """A slice is a number of samples here, whatever time it takes."""
        self.reset()
        if not self.whole:
            self._run(WARM_SAMPLES)
        gc.collect()
        begin = time.perf_counter()
        self._run(self.samples)
        return {"seconds": (time.perf_counter() - begin) / self.samples, "steps": self.samples}

    def _run(self, samples: int) -> None:
        self.run_epoch(samples) if self.kind == "epoch" else self.run_calls(samples)
