"""What every contender is: something that can run the training steps of a row, timed the same way as all the others.

A contender has one or more `variants` of a row: settings between which its documentation leaves the choice (memory layout,
kind of optimizer, how much is compiled). The measuring process tries them all for a moment and keeps the fastest, so that
each contender stands in the table at its best. It asks for

    start(row)       the variants of a row, in words
    build(number)    one of them, made ready; what was ready before is dropped
    losses(n)        the first n losses from the row's initial weights: the proof of same arithmetic
    time(seconds)    from the initial weights again; seconds a step over whole passes, at least that long

A pass is `row.steps_per_call` optimizer steps on as many mini-batches, which are in memory, cut and laid out before.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from .rows import Row, row_named

Variant = dict[str, Any]


class Contender(ABC):
    def __init__(self, name: str, out: Path) -> None:
        self.name, self.out = name, out
        self.row: Row

    @abstractmethod
    def variants(self, row: Row) -> list[Variant]:
        """In order of promise: a quick run takes the first only."""

    @abstractmethod
    def make_ready(self, variant: Variant) -> None:
        """Make a variant of self.row ready. What was ready before can be dropped."""

    @abstractmethod
    def reset(self) -> None:
        """Back to the initial weights and a fresh optimizer, in place: nothing may be compiled again."""

    @abstractmethod
    def run_pass(self) -> Any:
        """All steps of a pass. When it returns, the work is done. Gives the losses, in whatever form comes for free."""

    # ---- what the measuring process asks for ----

    def start(self, row: str) -> list[str]:
        self.row = row_named(row)
        self.choice = self.variants(self.row)
        return [describe(v) for v in self.choice]

    def build(self, number: int) -> None:
        self.make_ready(self.choice[number])
        self.run_pass()  # what is compiled at the first call is compiled now

    def losses(self, n: int) -> list[float]:
        self.reset()
        return [float(loss) for loss in self.run_pass()[:n]]

    def time(self, seconds: float) -> dict[str, float]:
        self.reset()
        self.run_pass()  # another contender ran before: caches and threads warm up untimed
        gc.collect()
        steps, begin, now = 0, time.perf_counter(), 0.0
        while steps == 0 or now < seconds:
            self.run_pass()
            steps += self.row.steps_per_call
            now = time.perf_counter() - begin
        return {"seconds": now / steps, "steps": steps}


def describe(variant: Variant) -> str:
    return ", ".join(str(v) for v in variant.values() if v) or "default"
