"""What a job is: what was asked for, what became of it, and what a queue can do with it."""

from __future__ import annotations

import re
import signal
from typing import Any, Literal, Protocol

import msgspec

from ..errors import UserError

# A job waits (PENDING), runs, and ends once: well (COMPLETED), with an exit code or a signal (FAILED), because somebody said so
# (CANCELLED), because its time was over (TIMEOUT), or because whoever ran it was killed or the machine went down (LOST).
State = Literal["PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "LOST"]
ENDED: tuple[State, ...] = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "LOST")
SHARED = "shared"


class Spec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was asked for. Either a command, or a script with its arguments."""

    command: tuple[str, ...] = ()
    script: str = ""  # the text of a batch script, which begins with #!
    arguments: tuple[str, ...] = ()  # of the script
    name: str = ""
    tiles: str = ""  # as tiles/asks.py reads it; empty: one chip; "shared": none
    num_tasks: int = 1  # how many ranks of the command; a script starts its own, with srun or tilework launch
    num_nodes: int = 1
    tasks_per_node: int = 0  # 0: not said
    cpus_per_task: int = 0
    time_limit: float | None = None  # seconds
    after: tuple[str, ...] = ()  # jobs that must have ended well; "any:ID": ended in any way
    labels: dict[str, str] = {}
    folder: str = ""  # where it runs
    environment: dict[str, str] | None = None  # None: as it is when the job is submitted
    umask: int = -1  # for the files that it makes; -1: as it is when the job is submitted
    output: str = ""  # a pattern (%j, %A, %x, %u, %N); empty: kept by the queue
    error: str = ""  # empty: where output goes, if that was given
    signal: tuple[int, float] | None = None  # sent to the job this many seconds before its time is over
    requeue: bool = False  # where its time was over, or the machine went down: into the queue again
    options: dict[str, str] = {}  # what only one kind of queue knows: partition, gres, nodelist, mpi


class Job(msgspec.Struct, kw_only=True):
    """What became of it."""

    id: str
    spec: Spec
    state: State
    user: str = ""
    reason: str = ""  # why it waits, or ended as it did, in words
    exit_code: int | None = None  # as a shell says it: 128 and the signal's number where one ended it
    submitted: float = 0.0  # wall clock, seconds
    started: float | None = None
    ended: float | None = None
    tiles: str = ""  # that it has, or had: 0-3
    nodes: str = ""
    output: str = ""  # files
    error: str = ""
    runs: int = 0  # how often it was started

    @property
    def name(self) -> str:
        return self.spec.name or (self.spec.command[0].rsplit("/", 1)[-1] if self.spec.command else "script")

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    def as_json(self) -> dict[str, Any]:
        """Without the environment, which may hold secrets."""
        found, spec = msgspec.to_builtins(self), msgspec.structs.asdict(self.spec)
        del spec["environment"]
        return {**found, "spec": msgspec.to_builtins(spec), "name": self.name}


class Queue(Protocol):
    """One that holds jobs: the machine's own, or Slurm's."""

    kind: str

    def submit(self, spec: Spec) -> Job: ...

    def jobs(self, *, ended: bool = True, limit: int | None = None, labels: dict[str, str] | None = None) -> list[Job]:
        """The newest last."""
        ...

    def job(self, id: str) -> Job:
        """UserError where there is none of that id."""
        ...

    def cancel(self, id: str, number: int | None = None) -> None:
        """End it; or send it a signal."""
        ...

    def label(self, id: str, labels: dict[str, str | None]) -> Job:
        """None takes a label away."""
        ...

    def wait(self, ids: list[str], timeout: float | None = None) -> list[Job]:
        """Until all of them have ended. UserError where the time runs out."""
        ...


def seconds_of(text: str) -> float:
    """A time limit as people and Slurm write it: 90s, 15m, 2h, 1d; minutes; MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""
    text = text.strip()
    if found := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text):
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    whole = re.fullmatch(r"[0-9]+", days) if dash else True
    if whole and len(parts) <= 3 and all(p.isdecimal() for p in parts):
        numbers = [int(p) for p in parts]
        if dash:
            hours, minutes, seconds = (*numbers, 0, 0)[:3]
            return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
        if len(numbers) == 1:
            return numbers[0] * 60.0
        hours, minutes, seconds = numbers if len(numbers) == 3 else (0, *numbers)
        return float(hours * 3600 + minutes * 60 + seconds)
    raise UserError("job-time", f"{text!r} is no time", expected="90s, 15m, 2h, 1d, minutes, HH:MM:SS or D-HH:MM:SS")


def signal_of(text: str) -> tuple[int, float]:
    """SIGNAL[@SECONDS], as USR1@60; Slurm's B: and R: before it say nothing here."""
    name, _, when = text.removeprefix("B:").removeprefix("R:").partition("@")
    try:
        number = int(name) if name.isdigit() else signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"].value
        return number, float(when or 60)
    except (KeyError, ValueError):
        raise UserError(
            "job-signal", f"{text!r} names no signal", expected="USR1@60: that signal, 60 seconds before the end"
        ) from None


def labels_of(words: list[str] | None) -> dict[str, str]:
    """NAME=VALUE, several times."""
    found: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name) or len(value) > 200:
            raise UserError(
                "job-label", f"{word!r} is no label", expected="NAME=VALUE; letters, digits, dot, - and _ in the name"
            )
        found[name] = value
    return found
