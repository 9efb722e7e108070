"""load_sharded_checkpoint: the weights of a folder of shards, in torch's or safetensors' format, into a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import tilework


def load_sharded_checkpoint(model: Any, folder: str | Path, strict: bool = True, **_: Any) -> Any:
    folder = Path(folder)
    index = next(
        (f for f in (folder / "model.safetensors.index.json", folder / "pytorch_model.bin.index.json") if f.exists()), None
    )
    if index is not None:
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.pt")])
    if not files:
        raise tilework.UserError("weights-missing", f"{folder}: no checkpoint here", expected="*.safetensors, *.bin or *.pt")
    state: dict[str, Any] = {}
    for file in files:
        load = safetensors.torch.load_file if file.suffix == ".safetensors" else _torch_load
        state.update(load(str(file)))
    return model.load_state_dict(state, strict=strict)


def _torch_load(file: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return found
