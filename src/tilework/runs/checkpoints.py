"""Checkpoints of a run: folders that appear whole or not at all, each verified before it is used.

checkpoints/
  step-000000100/
    checkpoint.json                        what it is, where the data stood, the SHA-256 of every file beside it
    tensors-00000-of-00002.safetensors     rank 0: parameters, buffers, optimizer state
    tensors-00001-of-00002.safetensors     rank 1: its buffers, and its share of the rest

A checkpoint is written under another name, made durable, and renamed; whoever is killed in the middle leaves only a folder
that nobody reads. Ranks agree through the file system, so that saving needs no collective call and can go on in the background:
a rank that cannot write renames the folder (a full disk still lets it), and the others give up at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ..artifact.names import Kind, is_kind
from ..errors import MachineError, TileworkError, UserError
from ..runtime.checkpoint import State, read

FORMAT = 1
NOTE = "checkpoint.json"
LARGE = 1 << 30  # bytes of parameters and optimizer state above which ranks share out the writing
PATIENCE = 600.0  # seconds that rank 0 waits for the files of the others
Report = Callable[[str], None]


@dataclass(frozen=True)
class Saved:
    """One checkpoint: what checkpoint.json says."""

    step: int
    artifact: str  # digest of the artifact that was trained
    ranks: int
    random: tuple[int, int, int]
    hyper: dict[str, float]
    position: dict[str, Any]  # where the data stood
    metrics: dict[str, float]  # of the moment
    files: dict[str, str]  # name: SHA-256
    extra: dict[str, Any] = field(default_factory=dict)
    written: str = ""  # when, UTC


def name_of(step: int) -> str:
    return f"step-{step:09d}"


class Checkpoints:
    """The checkpoints of one run, seen from one rank of it."""

    def __init__(self, folder: Path, *, keep: int = 3, rank: int = 0, ranks: int = 1, report: Report = lambda _: None) -> None:
        if keep < 1:
            raise UserError("checkpoint-keep", "how many checkpoints to keep", found=str(keep), expected="1 or more")
        self.folder, self.keep, self.rank, self.ranks, self.report = folder, keep, rank, ranks, report
        if rank == 0 and folder.is_dir():  # what a run that was killed left unfinished
            for old in (*folder.glob(".step-*.part"), *folder.glob(".step-*.failed"), *folder.glob(".gone-*")):
                shutil.rmtree(old, ignore_errors=True)
        self._writer: threading.Thread | None = None
        self.problem: Exception | None = None  # of the newest save
        self.last_saved: int | None = None
        self._tried: int | None = None  # the newest save, done or not

    # ---- writing ----

    def save(
        self,
        state: State,
        *,
        artifact: str,
        position: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        extra: Mapping[str, Any] | None = None,
        sharded: bool = False,
        background: bool = True,
    ) -> None:
        """Write the state in the background, one at a time. `sharded`: each rank's state has only its own optimizer state.
        A failure is reported and kept in `problem`: training may go on, and earlier checkpoints are untouched."""
        self.wait()
        saved = Saved(state.num_steps, artifact, self.ranks, state.random, state.hyper, dict(position), dict(metrics or {}), {},
                      dict(extra or {}), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))  # fmt: skip
        own = self._own(state.tensors, sharded)
        self._writer = threading.Thread(target=self._write, args=(saved, own), name="tilework-checkpoint")
        self._writer.start()
        if not background:
            self.wait()

    def wait(self) -> None:
        """Until the newest save is on disk, or has failed."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _own(self, tensors: dict[str, Tensor], sharded: bool) -> dict[str, Tensor]:
        """What this rank writes. Buffers may differ from rank to rank (local statistics). Parameters are the same everywhere, and
        so is optimizer state unless it is sharded: rank 0 writes them, or, where they are large, each rank a part."""
        if self.ranks == 1:
            return tensors
        same = [k for k in tensors if is_kind(k, Kind.PARAM) or (not sharded and is_kind(k, Kind.STATE))]
        large = sum(tensors[k].nbytes for k in same) > LARGE
        others = {k for i, k in enumerate(same) if (i % self.ranks if large else 0) != self.rank}
        return {k: t for k, t in tensors.items() if k not in others}

    def _write(self, saved: Saved, tensors: dict[str, Tensor]) -> None:
        part = self.folder / f".{name_of(saved.step)}.part"
        try:
            self.problem = None
            if self.rank == 0:
                self._forget_failed()
            self._tried = saved.step
            self._write_tensors(part, tensors)
            if self.rank == 0:
                self._complete(part, saved)
                self._prune(saved.step)
            self.last_saved = saved.step
        except Exception as e:  # reported, and raised by whoever needs this checkpoint
            self._give_up(part)
            self.problem = e
            self.report(f"checkpoint of step {saved.step} was not written: {type(e).__name__}: {e}; "
                        f"earlier ones are kept, and training goes on")  # fmt: skip

    def _give_up(self, part: Path) -> None:
        """The others are told by the folder's name, and what this rank has written makes room."""
        failed = _failed(part)
        if self.ranks == 1:
            shutil.rmtree(part, ignore_errors=True)
            return
        with contextlib.suppress(OSError):
            part.rename(failed)
        with contextlib.suppress(OSError):
            failed.mkdir()
        with contextlib.suppress(OSError):
            (failed / file_of(self.rank, self.ranks)).unlink()

    def _forget_failed(self) -> None:
        """Those that all ranks know of: whoever saves now has done with all saves but the one before."""
        for old in self.folder.glob(".step-*.failed"):
            if self._tried is None or old.name != f".{name_of(self._tried)}.failed":
                shutil.rmtree(old, ignore_errors=True)

    def _write_tensors(self, part: Path, tensors: dict[str, Tensor]) -> None:
        if self.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            shutil.rmtree(_failed(part), ignore_errors=True)
            part.mkdir(parents=True)
        else:
            _until(part.is_dir, part, f"rank 0 has not begun the checkpoint {part}")
        path = part / file_of(self.rank, self.ranks)
        safetensors.torch.save_file({k: t.contiguous() for k, t in tensors.items()}, path)
        with open(path, "rb+") as f:
            os.fsync(f.fileno())
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        _write_durably(path.with_suffix(".sha256.part"), digest.encode())
        path.with_suffix(".sha256.part").rename(path.with_suffix(".sha256"))  # seen by rank 0 when it is whole

    def _complete(self, part: Path, saved: Saved) -> None:
        names = [file_of(r, self.ranks) for r in range(self.ranks)]
        digests = [(part / n).with_suffix(".sha256") for n in names]
        _until(lambda: all(d.exists() for d in digests), part, f"not all ranks wrote their files to {part}")
        files = {n: d.read_text() for n, d in zip(names, digests, strict=True)}
        for digest in digests:
            digest.unlink()
        note = {"format": FORMAT, **saved.__dict__, "files": files}
        note["sha256"] = _digest_of(note)
        _write_durably(part / NOTE, json.dumps(note, indent=1).encode())
        _sync_folder(part)
        final = self.folder / name_of(saved.step)
        if final.exists():  # saved before a resume from an earlier one, or damaged: the new one takes its place
            self._remove(final)
        part.rename(final)
        _sync_folder(self.folder)

    def _prune(self, newest: int) -> None:
        """The newest `keep`, and the one with the lowest loss. Later ones than the newest were damaged: they do not count."""
        steps = [s for s in self.steps() if s <= newest]
        losses = {s: found.metrics["loss"] for s in steps if (found := self._note(s)) is not None and "loss" in found.metrics}
        best = min(losses, key=losses.__getitem__) if losses else None
        for step in steps[: -self.keep]:
            if step != best:
                with contextlib.suppress(OSError):
                    self._remove(self.folder / name_of(step))

    def _remove(self, checkpoint: Path) -> None:
        """At once, as others see it: never half of it is there."""
        gone = self.folder / f".gone-{checkpoint.name}"
        shutil.rmtree(gone, ignore_errors=True)
        checkpoint.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    # ---- reading ----

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, oldest first."""
        found = [p.name.removeprefix("step-") for p in self.folder.glob("step-*")] if self.folder.is_dir() else []
        return sorted(int(s) for s in found if s.isdigit())

    def _note(self, step: int) -> Saved | None:
        with contextlib.suppress(UserError):
            return self.note(step)
        return None

    def note(self, step: int) -> Saved:
        """checkpoint.json, checked. UserError where it is damaged."""
        path = self.folder / name_of(step) / NOTE
        try:
            note = json.loads(path.read_text())
            digest = note.pop("sha256")
            if digest != _digest_of(note):
                raise ValueError("its content has another SHA-256 than it says")
            if note.pop("format") != FORMAT:
                raise ValueError("it has another format")
            note["random"] = tuple(note["random"])
            return Saved(**note)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UserError("checkpoint-damaged", f"{path}: the checkpoint cannot be used", found=str(e)[:200]) from e

    def load(self, step: int) -> tuple[Saved, State]:
        """A checkpoint as this rank needs it, every file verified."""
        saved = self.note(step)
        folder = self.folder / name_of(step)
        tensors: dict[str, Tensor] = {}
        for number, (name, digest) in enumerate(saved.files.items()):
            path = folder / name
            try:
                with open(path, "rb") as f:
                    found = hashlib.file_digest(f, "sha256").hexdigest()
            except OSError as e:
                raise UserError("checkpoint-damaged", f"{path}: the checkpoint cannot be used", found=str(e)[:200]) from e
            if found != digest:
                raise UserError("checkpoint-damaged", f"{path}: the checkpoint cannot be used",
                                found=f"sha256 {found[:16]}...", expected=f"sha256 {digest[:16]}...")  # fmt: skip
            own = number == self.rank and saved.ranks == self.ranks
            for key, tensor in read(path)[0].items():
                # Only buffers are in several files: this rank's own where the number of ranks is the same, else rank 0's.
                if key not in tensors or own:
                    tensors[key] = tensor
        return saved, State(tensors, saved.step, saved.random, saved.hyper)

    def newest(self) -> tuple[Saved, State] | None:
        """The newest checkpoint that is whole; damaged ones are named and passed over. None where there is none at all."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.load(step)
            except TileworkError as e:
                earlier = [s for s in steps if s < step]
                then = f"falling back to step {earlier[-1]}" if earlier else "there is no earlier one"
                if self.rank == 0:
                    self.report(f"{e.summary} ({e.found}); {then}")
        if steps:
            raise UserError("checkpoint-damaged", f"{self.folder}: none of its {len(steps)} checkpoints can be used",
                            fix="start again in another folder, or restore a checkpoint from a copy")  # fmt: skip
        return None


def file_of(rank: int, ranks: int) -> str:
    return f"tensors-{rank:05d}-of-{ranks:05d}.safetensors"


def _digest_of(note: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _failed(part: Path) -> Path:
    return part.with_suffix(".failed")


def _until(met: Callable[[], bool], part: Path, problem: str) -> None:
    end = time.monotonic() + PATIENCE
    while not met():
        if _failed(part).exists():
            raise MachineError("checkpoint-ranks", f"another rank could not write its part of {part}",
                               fix="it says why; that checkpoint is left out")  # fmt: skip
        if time.monotonic() > end:
            raise MachineError("checkpoint-ranks", problem, found=f"nothing after {PATIENCE:.0f} s",
                               fix="all ranks need to see the run's folder: put it on a file system that they share")  # fmt: skip
        time.sleep(0.01)
