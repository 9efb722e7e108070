"""Reads an artifact, trusting nothing: who owns it, its zip structure, its digests, its manifest, graphs and tensors.

Everything is checked before anything is used, from one open file, so that what was checked is what is loaded. No pickle,
no extraction to disk, no native code opened: that is the runtime's business, afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import safetensors.torch
import torch

from ..errors import UserError
from .graph import Graph
from .manifest import FORMAT_VERSION, Manifest
from .writer import DIGEST, whole_digest

TRUST_VARIABLE = "TILEWORK_TRUST"
_MEMBER = re.compile(r"(?:manifest|digest)\.json|report\.txt|(?:constants|weights)\.safetensors|"
                     r"graphs/\w{1,80}\.(?:json|txt)|native/\w{1,80}\.\w{1,10}", re.ASCII)  # fmt: skip
_TEXT_LIMIT = 256 << 20  # bytes of one text member, unpacked
_RATIO_LIMIT = 200  # unpacked to packed bytes of a text member; JSON of graphs packs to about 1 : 20


@dataclass(frozen=True)
class Artifact:
    """A verified artifact in memory."""

    path: Path
    manifest: Manifest
    digest: str
    members: dict[str, int]  # name -> bytes
    native: dict[str, bytes] = field(repr=False)  # member name -> verified code
    constants: dict[str, torch.Tensor] = field(repr=False)
    weights: dict[str, torch.Tensor] | None = field(repr=False)  # None where they are not inside
    graphs: dict[str, Graph] = field(repr=False)
    report: str = field(repr=False)

    @property
    def weights_beside(self) -> Path | None:
        """The file of weights beside the artifact, where they are kept there and it is there."""
        if self.manifest.weights.where != "separate":
            return None
        file = self.path.parent / str(self.manifest.weights.file)
        return file if file.exists() else None

    def __str__(self) -> str:
        m = self.manifest
        return f"{self.path}: {m.name} for {m.fingerprint.device}, programs {', '.join(m.programs)}"


def _bad(id: str, path: Path, summary: str, *, found: str = "", expected: str = "", fix: str = "") -> UserError:
    return UserError(id, f"{path}: {summary}", found=found, expected=expected, fix=fix or "compile the model again")


def read_artifact(path: str | Path, *, trust: bool = False) -> Artifact:
    """Read and verify. `trust` (or TILEWORK_TRUST=1) accepts a file that others could have changed."""
    path = Path(path)
    try:
        with open(path, "rb") as f:
            check_owner(f, path, trust)
            members = _members(f, path)
    except FileNotFoundError:
        raise UserError("artifact-missing", f"{path}: there is no such file", fix="compile it first, or fix the path") from None
    except IsADirectoryError:
        raise UserError("artifact-missing", f"{path} is a folder, not an artifact", fix="give the .pef file in it") from None
    except PermissionError:
        raise UserError("artifact-missing", f"{path}: you have no permission to read this file") from None
    digest = _check_digests(members, path)
    manifest = _manifest(members, path)
    _check_members(members, manifest, path)
    constants = _tensors(members.get("constants.safetensors"), "constants", path)
    weights = _tensors(members["weights.safetensors"], "weights", path) if "weights.safetensors" in members else None
    graphs = {name: _graph(members, program.graph, path) for name, program in manifest.programs.items()}
    for name, graph in graphs.items():
        _check_graph(name, graph, manifest, path)
    _check_tensors(manifest, {**constants, **(weights or {})}, path)
    return Artifact(
        path=path,
        manifest=manifest,
        digest=digest,
        members={name: len(data) for name, data in members.items()},
        native={name: data for name, data in members.items() if name.startswith("native/")},
        constants=constants,
        weights=weights,
        graphs=graphs,
        report=members.get("report.txt", b"").decode("utf-8", "replace"),
    )


def check_owner(f: IO[bytes], path: Path, trust: bool) -> None:
    """The file holds machine code: it must belong to the caller or root, and nobody else may be able to write to it."""
    info = os.fstat(f.fileno())
    if not stat.S_ISREG(info.st_mode):
        raise _bad("artifact-foreign", path, "this is not a regular file")
    if trust or os.environ.get(TRUST_VARIABLE) == "1":
        return
    problems = []
    if info.st_uid not in (os.geteuid(), 0):
        problems.append(f"it belongs to user {info.st_uid}, not to you ({os.geteuid()}) or root")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problems.append(f"others can write to it (mode {stat.S_IMODE(info.st_mode):o})")
    if problems:
        raise UserError(
            "artifact-owner",
            f"{path}: an artifact contains machine code, and other users could have changed this one",
            found="; ".join(problems),
            expected="a file of your own or root's that only its owner can write to",
            fix=f"chmod go-w {path}, or copy it; if you trust it as it is, --trust or {TRUST_VARIABLE}=1",
        )


def _members(f: IO[bytes], path: Path) -> dict[str, bytes]:
    """All members by name, with names, sizes and packing checked before anything is unpacked."""
    head = f.read(4)
    if head != b"PK\x03\x04":
        kind = "an empty file" if not head else f"a file that starts with {head!r}"
        raise _bad("artifact-foreign", path, "this is not an artifact", found=kind, expected="a .pef file (a zip)")
    size = os.fstat(f.fileno()).st_size
    try:
        with zipfile.ZipFile(f) as z:
            infos = z.infolist()
            _check_entries(infos, size, path)
            members = {}
            for info in infos:
                with z.open(info) as member:
                    data = member.read(info.file_size + 1)
                if len(data) != info.file_size:
                    raise _bad("artifact-damaged", path, f"member {info.filename} is not as long as it says")
                members[info.filename] = data
            return members
    except UserError:
        raise
    except Exception as e:  # zipfile raises many kinds for a damaged file: BadZipFile, zlib.error, struct.error, EOFError
        raise _bad("artifact-damaged", path, "the file is damaged", found=f"{type(e).__name__}: {e}") from e


def _check_entries(infos: list[zipfile.ZipInfo], size: int, path: Path) -> None:
    seen: set[str] = set()
    packed = 0
    for info in infos:
        name = info.filename
        if ".." in name.split("/") or name.startswith("/") or "\\" in name or "\0" in name:
            raise _bad("artifact-foreign", path, "a member's name leads out of the artifact", found=repr(name[:80]))
        if not _MEMBER.fullmatch(name):
            pickled = " (Tilework never reads pickle)" if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".bin")) else ""
            raise _bad("artifact-foreign", path, f"a member that no artifact has{pickled}", found=repr(name[:80]))
        if name in seen:
            raise _bad("artifact-foreign", path, "a member occurs twice", found=name)
        seen.add(name)
        if info.flag_bits & 1:
            raise _bad("artifact-foreign", path, "a member is encrypted", found=name)
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _bad("artifact-foreign", path, "a member is packed in an unknown way", found=name)
        if stat.S_ISLNK(info.external_attr >> 16):
            raise _bad("artifact-foreign", path, "a member is a link", found=name)
        stored = name.endswith((".so", ".safetensors"))
        if stored and (info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size):
            raise _bad("artifact-foreign", path, "native code and tensors must be stored plainly", found=name)
        if not stored and (info.file_size > _TEXT_LIMIT or info.file_size > _RATIO_LIMIT * (info.compress_size + 64)):
            raise _bad("artifact-foreign", path, "a member unpacks to far more than it should", found=name)
        packed += info.compress_size
    if packed > size:
        raise _bad("artifact-damaged", path, "the members overlap", found=f"{packed} bytes in a file of {size}")
    for needed in ("manifest.json", DIGEST):
        if needed not in seen:
            raise _bad("artifact-foreign", path, "this zip is not an artifact", found=f"no member {needed}")


def _check_digests(members: dict[str, bytes], path: Path) -> str:
    try:
        stated = json.loads(members[DIGEST])
        digests, whole = dict(stated["members"]), str(stated["whole"])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise _bad("artifact-damaged", path, f"{DIGEST} cannot be read", found=str(e)[:200]) from e
    actual = {name: hashlib.sha256(data).hexdigest() for name, data in members.items() if name != DIGEST}
    wrong = sorted(name for name in {*digests, *actual} if digests.get(name) != actual.get(name))
    if wrong:
        raise _bad("artifact-damaged", path, "the content does not match its SHA-256", found=", ".join(wrong[:8]))
    if whole != whole_digest(actual):
        raise _bad("artifact-damaged", path, "the digest of the whole does not match its members")
    return whole


def _manifest(members: dict[str, bytes], path: Path) -> Manifest:
    text = members["manifest.json"]
    _check_version(text, path)
    try:
        return Manifest.from_json(text)
    except msgspec.ValidationError as e:
        raise _bad("artifact-manifest", path, "the manifest is not valid", found=str(e)[:300],
                   expected="a manifest that follows the published schema") from e  # fmt: skip
    except (ValueError, RecursionError) as e:
        raise _bad("artifact-manifest", path, "the manifest cannot be read", found=str(e)[:200]) from e


def _check_version(text: bytes, path: Path) -> None:
    """Before the schema is applied: a file of another format version should be told so, not that its fields are odd."""
    try:
        found = json.loads(text)["format"]
        major, minor = int(found[0]), int(found[1])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as e:
        raise _bad("artifact-manifest", path, "the manifest has no format version", found=str(e)[:200]) from e
    if (major, minor) > FORMAT_VERSION:
        raise _bad("artifact-version", path, "this artifact was written by a newer Tilework",
                   found=f"format {major}.{minor}", expected=f"format {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]} or older",
                   fix="install that version, or compile again with this one")  # fmt: skip
    if major < FORMAT_VERSION[0]:
        raise _bad("artifact-version", path, "this artifact has an old format that is no longer read",
                   found=f"format {major}.{minor}", expected=f"format {FORMAT_VERSION[0]}.x")  # fmt: skip


def _check_members(members: dict[str, bytes], manifest: Manifest, path: Path) -> None:
    unnamed = {name for name in members if name.startswith("native/")} ^ set(manifest.native)
    if unnamed:
        raise _bad("artifact-manifest", path, "the native members are not those that the manifest names",
                   found=", ".join(sorted(unnamed)[:5]))  # fmt: skip
    for name, program in manifest.programs.items():
        for member in filter(None, (program.graph, program.code)):
            if member not in members:
                raise _bad("artifact-manifest", path, f"program {name} names a member that is not there", found=member)
        if program.code is not None and not program.code.startswith("native/"):
            raise _bad("artifact-manifest", path, f"program {name}: code is not a native member", found=program.code)
    if manifest.weights.where == "inside" and "weights.safetensors" not in members:
        raise _bad("artifact-manifest", path, "the weights should be inside, but they are missing")


def _tensors(data: bytes | None, what: str, path: Path) -> dict[str, torch.Tensor]:
    if data is None:
        return {}
    try:
        return safetensors.torch.load(data)
    except Exception as e:  # SafetensorError, or numpy's and torch's complaints about odd dtypes
        raise _bad("artifact-damaged", path, f"the {what} cannot be read", found=f"{type(e).__name__}: {e}"[:200]) from e


def _graph(members: dict[str, bytes], name: str, path: Path) -> Graph:
    try:
        return Graph.from_json(json.loads(members[name]))
    except (ValueError, RecursionError) as e:
        raise _bad("artifact-manifest", path, f"{name} is not a graph", found=str(e)[:200]) from e


def _check_graph(name: str, graph: Graph, manifest: Manifest, path: Path) -> None:
    program = manifest.programs[name]
    agrees = (
        list(graph.buffers) == program.buffers
        and sorted(graph.written) == sorted(program.writes)
        and all(graph.types[b] == manifest.buffers[b].type() for b in graph.buffers)
        and graph.abi() == program.abi
    )
    if not agrees:
        raise _bad("artifact-manifest", path, f"program {name}: the graph and the manifest disagree about its buffers")


def _check_tensors(manifest: Manifest, tensors: dict[str, Any], path: Path) -> None:
    for name, tensor in tensors.items():
        entry: Any = manifest.buffers.get(name)
        if entry is None:
            raise _bad("artifact-manifest", path, "a stored tensor has no buffer", found=name[:80])
        if list(tensor.shape) != entry.shape or str(tensor.dtype) != f"torch.{entry.dtype}":
            raise _bad("artifact-manifest", path, f"stored tensor {name} has another type than its buffer",
                       found=f"{tensor.dtype} {list(tensor.shape)}", expected=f"{entry.dtype} {entry.shape}")  # fmt: skip
