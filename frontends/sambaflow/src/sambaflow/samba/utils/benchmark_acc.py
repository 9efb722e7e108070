"""AccuracyReport: the accuracy of a run as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class AccuracyReport:
    def __init__(
        self,
        val_metrics: Mapping[str, Any] | None = None,
        val_accuracy: float | None = None,
        batch_size: int | None = None,
        num_iterations: int | None = None,
        **more: Any,
    ) -> None:
        metrics = dict(val_metrics or {})
        if val_accuracy is not None:
            metrics["acc"] = val_accuracy
        self.report = {"val_metrics": {k: float(v) for k, v in metrics.items()}, "batch_size": batch_size,
                       "num_iterations": num_iterations, **more}  # fmt: skip

    def save(self, path: str | Path | None) -> None:
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(self.report, indent=1, default=str) + "\n")
