"""The compile cache: native code by the content of what it was made from, and a memory of why the last look missed.

    <cache>/programs/<key>/{code.so, key.json}   key = SHA-256 over the parts in key.json
    <cache>/names/<artifact>.<library>.json      the parts that this name had last time
    <cache>/locks/<key>.lock                     held with flock while a program is built; the kernel frees it on any exit

An entry appears whole, by rename, or not at all. What is here becomes code of this process, so nobody but its user may be able
to write here.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import MachineError

Parts = dict[str, str]


def cache_folder() -> Path:
    """$TILEWORK_CACHE, or tilework below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("TILEWORK_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilework"


@dataclass(frozen=True)
class Found:
    code: bytes
    hit: bool
    why: str  # for a miss: which parts of the key differ from last time


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError("disk-full", f"{what}: no space left on the device", found=str(e.filename or ""),
                               fix="free some space, or set TILEWORK_CACHE to a folder on another disk") from e  # fmt: skip
        if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise MachineError("disk-permission", f"{what}: {e.strerror}", found=str(e.filename or ""),
                               fix="choose a folder that you can write to") from e  # fmt: skip
        raise


def others_reach(folder: Path) -> str:
    """How somebody else could put code into this folder, or an empty text."""
    info = folder.stat()
    if info.st_uid != os.geteuid():
        return f"it belongs to user {info.st_uid}, not to you ({os.geteuid()})"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(info.st_mode):o})"
    return ""


def _own_folder(folder: Path) -> Path:
    """The folder, made where it is missing, with links resolved: a link that changes later leads nowhere else."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = folder.resolve()
    problem = others_reach(folder)
    if problem:
        raise MachineError(
            "cache-owner",
            f"{folder}: the compile cache contains machine code, and other users could have put theirs there",
            found=problem,
            expected="a folder of your own that nobody else can write to",
            fix=f"set TILEWORK_CACHE to such a folder; if this one is yours and you trust what is in it, chmod go-w {folder}",
        )
    return folder


class Cache:
    def __init__(self, folder: Path | None = None) -> None:
        with disk_errors("compile cache"):
            self.folder = _own_folder(folder or cache_folder())
            for name in ("programs", "names", "locks", "headers", "inductor", "scratch"):
                _own_folder(self.folder / name)

    @staticmethod
    def key(parts: Parts) -> str:
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def look(self, name: str, parts: Parts) -> Found | None:
        """The code for these parts, if it is there."""
        code = self._read(self.key(parts))
        if code is None:
            return None
        self._remember(name, parts)
        return Found(code, True, "")

    def get(self, name: str, parts: Parts, build: Callable[[Path], bytes]) -> Found:
        """The code for these parts, from the cache or built now. Two processes that ask at once build it once."""
        found = self.look(name, parts)
        if found is not None:
            return found
        key, why = self.key(parts), self._why(name, parts)
        with disk_errors("compile cache"), self.lock(key):
            code = self._read(key)  # somebody else may have built it while we waited
            if code is None:
                with self.scratch() as scratch:
                    code = build(scratch)
                    self._write(key, parts, code, scratch)
            self._remember(name, parts)
        return Found(code, False, why)

    @contextmanager
    def lock(self, key: str) -> Iterator[None]:
        with open(self.folder / "locks" / f"{key}.lock", "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for intermediate files. Folders of processes that are gone are swept on the way."""
        root = self.folder / "scratch"
        for old in root.iterdir():
            pid = old.name.split("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _read(self, key: str) -> bytes | None:
        entry = self.folder / "programs" / key
        try:
            record = json.loads((entry / "key.json").read_text())
            code = (entry / "code.so").read_bytes()
        except (OSError, ValueError):
            return None
        if hashlib.sha256(code).hexdigest() != record.get("sha256"):
            shutil.rmtree(entry, ignore_errors=True)  # damaged: build it again
            return None
        os.utime(entry)
        return code

    def _write(self, key: str, parts: Parts, code: bytes, scratch: Path) -> None:
        entry = scratch / "entry"
        entry.mkdir()
        (entry / "code.so").write_bytes(code)
        record = {"parts": parts, "sha256": hashlib.sha256(code).hexdigest()}
        (entry / "key.json").write_text(json.dumps(record, indent=1))
        try:
            entry.rename(self.folder / "programs" / key)
        except OSError as e:
            if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise

    def _remember(self, name: str, parts: Parts) -> None:
        target = self.folder / "names" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
        part = target.with_suffix(f".{os.getpid()}.part")
        with disk_errors("compile cache"):
            part.write_text(json.dumps({"name": name, "parts": parts}))
            part.replace(target)

    def _why(self, name: str, parts: Parts) -> str:
        target = self.folder / "names" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.json"
        try:
            last: Parts = json.loads(target.read_text())["parts"]
        except (OSError, ValueError, KeyError):
            return "first compile of this name"
        changed = [k for k in sorted({*parts, *last}) if parts.get(k) != last.get(k)]
        if not changed:
            return "the entry was removed"
        shown = [k if len(str(parts.get(k))) > 40 else f"{k} {last.get(k)!r} -> {parts.get(k)!r}" for k in changed]
        return "changed: " + ", ".join(shown)

    # ---- what `tilework cache` shows and does ----

    def entries(self) -> list[tuple[str, int, float, Parts]]:
        """(key, bytes, last use, parts), oldest use first."""
        found = []
        for entry in (self.folder / "programs").iterdir():
            try:
                record = json.loads((entry / "key.json").read_text())
                found.append((entry.name, (entry / "code.so").stat().st_size, entry.stat().st_mtime, record["parts"]))
            except (OSError, ValueError, KeyError):
                continue
        return sorted(found, key=lambda e: e[2])

    def size(self) -> int:
        return sum(f.stat().st_size for f in self.folder.rglob("*") if f.is_file())

    def prune(self, max_bytes: int) -> int:
        """Removes programs, the longest unused first, until those left fit. Returns how many went."""
        entries = self.entries()
        total, gone = sum(size for _, size, _, _ in entries), 0
        for key, size, _, _ in entries:
            if total <= max_bytes:
                break
            shutil.rmtree(self.folder / "programs" / key, ignore_errors=True)
            total, gone = total - size, gone + 1
        return gone

    def clear(self) -> None:
        for name in ("programs", "names", "headers", "inductor", "scratch"):
            for entry in (self.folder / name).iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
