"""Checkpoint files: everything that training changes, as safetensors, with notes beside the tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from ..artifact.writer import NOTES, write_whole
from ..errors import UserError


@dataclass(frozen=True)
class State:
    """Everything that training changes, at one moment."""

    tensors: dict[str, Tensor]  # param/..., buffer/..., state/...
    num_steps: int
    random: tuple[int, int, int]  # as Session.seed takes it
    hyper: dict[str, float]


def write(path: str | Path, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    data = safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()}, metadata={NOTES: json.dumps(notes)})
    write_whole(Path(path), lambda f: f.write(data))


def write_public(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors by their names in the model, as other programs write and read them. Tied ones are there under each name."""
    data = safetensors.torch.save({k: t.clone().contiguous() for k, t in tensors.items()}, metadata={"format": "pt"})
    write_whole(path, lambda f: f.write(data))


def require_digest(path: Path, sha256: str | None, artifact: Path) -> None:
    """UserError where the weights beside an artifact are not those that were compiled: nobody has asked for others.
    Artifacts from before format 1.1 do not know."""
    if sha256 is None:
        return
    with open(path, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != sha256:
        raise UserError(
            "weights-changed", f"{path}: these are not the initial weights that were compiled with {artifact}",
            found=f"sha256 {found[:16]}...", expected=f"sha256 {sha256[:16]}...",
            fix=f"to load them on purpose, tilework.load({str(artifact)!r}, weights={str(path)!r}) (--weights); "
            "weights=False starts without any; or compile again",
        )  # fmt: skip


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and notes; no notes in a file that somebody else wrote. Of a folder, all its safetensors files."""
    if Path(path).is_dir():
        parts = [read(part)[0] for part in sorted(Path(path).glob("*.safetensors"))]
        if not parts:
            raise UserError("weights-missing", f"{path}: there is no safetensors file in this folder")
        return {k: t for part in parts for k, t in part.items()}, {}
    try:
        with safetensors.safe_open(str(path), "pt") as f:  # type: ignore[no-untyped-call]
            return {k: f.get_tensor(k) for k in f.keys()}, json.loads((f.metadata() or {}).get(NOTES, "{}"))  # noqa: SIM118
    except FileNotFoundError:
        raise UserError("weights-missing", f"{path}: there is no such file") from None
    except Exception as e:
        raise UserError("weights-damaged", f"{path}: the weights cannot be read", found=str(e)[:200],
                        expected="a safetensors file") from e  # fmt: skip
