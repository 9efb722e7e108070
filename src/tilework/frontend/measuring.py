"""Latency and throughput of a session's calls, as vendors' measuring commands want them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..runtime.session import Session

MOST_BYTES = 256e6  # of inputs that are laid side by side to measure many steps in one call


def repeat(once: Callable[[], Any], iterations: int, min_seconds: float = 0.0) -> tuple[float, int]:
    """(seconds, how many): at least `iterations` calls and at least `min_seconds`."""
    count, begin = 0, time.perf_counter()
    while True:
        for _ in range(max(1, iterations)):
            once()
        count += max(1, iterations)
        took = time.perf_counter() - begin
        if took >= min_seconds:
            return took, count


def in_one_call(session: Session, given: Sequence[Tensor], iterations: int) -> Callable[[], Any] | None:
    """All iterations in one native call: the device alone, without Python. None where their inputs would not fit side by side."""
    s = session.manifest.signature
    size = sum(a.type.type().num_bytes for a in s.inputs) * s.num_micro_batches
    if s.batch_dim != 0 or not s.losses or size * iterations > MOST_BYTES:
        return None
    many = [g.repeat(iterations, *[1] * (g.dim() - 1)) if g.dim() else g for g in given]
    return lambda: session.run(*many, num_steps=iterations, outputs="loss")
