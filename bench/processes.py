"""The processes of the benchmark, seen from the one that measures: started, asked, and ended with all that they started.

Worker       a contender's process (worker.py), asked by lines of JSON, kept over many rows
run_child    a process that does one thing and ends
CpuClock     how much of the cores' time went to processes that are not ours: a noisy machine should not pass unnoticed
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .worker import environment

SLICE_LIMIT_SECONDS = 900  # a slice, the losses, an answer at all: longer than this is a hang
Report = Callable[[str], None]


class ContenderError(Exception):
    """A contender could not do what the row asks; the message says why."""


@dataclass(frozen=True)
class Settings:
    out: Path
    cores: tuple[int, ...]
    rounds: int = 9
    slice_seconds: float = 0.5
    prepare_limit: float = 600.0  # seconds that a contender may take to get ready for a row
    quick: bool = False  # the first variant only
    skip: frozenset[tuple[str, str]] = frozenset()  # (contender, row)
    report: Report = field(default=lambda text: print(text, file=sys.stderr, flush=True))


class Worker:
    """A contender's process. It is a session of its own, so that its helpers (compilers) end with it."""

    def __init__(self, kind: str, name: str, settings: Settings) -> None:
        self.name, self.closed = name, False
        logs = settings.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{kind}-{name}.log"
        command = [sys.executable, "-m", "bench.worker", kind, name, str(settings.out), ",".join(map(str, settings.cores))]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(name, settings.out, len(settings.cores)),
                start_new_session=True,
            )

    def call(self, do: str, limit: float = SLICE_LIMIT_SECONDS, **arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError as e:
            raise ContenderError(f"its process has ended ({self.process.poll()}); see {self.log}") from e
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        if not ready:
            self.close()
            raise ContenderError(f"{do} took more than {limit:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise ContenderError(f"its process ended during {do} with {self.process.returncode}; see {self.log}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderError(answer["error"])
        return answer["result"]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        if not self.closed:
            end_group(self.process)
            self.closed = True


class Workers:
    """The processes of one kind, started when first needed and again after a failure."""

    def __init__(self, kind: str, settings: Settings) -> None:
        self.kind, self.settings = kind, settings
        self._workers: dict[str, Worker] = {}

    def get(self, name: str) -> Worker:
        worker = self._workers.get(name)
        if worker is not None and not worker.alive:
            worker.close()
        if worker is None or worker.closed:
            worker = self._workers[name] = Worker(self.kind, name, self.settings)
        return worker

    def pids(self) -> list[int]:
        return [w.process.pid for w in self._workers.values() if w.alive]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()


def run_child(
    module: str, arguments: list[str], name: str, settings: Settings, limit: float, more: dict[str, str] | None = None
) -> dict[str, Any]:
    """A process that does one thing and prints RESULT and JSON. Its other output goes to the log."""
    logs = settings.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    env = {**environment(name, settings.out, len(settings.cores)), **(more or {})}
    with open(logs / f"{name}.log", "a") as log:
        process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=log, text=True, env=env, start_new_session=True)  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as e:
            raise ContenderError(f"took more than {limit:.0f} s") from e
        finally:
            end_group(process)
        log.write(output)
    for line in output.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    last = (logs / f"{name}.log").read_text().strip().rsplit("\n", 1)[-1]  # of a Python error, the line that says what
    raise ContenderError(f"its process ended with {process.returncode}: {last[:300]}")


def end_group(process: subprocess.Popen) -> None:
    """End a process that start_new_session made the head of its group, and what it started; no other."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class CpuClock:
    """The share of our cores that other processes used since the start of this clock (0 nothing, 1 everything)."""

    def __init__(self, workers: Workers) -> None:
        self.workers, self.start = workers, time.perf_counter()
        self.begin = self._others()

    def _others(self) -> float:
        """Seconds that our cores were busy, all together, less what our processes used."""
        ours = {f"cpu{core}" for core in self.workers.settings.cores}
        ticks = 0
        with open("/proc/stat") as f:
            for line in f:
                name, *values = line.split()
                if name in ours:  # user, nice, system, idle, iowait, irq, softirq, steal
                    ticks += sum(int(v) for i, v in enumerate(values[:8]) if i not in (3, 4))
        for pid in self.workers.pids():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
                fields = f.read().rsplit(")", 1)[1].split()  # after the name, which may hold anything
                ticks -= sum(int(v) for v in fields[11:15])  # user and system time, own and of ended children
        return ticks / os.sysconf("SC_CLK_TCK")

    def others(self) -> float:
        seconds = time.perf_counter() - self.start
        return max(0.0, (self._others() - self.begin) / (seconds * len(self.workers.settings.cores)))
