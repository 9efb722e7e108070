"""One job, from its turn to its end: waits for its tiles, runs it, ends it when its time is over or somebody says so, and writes
down what became of it.

A process of its own for each job, which nobody else's end touches. Whatever the job starts stays below it (a subreaper), so
nothing of the job outlives it; if it is killed itself, its keeper finds what is left by the job's mark in the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import TileworkError
from ..parallel.launch import from_terminal
from ..tiles import alive, client
from ..tiles.client import SERVICE
from ..tiles.machine import ranges
from .book import Book
from .spec import SHARED, Spec, State

MARK = "TILEWORK_JOB_MARK"  # in the environment of all that a job starts
KILL_SECONDS = 10.0  # that a job has between SIGTERM and SIGKILL; TILEWORK_KILL_WAIT
LOG_BYTES = 64 << 20  # of a log that the queue keeps; then it is turned over, once
_LONG = 6 * 86400.0  # for tiles; then the request is made again
_PDEATHSIG, _SUBREAPER = 1, 36  # prctl


class Ended(Exception):
    """Somebody has said that the job is to end."""


def prctl(what: int, value: int) -> None:
    ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def mark_of(book: Book, id: int) -> str:
    """Of one job of one queue."""
    return f"{book.folder}:{id}"


class Supervisor:
    """attached: the job's output is this process's own, and so is its input (srun)."""

    def __init__(self, book: Book, id: int, *, attached: bool = False, keeper: int | None = None) -> None:
        self.book, self.id, self.attached, self.keeper = book, id, attached, keeper
        self.pid, self.start = os.getpid(), alive.start_time(os.getpid()) or 0
        self.cancelled = self.interrupted = False
        self.child: subprocess.Popen[bytes] | None = None

    def run(self, in_line: Callable[[str], None] = lambda _: None) -> int:
        """Its exit code, as a shell says it. in_line: called as soon as it waits for tiles, or has them."""
        prctl(_SUBREAPER, 1)
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._asked_to_end)
        job = self.book.job(self.id)
        lease: client.Lease | None = None
        try:
            lease = self._tiles(job.spec, in_line)
        except Ended:
            self.book.end(self.id, "CANCELLED", was=("PENDING",), reason="cancelled while it waited")
            return 130
        except TileworkError as e:
            found = f": {e.found}" if e.found else ""
            self.book.end(self.id, "FAILED", was=("PENDING",), reason=f"[{e.id}] {e.summary}{found}")
            print(f"{e}", file=sys.stderr, flush=True) if self.attached else None
            return e.exit_code
        code = 1
        try:
            in_line("")
            code = self._run(job.spec, ranges(lease.tiles) if lease is not None else "")
            return code
        finally:
            if lease is not None:
                lease.release()

    def _asked_to_end(self, number: int, _: object) -> None:
        self.cancelled = True
        self.interrupted = self.interrupted or (self.attached and number == signal.SIGINT)
        if self.child is None:  # while it waits
            raise Ended

    def _tiles(self, spec: Spec, in_line: Callable[[str], None]) -> client.Lease | None:
        if spec.tiles == SHARED:
            return None
        said = ""

        def waits(line: str) -> None:
            nonlocal said
            in_line(line)
            if line != said:
                said = line
                self.book.why(self.id, line)

        command = " ".join(spec.command) or spec.name
        while True:
            if self.book.is_cancelled(self.id):
                raise Ended
            try:
                return client.lease(spec.tiles or "chips:1", command=command, label=str(self.id), keeps=str(self.id), wait=_LONG,
                                    cpus=set(range(os.cpu_count() or 1)) if not self.attached else None,
                                    platform=self._environment().get("TILEWORK_PLATFORM") or None, report=waits)  # fmt: skip
            except TileworkError as e:
                if e.id == "tiles-timeout":
                    continue
                if e.id not in ("tiles-daemon", "tiles-limit"):
                    raise
                waits(f"{e.summary} ({e.found})")  # it may come back, or others may end
                time.sleep(2.0)

    # ---- running ----

    def _environment(self) -> dict[str, str]:
        if not hasattr(self, "_env"):
            self._env = self.book.environment(self.id)
        return self._env

    def _run(self, spec: Spec, tiles: str) -> int:
        output, error = self._files(spec)
        if not self.book.begin(self.id, self.pid, self.start, tiles=tiles, output=output, error=error):
            if self.book.is_cancelled(self.id):
                self.book.end(self.id, "CANCELLED", was=("PENDING",), reason="cancelled while it waited")
            return 130
        env = {**outside(self._environment()), **variables(spec, self.id, tiles, self.book)}
        folder = self.book.folder / str(self.id)
        try:
            words = self._words(spec, folder)
            files = self._opened(output, error)
        except OSError as e:
            return self._over("FAILED", None, f"{e.filename or spec.folder}: {e.strerror}")

        def born() -> None:
            prctl(_PDEATHSIG, signal.SIGKILL)
            os.umask(spec.umask if spec.umask >= 0 else 0o022)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)

        try:
            self.child = subprocess.Popen(
                words, cwd=spec.folder or None, env=env, stdout=files[0], stderr=files[1], preexec_fn=born,
                stdin=None if self.attached else subprocess.DEVNULL, start_new_session=not self.attached,
            )  # fmt: skip
        except OSError as e:
            code = 127 if isinstance(e, FileNotFoundError) else 126
            return self._over("FAILED", code, f"{e.filename or words[0]}: {e.strerror}")
        finally:
            for f in {*files} - {None}:
                os.close(f)  # type: ignore[arg-type]
        state, reason = self._watch(spec, [p for p in (output, error) if p.startswith(str(self.book.folder))])
        self._clear()
        status = self.child.returncode
        if not reason and status:
            reason = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        if state == "COMPLETED" and status:
            state = "FAILED"
        return self._over(state, 128 - status if status < 0 else status, reason, spec.requeue and state == "TIMEOUT")

    def _words(self, spec: Spec, folder: Path) -> list[str]:
        if spec.script:
            folder.mkdir(mode=0o700, exist_ok=True)
            path = folder / "script"
            path.write_text(spec.script)
            path.chmod(0o700)
            return [str(path), *spec.arguments]
        found = shutil.which(spec.command[0], path=self._environment().get("PATH"))
        first = [found or spec.command[0], *spec.command[1:]]
        if spec.num_tasks > 1:
            return [sys.executable, "-m", "tilework", "launch", "-n", str(spec.num_tasks), "--no-tag", "--", *first]
        return first

    def _files(self, spec: Spec) -> tuple[str, str]:
        """Where its output goes: two paths, which may be the same; none where it is this process's own."""
        if self.attached:
            return "", ""
        base = Path(spec.folder or "/")
        if spec.output:
            output = str(base / filled(spec.output, self.id, spec))
            return output, str(base / filled(spec.error, self.id, spec)) if spec.error else output
        kept = self.book.folder / str(self.id)
        return str(kept / "output.log"), str(base / filled(spec.error, self.id, spec)) if spec.error else str(kept / "error.log")

    def _opened(self, output: str, error: str) -> list[int | None]:
        if self.attached:
            return [None, None]
        (self.book.folder / str(self.id)).mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        first = os.open(output, flags, 0o600)
        return [first, first if error == output else os.open(error, flags, 0o600)]

    def _watch(self, spec: Spec, logs: list[str]) -> tuple[State, str]:
        """Until its first process has ended. (state, reason) as far as it was not its own doing."""
        assert self.child is not None
        began, done = time.monotonic(), os.pidfd_open(self.child.pid)
        limit = began + spec.time_limit if spec.time_limit is not None else None
        warn = limit - spec.signal[1] if limit is not None and spec.signal is not None else None
        watched = [done, self._wake]
        if self.keeper is not None:
            watched.append(self.keeper)
        state: State = "COMPLETED"
        reason, kill_at = "", None
        while self.child.poll() is None:
            now = time.monotonic()
            if self.cancelled and state == "COMPLETED":
                state, reason = "CANCELLED", "interrupted" if self.interrupted else "cancelled"
                if not self.interrupted:
                    self._send(signal.SIGTERM)
                elif not from_terminal():  # else the terminal has told everybody
                    self.child.send_signal(signal.SIGINT)
                kill_at = now + _kill_seconds()
            elif limit is not None and now >= limit and state == "COMPLETED":
                state, reason = "TIMEOUT", f"its time was over ({spec.time_limit:.0f} s)"
                self._send(signal.SIGTERM)
                kill_at = now + _kill_seconds()
            elif warn is not None and now >= warn:
                warn = None
                self._send(spec.signal[0])  # type: ignore[index]
            if kill_at is not None and now >= kill_at:
                self._send(signal.SIGKILL)
                kill_at = now + 1.0
            times = [t for t in (limit if state == "COMPLETED" else None, warn, kill_at) if t is not None]
            ready, _, _ = select.select(watched, [], [], max(0.0, min([1.0, *(t - now for t in times)])))
            if self._wake in ready:
                os.read(self._wake, 512)
            if self.keeper is not None and self.keeper in ready:  # the keeper has gone: the queue must go on
                watched.remove(self.keeper)
                os.close(self.keeper)
                self.keeper = None
                from .keeper import poke

                poke(self.book.folder)
            for log in logs:
                _turn_over(log)
        os.close(done)
        return state, reason

    def _send(self, number: int) -> None:
        for pid in below(self.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _clear(self) -> None:
        """What the job has left running ends with it."""
        until = time.monotonic() + 2.0
        number = signal.SIGTERM
        while left := [p for p in below(self.pid) if self.child is None or p != self.child.pid]:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            time.sleep(0.02)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if time.monotonic() > until:
                number = signal.SIGKILL

    def _over(self, state: State, code: int | None, reason: str, again: bool = False) -> int:
        """Written down; where that is not possible now (a full disk), as soon as it is."""
        while True:
            try:
                if again:
                    self.book.again(self.id, f"{reason}; in the queue again")
                else:
                    self.book.end(self.id, state, was=("RUNNING",), exit_code=code, reason=reason)
                return 1 if code is None else code
            except TileworkError as e:
                print(f"tilework: job {self.id} ended ({state}, exit code {code}); this cannot be written down now: {e.found}",
                      file=sys.stderr, flush=True)  # fmt: skip
                time.sleep(1.0)


def _kill_seconds() -> float:
    try:
        return float(os.environ.get("TILEWORK_KILL_WAIT", KILL_SECONDS))
    except ValueError:
        return KILL_SECONDS


def below(pid: int) -> list[int]:
    """All descendants of a process, by the kernel's word; without services that one of them has started, such as the daemon of
    tiles: they are not the job's."""
    found, ask = [], [pid]
    while ask:
        parent, children = ask.pop(), list[int]()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):
                    children += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
        own = [child for child in children if not _is_service(child)]
        found += own
        ask += own
    return found


def _is_service(pid: int) -> bool:
    try:
        return f"{SERVICE}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _turn_over(path: str) -> None:
    """A log that the queue keeps does not fill the disk: its last part is kept beside it, what was before that is gone."""
    with contextlib.suppress(OSError):
        if (size := os.stat(path).st_size) > LOG_BYTES:
            with open(path, "rb") as log, open(f"{path}.1", "wb") as kept:
                log.seek(size - LOG_BYTES)
                shutil.copyfileobj(log, kept)
            os.truncate(path, 0)


def filled(pattern: str, id: int, spec: Spec) -> str:
    """Slurm's patterns in names of files."""
    values = {"j": str(id), "A": str(id), "J": str(id), "x": spec.name or "job", "u": pwd.getpwuid(os.getuid()).pw_name,
              "N": socket.gethostname(), "n": "0", "t": "0", "s": "batch", "a": "4294967294", "%": "%"}  # fmt: skip

    def value(found: re.Match[str]) -> str:
        return values[found[2]].zfill(int(found[1] or 0)) if found[2] in values else found[0]

    return re.sub(r"%([0-9]*)([A-Za-z%])", value, pattern)


_OF_ANOTHER = re.compile(r"SLURM_(?!CONF$)|PMI_|OMPI_COMM_|TILEWORK_(RANK|WORLD_SIZE|LOCAL_|LAUNCH|JOB(_MARK)?$|SERVICE)")


def outside(environment: dict[str, str]) -> dict[str, str]:
    """Without what says which job, or which rank of one, somebody is: a job may be submitted by another."""
    found = {k: v for k, v in environment.items() if not _OF_ANOTHER.match(k)}
    if found.get("TILEWORK_TILES", "").partition(":")[0] == "job":
        del found["TILEWORK_TILES"]
    return found


def variables(spec: Spec, id: int, tiles: str, book: Book) -> dict[str, str]:
    """What a job finds in its environment: our words, and those of Slurm's that scripts read."""
    host, tasks = socket.gethostname(), str(spec.num_tasks)
    found = {
        MARK: mark_of(book, id), "TILEWORK_JOB": str(id),
        "SLURM_JOB_ID": str(id), "SLURM_JOBID": str(id), "SLURM_JOB_NAME": spec.name or "job", "SLURM_SUBMIT_DIR": spec.folder,
        "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks, "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": host,
        "SLURM_NODELIST": host, "SLURM_TASKS_PER_NODE": tasks, "SLURMD_NODENAME": host, "SLURM_SUBMIT_HOST": host,
        "SLURM_JOB_PARTITION": spec.options.get("partition", PARTITION), "SLURM_CLUSTER_NAME": "local",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": str(os.cpu_count() or 1),
        "SLURM_JOB_USER": pwd.getpwuid(os.getuid()).pw_name, "SLURM_JOB_UID": str(os.getuid()),
    }  # fmt: skip
    # An mpirun that finds itself in a job of Slurm's would start its ranks by srun, over Slurm's own network.
    found |= {"HYDRA_BOOTSTRAP": "fork", "HYDRA_RMK": "user", "OMPI_MCA_plm": "^slurm", "OMPI_MCA_ras": "^slurm"}
    if spec.cpus_per_task:
        found["SLURM_CPUS_PER_TASK"] = str(spec.cpus_per_task)
    if spec.tasks_per_node:
        found["SLURM_NTASKS_PER_NODE"] = str(spec.tasks_per_node)
    if tiles:
        found["TILEWORK_TILES"] = "job"
    return found


PARTITION = "local"
