"""dump_accuracy_debug_info: norms of weights and gradients, to look at in TensorBoard or as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..sambasession import session


def dump_accuracy_debug_info(output_dir: str | Path = ".", model: Any = None, step: int = 0, **_: Any) -> None:
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    model = model if model is not None else session.model
    norms = {}
    for name, p in model.named_parameters():
        grad = session.device_gradient(p)
        norms[name] = {"value": float(session.device_value(p).norm()), "grad": None if grad is None else float(grad.norm())}
    with (folder / "accuracy_debug.jsonl").open("a") as f:
        f.write(json.dumps({"step": step, "norms": norms}) + "\n")
