"""The folder of a run: everything about it, for whoever finds it later.

run.json          what was asked, the artifact and its hash, the machine; and how it ended
metrics.jsonl     a line for each step: step, epoch, loss, samples per second, seconds since the start,
                  learning rate, and the norm of the gradients where the artifact computes it
curves.png        the same as a picture
log.txt           what was said
checkpoints/      checkpoints.py
.lock             locked by the process that trains here
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..artifact.writer import write_whole
from ..errors import MachineError, UserError
from ..tiles import alive

NOTE, METRICS, LOG, LOCK, CHECKPOINTS = "run.json", "metrics.jsonl", "log.txt", ".lock", "checkpoints"


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.waiting: list[str] = []  # lines of metrics that could not be written yet
        self.problem = ""  # why

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def begin(self, asked: Mapping[str, Any], *, resume: bool) -> None:
        """Make the folder. UserError where it has a run already that is not to be continued."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError("run-folder", f"{self.path} is not a folder", fix="name a folder for the run")
        if not resume and (any(self.metrics()) or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))):
            raise UserError("run-folder", f"{self.path} has a run already",
                            fix="--resume continues it; or name another folder")  # fmt: skip
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            if not resume:  # what may be left of one that made no step
                (self.path / NOTE).unlink(missing_ok=True)
            self.note(**asked, environment=environment(), started=_now(), state="running", pid=os.getpid())

    def _lock(self) -> None:
        """For this process, as long as it lives. Two that train in one folder would spoil each other's checkpoints."""
        self._locked = open(self.path / LOCK, "a")  # noqa: SIM115
        try:
            alive.lock(self._locked.fileno())
        except OSError as e:
            raise UserError("run-folder", f"another process trains in {self.path}",
                            found=f"process {self.trainer() or 'unknown'}",
                            fix="wait until it ends, or name another folder") from e  # fmt: skip

    def unlock(self) -> None:
        self._locked.close()

    def trainer(self) -> int | None:
        """The process that trains here, where there is one."""
        try:
            with open(self.path / LOCK, "r+") as f:
                return alive.holder(f.fileno())
        except OSError:
            return None

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        text = json.dumps(finite({**self.read(), **facts}), indent=1, default=str)
        write_whole(self.path / NOTE, lambda f: f.write(text.encode() + b"\n"))

    def read(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / NOTE).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def say(self, text: str) -> None:
        """What cannot be written is left out: it has been said on the screen as well."""
        with contextlib.suppress(OSError), open(self.path / LOG, "a") as f:
            f.write(f"{_now()} {text}\n")

    def cut_metrics(self, step: int) -> None:
        """Forget what came after the checkpoint of this step: it will be computed again. A line that was cut off goes too."""
        kept = [json.dumps(finite(line)) + "\n" for line in self.metrics() if line["step"] <= step]
        with _writing(self.path):
            write_whole(self.path / METRICS, lambda f: f.write("".join(kept).encode()))

    def add_metrics(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Lines that the disk does not take wait for the next call: `waiting`, `problem`."""
        self.waiting += [json.dumps(finite(line)) + "\n" for line in lines]
        before = None
        try:
            with open(self.path / METRICS, "ab") as f:
                before = f.tell()
                f.write("".join(self.waiting).encode())
            self.waiting, self.problem = [], ""
        except OSError as e:
            self.problem = str(e)
            if before is not None:  # no half line
                with contextlib.suppress(OSError):
                    os.truncate(self.path / METRICS, before)

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The whole lines."""
        try:
            text = (self.path / METRICS).read_text()
        except OSError:
            return
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and isinstance(found.get("step"), int):
                yield {k: math.nan if v is None else v for k, v in found.items()}


def finite(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What is not a finite number becomes null: JSON has no other word for it."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in facts.items()}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise MachineError("run-unwritten", f"{path}: nothing can be written there", found=str(e),
                           fix="free some space, or name a folder that you can write to") from e  # fmt: skip


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "folder": os.getcwd(),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
