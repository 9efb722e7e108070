"""Slurm as a queue, by its own commands: sbatch, squeue and scancel.

Slurm forgets a job minutes after it ended, and not every site keeps accounts. So the batch script that is submitted notes how the
program ended in ID.json, and what was submitted is kept beside it in ID.job.json, in a folder of the user's that the nodes share.
What Slurm says counts as long as it knows the job.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MachineError, UserError
from . import batch
from .spec import Job, Spec, State

OURS = b"# Tilework: over the local queue"  # a line of our own sbatch, squeue, ...: those are no Slurm
SECONDS = 20.0  # that a client may take
OUTAGE = 300.0  # seconds without an answer that a wait bears: a controller that is started again
KEPT, KEPT_SECONDS = 2000, 30 * 86400.0  # records; older ones go

_STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"), "PENDING"),
    **dict.fromkeys(("COMPLETING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"), "RUNNING"),
    **dict.fromkeys(("FAILED", "OUT_OF_MEMORY", "DEADLINE"), "FAILED"),
    **dict.fromkeys(("CANCELLED", "REVOKED"), "CANCELLED"),
    **dict.fromkeys(("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "LAUNCH_FAILED"), "LOST"),
    "COMPLETED": "COMPLETED",
    "TIMEOUT": "TIMEOUT",
}  # fmt: skip
_REASONS = {
    "": "", "None": "", "NonZeroExitCode": "",
    "Priority": "others are before it", "Resources": "it waits for resources", "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "a job that it waited for did not end well", "BeginTime": "its time has not come",
    "JobHeldUser": "it is held", "JobHeldAdmin": "it is held by an administrator", "TimeLimit": "its time was over",
    "NodeDown": "its node went down", "OUT_OF_MEMORY": "it used more memory than it had", "DEADLINE": "its deadline was over",
    "NODE_FAIL": "its node went down", "PREEMPTED": "another job took its place", "BOOT_FAIL": "its node did not boot",
    "TIMEOUT": "its time was over", "SUSPENDED": "it is suspended", "COMPLETING": "it is ending",
}  # fmt: skip
_SILENT = re.compile(
    r"contact slurm|connect|timed? ?out|zero bytes|munge|authenticat|configuration source|communication", re.IGNORECASE
)


# ---- what Slurm says


class _Note(msgspec.Struct):
    """What the batch script wrote; without `ended`, how it began."""

    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    signals: str = ""
    nodes: str = ""
    runs: int = 0


class _Record(msgspec.Struct, omit_defaults=True):
    """What was submitted, and what is known of it beside Slurm."""

    spec: Spec
    submitted: float
    cancelled: float | None = None
    last: Job | None = None  # how it ended, by Slurm's word


def _number(value: Any) -> float | None:
    """A number as the releases write it: 5, "5", null, {"set": true, "infinite": false, "number": 5}."""
    if isinstance(value, dict):
        return None if not value.get("set", True) or value.get("infinite") else _number(value.get("number"))
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _exit_code(value: Any) -> int | None:
    """As a shell says it, from a wait status or from what newer releases take it apart to."""
    if isinstance(value, dict) and ("return_code" in value or "signal" in value):
        sent = value.get("signal") or {}
        number = _number(sent.get("id", sent.get("signal_id")) if isinstance(sent, dict) else sent)
        code = _number(value.get("return_code"))
        return 128 + int(number) if number else None if code is None else int(code)
    status = _number(value)
    if status is None:
        return None
    return 128 + (int(status) & 127) if int(status) & 127 else int(status) >> 8


def told(entry: dict[str, Any]) -> Job:
    """One job of `squeue --json`: the only place that knows its fields. They changed between the releases."""
    words = entry.get("job_state") or "PENDING"
    words = [words] if isinstance(words, str) else [str(w) for w in words]
    word = next((w for w in words if w in ("COMPLETING", "REQUEUED")), words[0])
    state = _STATES.get(word, "RUNNING")
    over = state not in ("PENDING", "RUNNING")
    why = str(entry.get("state_reason") or "")
    reason = _REASONS.get(word) or _REASONS.get(why, why) or str(entry.get("state_description") or "")
    if word not in _STATES:
        reason = f"Slurm calls it {word}"
    code = _exit_code(entry.get("exit_code")) if over else None
    if state == "FAILED" and code and not reason:
        reason = f"it was ended by signal {code - 128}" if code > 128 else f"it exited with {code}"
    nodes = str(entry.get("nodes") or "")
    minutes = _number(entry.get("time_limit"))
    try:
        labels = json.loads(entry.get("comment") or "{}")
        labels = {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else {}
    except ValueError:  # somebody's own comment
        labels = {}
    spec = Spec(
        command=(str(entry["command"]),) if entry.get("command") else (),
        name=str(entry.get("name") or ""),
        num_tasks=int(_number(entry.get("tasks")) or 1),
        num_nodes=int(_number(entry.get("node_count")) or 1),
        time_limit=None if minutes is None else minutes * 60,
        labels=labels,
        folder=str(entry.get("current_working_directory") or ""),
    )
    return Job(
        id=str(int(_number(entry.get("job_id")) or 0)),
        spec=spec,
        state=state,
        user=str(entry.get("user_name") or ""),
        reason=reason,
        exit_code=code if code or state == "COMPLETED" else None,
        submitted=_number(entry.get("submit_time")) or 0.0,
        started=(_number(entry.get("start_time")) or None) if nodes and state != "PENDING" else None,
        ended=(_number(entry.get("end_time")) or None) if over else None,
        nodes=nodes,
        output=str(entry.get("standard_output") or ""),
        error=str(entry.get("standard_error") or entry.get("standard_output") or ""),
        runs=int(_number(entry.get("restart_cnt")) or 0) + (state != "PENDING" and bool(nodes)),
    )


def _remembered(id: str, record: _Record, note: _Note | None) -> Job:
    """A job that Slurm has forgotten."""
    if record.last is not None:
        return record.last
    job = Job(id=id, spec=record.spec, state="LOST", submitted=record.submitted)
    if note is None:
        if record.cancelled:
            job.state, job.ended = "CANCELLED", record.cancelled
        else:
            job.reason = (
                "Slurm does not know it any more, and it left no word: it never began, or its node could not write to this folder"
            )
        return job
    job.started, job.ended, job.exit_code, job.nodes, job.runs = note.started, note.ended, note.exit_code, note.nodes, note.runs
    end = note.ended or 0.0
    if "TERM" in note.signals.split() and record.cancelled:
        job.state = "CANCELLED"
    elif "TERM" in note.signals.split() and record.spec.time_limit and end - (note.started or end) >= record.spec.time_limit:
        job.state, job.reason = "TIMEOUT", "its time was over"
    elif note.exit_code is None:
        job.reason = "Slurm does not know it any more, and it did not say how it ended"
        if note.signals:
            job.reason += f", after signal {note.signals.split()[-1]}"
    elif note.exit_code == 0:
        job.state = "COMPLETED"
    else:
        job.state = "FAILED"
        job.reason = (
            f"it was ended by signal {note.exit_code - 128}" if note.exit_code > 128 else f"it exited with {note.exit_code}"
        )
    return job


# ---- the clients


def _client(name: str) -> str | None:
    """A command of Slurm's on PATH that is not one of ours."""
    for place in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(place or ".", name)
        try:
            with open(path, "rb") as file:
                if os.access(path, os.X_OK) and OURS not in file.read(4096):
                    return path
        except OSError:
            continue
    return None


def found() -> bool:
    """Is there a real Slurm here, and does it know its cluster? A client without a configuration is only an installed package;
    one that asks the network for it (configless) is used with --queue slurm."""
    places = (
        os.environ.get("SLURM_CONF", ""),
        "/etc/slurm/slurm.conf",
        "/etc/slurm-llnl/slurm.conf",
        "/run/slurm/conf/slurm.conf",
    )
    return _client("sbatch") is not None and any(place and os.path.exists(place) for place in places)


def _allowed() -> float:
    text = os.environ.get("TILEWORK_SLURM_TIMEOUT", "")
    try:
        return max(0.1, float(text)) if text else SECONDS
    except ValueError:
        raise UserError("slurm-timeout", f"TILEWORK_SLURM_TIMEOUT is {text!r}", expected="seconds, such as 20") from None


def _silent(name: str, text: str, what: str = "") -> MachineError:
    fix = "see that slurmctld runs (scontrol ping), and try again" + (f"; {what}" if what else "")
    return MachineError("slurm-silent", "Slurm does not answer", found=f"{name}: {text}", fix=fix)


def _run(name: str, *words: str, text: str = "", environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A client's answer, whatever it is. MachineError where its controller does not answer."""
    path = _client(name)
    if path is None:
        raise MachineError("slurm-missing", f"there is no {name} on PATH", fix="use a machine from which jobs can be submitted")
    env = os.environ if environment is None else environment
    env = {k: v for k, v in env.items() if not k.startswith(("SQUEUE_", "SCANCEL_"))}  # they would filter and format
    unsure = "the job may have been submitted: look at squeue first" if name == "sbatch" else ""
    try:
        done = subprocess.run(
            [path, *words], input=text, env=env, capture_output=True, text=True, errors="replace", timeout=_allowed()
        )
    except subprocess.TimeoutExpired:
        raise _silent(name, f"no answer in {_allowed():g} seconds", unsure) from None
    except OSError as error:
        raise MachineError("slurm-missing", f"{path} cannot be run", found=str(error)) from None
    if done.returncode and _SILENT.search(done.stderr):
        raise _silent(name, done.stderr.strip())
    return done


def _told() -> dict[str, Job]:
    """This user's jobs that Slurm knows, by id. Release 22.05 ignores filters beside --json; newer ones need them."""
    me = pwd.getpwuid(os.getuid()).pw_name
    done = _run("squeue", "--json", "--states=all", f"--user={me}")
    try:
        answer = json.loads(done.stdout, strict=False) if not done.returncode else {}
        errors = [e.get("description") or e.get("error") or str(e) for e in answer.get("errors") or ()]
        if errors:  # of a controller that is down, with exit code 0 and no jobs
            raise _silent("squeue", "; ".join(map(str, errors)) + (f" ({done.stderr.strip()})" if done.stderr.strip() else ""))
        entries = [e for e in answer["jobs"] if _number(e.get("user_id")) == os.getuid() or e.get("user_name") == me]
        return {job.id: job for job in map(told, entries)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MachineError(
            "slurm-answer", "squeue --json says something that this program cannot read",
            found=done.stderr.strip() or f"{error}: {done.stdout[:200]}", expected="Slurm 21.08 or newer",
        ) from None  # fmt: skip


def state_folder() -> Path:
    """$TILEWORK_JOBS, or tilework/jobs below $XDG_STATE_HOME or ~/.local/state."""
    if place := os.environ.get("TILEWORK_JOBS"):
        return Path(place).absolute()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tilework" / "jobs"


class SlurmQueue:
    kind = "slurm"

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or state_folder()) / "slurm"

    def rendered(self, spec: Spec) -> str:
        """The batch script that `submit` gives to sbatch."""
        return batch.rendered(spec, self.folder)

    def submit(self, spec: Spec) -> Job:
        self._make_folder()
        spec = msgspec.structs.replace(spec, after=self._still(spec.after)) if spec.after else spec
        text = self.rendered(spec)
        environment = dict(os.environ) if spec.environment is None else dict(spec.environment)
        if "SLURM_CONF" in os.environ:
            environment.setdefault("SLURM_CONF", os.environ["SLURM_CONF"])
        for line in text.splitlines():  # a variable would count for more than a line of the script
            if match := re.match(r"#SBATCH --([a-z-]+)", line):
                name = {"time": "timelimit"}.get(match[1], match[1]).replace("-", "_").upper()
                environment.pop(f"SBATCH_{name}", None)
        done = _run("sbatch", "--parsable", text=text, environment=environment)
        id = done.stdout.strip().partition(";")[0]
        if done.returncode or not id.isdecimal():
            said = done.stderr.strip() or done.stdout.strip() or f"sbatch exited with {done.returncode}"
            raise UserError("slurm-refused", "Slurm does not take the job", found=said, fix="see sinfo for what the cluster has")
        self._note_path(id).unlink(missing_ok=True)  # of an older cluster's job of that number
        record = _Record(spec=msgspec.structs.replace(spec, environment=None), submitted=time.time())
        self._save(id, record)
        self._forget()
        return self._dressed(Job(id=id, spec=spec, state="PENDING", submitted=record.submitted), record)

    def jobs(self, *, ended: bool = True, limit: int | None = None, labels: dict[str, str] | None = None) -> list[Job]:
        jobs = [job for job in self._all(_told()).values() if ended or not job.is_over]
        jobs = [job for job in jobs if all(job.spec.labels.get(k) == v for k, v in (labels or {}).items())]
        jobs.sort(key=lambda job: (job.submitted, int(job.id)))
        return jobs[max(0, len(jobs) - limit) :] if limit is not None else jobs

    def job(self, id: str) -> Job:
        return self._some([id])[0]

    def cancel(self, id: str, number: int | None = None) -> None:
        job = self.job(id)
        if job.is_over:
            raise UserError("job-over", f"job {id} has ended already", found=job.state)
        if number is not None and job.state == "PENDING":
            raise UserError("job-over", f"job {id} does not run", found=job.state)
        words = []
        if number is not None:
            record = self._record(id)
            # Slurm's default, the steps alone, would miss a program that the batch script runs itself
            own = number != signal.SIGKILL and not batch.by_steps(record.spec if record else job.spec)
            sent = batch.CARRIED.get(number, number) if own and record else number
            words = [f"--signal={batch.slurm_signal(sent)}", *(["--batch"] if own else [])]
        if number in (None, signal.SIGKILL) and (record := self._record(id)):
            self._save(id, msgspec.structs.replace(record, cancelled=time.time()))
        done = _run("scancel", *words, id)
        said = done.stderr.strip()
        if (done.returncode or "error" in said) and not self.job(id).is_over:
            raise UserError("slurm-refused", f"Slurm does not {'end' if number is None else 'signal'} job {id}", found=said)

    def label(self, id: str, labels: dict[str, str | None]) -> Job:
        job = self.job(id)
        record = self._record(id) or _Record(spec=job.spec, submitted=job.submitted)
        kept = {k: v for k, v in {**record.spec.labels, **labels}.items() if v is not None}
        record.spec = msgspec.structs.replace(record.spec, labels=kept)
        self._make_folder()
        self._save(id, record)
        return self._dressed(job, record)

    def wait(self, ids: list[str], timeout: float | None = None) -> list[Job]:
        begun = heard = time.monotonic()
        pause = 0.2
        while True:
            try:
                jobs = self._some(ids)
                heard = time.monotonic()
            except MachineError as error:
                if error.id != "slurm-silent" or time.monotonic() - heard > OUTAGE:
                    raise
                jobs = []
            if not ids or (jobs and all(job.is_over for job in jobs)):
                return jobs
            left = math.inf if timeout is None else begun + timeout - time.monotonic()
            if left <= 0:
                waiting = [f"{job.id} ({job.state})" for job in jobs if not job.is_over] or ids
                raise UserError("job-wait", f"after {timeout:g} seconds not every job has ended", found=", ".join(waiting))
            time.sleep(min(pause, left))
            pause = min(5.0, pause * 1.3)

    # what is kept

    def _some(self, ids: list[str]) -> list[Job]:
        all = self._all(_told(), ids)
        for id in ids:
            if id not in all:
                raise UserError("job-unknown", f"there is no job {id}", fix="tilework job list shows those that there are")
        return [all[id] for id in ids]

    def _all(self, known: dict[str, Job], ids: list[str] | None = None) -> dict[str, Job]:
        """Slurm's word, and for what it has forgotten the jobs' own."""
        found = {id: job for id, job in known.items() if ids is None or id in ids}
        for id in self._ids() if ids is None else ids:
            record = self._record(id)
            if record is None:
                continue
            job, note = found.get(id), self._note(id)
            if job is None:
                job = _remembered(id, record, note)
            elif job.is_over:
                if note is not None and note.exit_code is not None:
                    job.exit_code = note.exit_code
                if record.last is None:
                    self._save(id, msgspec.structs.replace(record, last=job))
            found[id] = self._dressed(job, record)
        return found

    def _still(self, after: tuple[str, ...]) -> tuple[str, ...]:
        """Without those that ended well, and that Slurm has forgotten: it would refuse a job that waits for one."""
        known = _told()
        forgotten = [id for id in after if id not in known and not id.startswith("any:")]
        good = {id for id, job in self._all({}, forgotten).items() if job.state == "COMPLETED"}
        return tuple(id for id in after if id not in good)

    def _dressed(self, job: Job, record: _Record) -> Job:
        """With what was submitted, which Slurm knows only in part."""
        spec = record.spec
        folder = Path(spec.folder or job.spec.folder or os.getcwd())
        user = job.user or pwd.getpwuid(os.getuid()).pw_name
        name = Job(id=job.id, spec=spec, state="PENDING").name
        first = re.split(r"[,\[]", job.nodes)[0] if "[" not in job.nodes else ""
        signs = {"j": job.id, "A": job.id, "x": name, "u": user, "%": "%", **({"N": first} if first else {})}

        def path(pattern: str) -> str:
            return str(folder / re.sub(r"%([a-zA-Z%])", lambda m: signs.get(m[1], m[0]), pattern))

        job.user, job.submitted = user, record.submitted
        if spec.output or not batch.says(batch.own_lines(spec.script), "o", "output"):
            job.output = path(spec.output or f"{self.folder}/%j.out")
            job.error = path(spec.error or spec.output or f"{self.folder}/%j.err")
        job.spec = spec if spec.folder or not job.spec.folder else msgspec.structs.replace(spec, folder=job.spec.folder)
        return job

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise MachineError("slurm-folder", "the folder for what is known of jobs cannot be made", found=str(error),
                               fix="set TILEWORK_JOBS to a folder that this machine and the nodes share") from None  # fmt: skip

    def _ids(self) -> Iterator[str]:
        return (p.name.removesuffix(".job.json") for p in self.folder.glob("*.job.json"))

    def _note_path(self, id: str) -> Path:
        return self.folder / f"{id}.json"

    def _record(self, id: str) -> _Record | None:
        try:
            return msgspec.json.decode((self.folder / f"{id}.job.json").read_bytes(), type=_Record) if id.isdecimal() else None
        except (OSError, msgspec.MsgspecError):
            return None

    def _note(self, id: str) -> _Note | None:
        try:
            return msgspec.json.decode(self._note_path(id).read_bytes(), type=_Note)
        except (OSError, msgspec.MsgspecError):
            return None

    def _save(self, id: str, record: _Record) -> None:
        path = self.folder / f"{id}.job.json"
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            new.write_bytes(msgspec.json.encode(record))
            new.replace(path)
        except OSError as error:
            raise MachineError("slurm-folder", "what is known of a job cannot be kept", found=str(error),
                               fix="set TILEWORK_JOBS to a folder that this machine and the nodes share") from None  # fmt: skip

    def _forget(self) -> None:
        """Old records, and what the jobs wrote beside them."""
        records = [(p.stat().st_mtime, p) for p in self.folder.glob("*.job.json")]
        for when, path in sorted(records)[: max(0, len(records) - KEPT)]:
            if when < time.time() - KEPT_SECONDS:
                id = path.name.removesuffix(".job.json")
                for name in (f"{id}.out", f"{id}.err", f"{id}.json", path.name):
                    (self.folder / name).unlink(missing_ok=True)
