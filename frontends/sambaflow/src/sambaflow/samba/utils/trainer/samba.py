"""train: the old, ready-made training loop."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ...sambasession import session


def train(
    args: argparse.Namespace, model: Any, optimizer: Any, loader: Iterable[Any], num_epochs: int | None = None, **_: Any
) -> float:
    """Runs the loader's batches through the session, which must be traced; returns the last epoch's mean loss."""
    mean = 0.0
    epochs: int = num_epochs or vars(args).get("num_epochs", 1)
    for epoch in range(epochs):
        total = count = 0.0
        for batch in loader:
            loss = session.run(list(batch), getattr(model, "output_tensors", None))[0]
            total, count = total + float(loss.mean()), count + 1
        mean = total / max(count, 1.0)
        print(f"Epoch [{epoch + 1}/{epochs}], Loss: {mean:.4f}")
    session.to_cpu(model)
    return mean
