"""Makes damaged and hostile artifacts."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import zipfile
from pathlib import Path
from typing import Any

from tilework.artifact.writer import DIGEST, whole_digest


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as z:
        return {i.filename: z.read(i) for i in z.infolist()}


def write(path: Path, members: dict[str, bytes], *, rehash: bool = True, packed: set[str] | None = None) -> Path:
    """A zip of these members, with digests that fit them unless told otherwise."""
    members = dict(members)
    if rehash:
        digests = {n: hashlib.sha256(d).hexdigest() for n, d in members.items() if n != DIGEST}
        members[DIGEST] = json.dumps({"whole": whole_digest(digests), "members": digests}).encode()
    with zipfile.ZipFile(path, "w") as z:
        for name, data in members.items():
            stored = name.endswith((".so", ".safetensors")) and name not in (packed or ())
            z.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED)
    path.chmod(0o644)
    return path


def change_manifest(members: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    manifest = json.loads(members["manifest.json"]) | changes
    return members | {"manifest.json": json.dumps(manifest).encode()}


def canary_library(folder: Path, mark: Path) -> bytes:
    """A shared library that writes `mark` as soon as it is opened."""
    source, target = folder / "canary.c", folder / "canary.so"
    source.write_text(
        f"#include <stdio.h>\n__attribute__((constructor)) static void sing(void) "
        f'{{ FILE* f = fopen("{mark}", "w"); if (f) fclose(f); }}\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return target.read_bytes()


# ---- mutations ----


def mutate_bytes(data: bytes, r: random.Random) -> bytes:
    """Flip, cut, repeat, swap or insert."""
    b = bytearray(data)
    kind = r.randrange(6)
    at = r.randrange(len(b)) if b else 0
    if kind == 0 and b:
        b[at] ^= 1 << r.randrange(8)
    elif kind == 1:
        del b[at:]
    elif kind == 2 and b:
        del b[at : at + r.randrange(1, 64)]
    elif kind == 3:
        b[at:at] = bytes(r.randrange(256) for _ in range(r.randrange(1, 32)))
    elif kind == 4 and b:
        for _ in range(r.randrange(1, 20)):
            b[r.randrange(len(b))] = r.randrange(256)
    else:
        end = min(len(b), at + r.randrange(1, 200))
        b[at:at] = b[at:end]
    return bytes(b)


_VALUES: list[Any] = [None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 1e308, float("inf"), "", "x", "../x",
           "cpu", "aten.mm.default",
           "\0", "a" * 3000, [], {}, [[]], {"ref": "x"}, [None], {"": 0}, ["leaf"], ["tuple", ["leaf"]]]  # fmt: skip


def mutate_json(data: bytes, r: random.Random) -> bytes:
    """Replace, remove, repeat or rename something somewhere in the document."""
    document = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in list(items):
            places.append((value, key))
            walk(item)

    walk(document)
    for _ in range(r.choice([1, 1, 1, 2, 5])):
        holder, key = r.choice(places)
        try:
            old = holder[key]
            kind = r.randrange(5)
            if kind == 0:
                holder[key] = r.choice(_VALUES)
            elif kind == 1:
                del holder[key]
            elif kind == 2 and isinstance(old, (int, float)) and not isinstance(old, bool):
                holder[key] = r.choice([old + 1, old - 1, -old, old * 2, old * 10**9, str(old)])
            elif kind == 3 and isinstance(holder, list):
                holder.insert(r.randrange(len(holder) + 1), old)
            elif kind == 4 and isinstance(holder, dict):
                holder[r.choice(["extra", key + "x", key.upper()])] = old
            elif isinstance(old, str):
                holder[key] = mutate_bytes(old.encode(), r).decode("utf-8", "replace")
        except (KeyError, IndexError):
            continue
    return json.dumps(document).encode()


def mutated(members: dict[str, bytes], r: random.Random, target: Path, raw: bytes) -> Path:
    """Half of the mutations change the file as it lies; half change a member and recompute every digest."""
    if r.random() < 0.5:
        target.write_bytes(mutate_bytes(raw, r))
        target.chmod(0o644)
        return target
    name = r.choice([n for n in members if not n.endswith(".so") and n != DIGEST])  # never the native code
    change = mutate_json if name.endswith(".json") and r.random() < 0.8 else mutate_bytes
    return write(target, members | {name: change(members[name], r)})
