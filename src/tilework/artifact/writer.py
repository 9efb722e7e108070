"""Writes an artifact: a zip of readable members, each with its SHA-256, that appears whole or not at all.

manifest.json            what it is (docs/manifest.schema.json)
graphs/<program>.json    the graph, as data          graphs/<program>.txt   the same, to read
native/<library>.so      machine code of programs    native/driver.so       the loop around it
constants.safetensors    tensors that the model holds as attributes
weights.safetensors      parameters, buffers and optimizer state, where they are kept inside
report.txt               what was planned and built
digest.json              SHA-256 of every other member, and of them all together
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ..errors import UserError
from .graph import Graph
from .manifest import Manifest

DIGEST = "digest.json"
NOTES = "tilework"  # in the metadata of a safetensors file: JSON, what we know about its tensors


def whole_digest(members: Mapping[str, str]) -> str:
    """SHA-256 over the sorted lines '<sha256>  <name>', as sha256sum prints them."""
    lines = "".join(f"{sha}  {name}\n" for name, sha in sorted(members.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def tensor_bytes(tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any] | None = None) -> bytes:
    """safetensors; tensors that share storage, or are not dense, are copied. `notes` stand beside the tensors, as JSON."""
    metadata = {NOTES: json.dumps(notes)} if notes is not None else None
    return safetensors.torch.save({k: t.detach().contiguous().clone() for k, t in tensors.items()}, metadata=metadata)


def initial_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Initial weights, marked as such: a compile may write them anew, and nothing is lost."""
    return tensor_bytes(tensors, {"initial": True})


def require_replaceable(file: Path) -> None:
    """UserError where a compile would overwrite something that is not initial weights: a checkpoint is the work of hours."""
    if not file.exists():
        return
    try:
        with safetensors.safe_open(str(file), "pt") as f:  # type: ignore[no-untyped-call]
            initial = json.loads((f.metadata() or {}).get(NOTES, "{}")).get("initial") is True
    except Exception:  # not a file of tensors at all
        initial = False
    if not initial:
        raise UserError(
            "weights-exist", f"{file}: the compile would overwrite this file with the initial weights",
            found="a file that is not marked as initial weights, such as a checkpoint",
            expected="no file of that name, or initial weights from an earlier compile",
            fix="move it or choose another name for the artifact; or compile with weights='inside' or 'none' (--weights); "
            "if it is only the initial weights of an older Tilework, delete it",
        )  # fmt: skip


def write_artifact(
    path: Path,
    manifest: Manifest,
    graphs: Mapping[str, Graph],
    native: Mapping[str, bytes],
    constants: Mapping[str, torch.Tensor],
    weights: bytes | None,
    report: str,
) -> str:
    """Returns the digest of the whole. `native` is by member name, such as native/step.so."""
    members: dict[str, bytes] = {"manifest.json": manifest.as_json()}
    for name, graph in graphs.items():
        members[f"graphs/{name}.json"] = json.dumps(graph.to_json()).encode()
        members[f"graphs/{name}.txt"] = graph.to_text().encode()
    members |= dict(native)
    if constants:
        members["constants.safetensors"] = tensor_bytes(constants)
    if weights is not None:
        members["weights.safetensors"] = weights
    members["report.txt"] = report.encode()
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    whole = whole_digest(digests)
    members[DIGEST] = json.dumps({"whole": whole, "members": digests}, indent=1).encode()

    def fill(f: object) -> None:
        with zipfile.ZipFile(f, "w") as z:  # type: ignore[call-overload]
            for name, data in members.items():
                info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))  # the same content gives the same bytes
                info.external_attr = 0o644 << 16
                stored = name.endswith((".so", ".safetensors"))
                info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
                z.writestr(info, data)

    write_whole(path, fill)
    return whole


def write_whole(path: Path, fill: object) -> None:
    """Calls fill(file) on a file beside `path`, makes it durable, and only then gives it the name. Mode 0644 at most."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    sweep_parts(path)
    try:
        with open(part, "wb") as f:
            os.fchmod(f.fileno(), 0o644 & ~_umask())
            fill(f)  # type: ignore[operator]
            f.flush()
            os.fsync(f.fileno())
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def sweep_parts(path: Path) -> None:
    """Removes what a process that was killed in the middle of writing this artifact left behind."""
    for old in path.parent.glob(f".{path.name}.*.part"):
        pid = old.name.split(".")[-2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            old.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
