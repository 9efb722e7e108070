"""Slurm as a queue, by its own commands: sbatch, squeue and scancel.

Slurm forgets a job minutes after it ended, and not every site keeps accounts. So the batch script that is submitted notes how the
program ended in ID.json, and what was submitted is kept beside it in ID.job.json, in a folder of the user's that the nodes share.
What Slurm says counts as long as it knows the job.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pwd
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MachineError, UserError
from .spec import SHARED, Job, Spec, State

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
# Which signal brings another to the program by way of the batch script: STOP would stop the shell, and of a TERM it cannot know
# whether Slurm has sent it to the program as well, as it does without cgroups when it ends a job. CONT comes before every TERM of
# Slurm's, and of two trapped signals that come at once bash loses one: it must not be trapped.
_CARRIED = {
    int(sent): int(by)
    for sent, by in ((signal.SIGSTOP, signal.SIGTSTP), (signal.SIGTERM, signal.SIGPWR), (signal.SIGCONT, signal.SIGIO))
}
_TRAPPED = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
    signal.SIGTSTP, signal.SIGPWR, signal.SIGIO,
)  # fmt: skip


# ---- the batch script

# trap -: else bash starts what runs in the background deaf to INT and QUIT. A signal ends `wait` early: it waits again.
_WRAPPER = """\
# Tilework: how it ends is noted here, for when Slurm has forgotten the job.
tw_note={folder}/$SLURM_JOB_ID.json
tw_started=$(date +%s.%N) tw_signals= tw_program= tw_scratch=
tw_write() {{
    printf '{{"started": %s, "ended": %s, "exit_code": %s, "signals": "%s", "nodes": "%s", "runs": %d}}\\n' \\
        "$tw_started" "$1" "$2" "${{tw_signals# }}" "$SLURM_JOB_NODELIST" "$((SLURM_RESTART_COUNT + 1))" >"$tw_note.new" &&
        mv -f "$tw_note.new" "$tw_note"
}} 2>/dev/null
tw_ended() {{
    tw_write "$(date +%s.%N)" "$1"
    [ -z "$tw_scratch" ] || rm -rf "$tw_scratch"
}}
tw_caught() {{
    tw_signals="$tw_signals $1" tw_interrupted=1
    [ "$1" != TERM ] || tw_write null null
{requeue}    tw_pass "$1"
}}
{passing}trap 'tw_ended $?' EXIT
for tw_name in {trapped}; do trap "tw_caught $tw_name" "$tw_name"; done
tw_write null null
{program}
(trap - INT QUIT && exec "$@") &
tw_program=$!
for tw_name in $tw_signals; do tw_pass "$tw_name"; done
while :; do
    tw_interrupted=
    wait "$tw_program"
    tw_code=$?
    [ -n "$tw_interrupted" ] || break
done
exit "$tw_code"
"""
# Slurm requeues a job whose node went down, and not one whose time is over. It does as long as the job is about to end.
_REQUEUE = '    [ "$1" != TERM ] || [ $SECONDS -lt {seconds} ] || scontrol requeue "$SLURM_JOB_ID"\n'
_PASS = """\
# When Slurm ends a job it signals this shell alone where it has cgroups, elsewhere all processes. PWR, TSTP and IO are ours.
tw_pass() {
    [ -n "$tw_program" ] || return
    case $1 in
        PWR) kill -s TERM "$tw_program" ;;
        TSTP) kill -s STOP "$tw_program" ;;
        IO) kill -s CONT "$tw_program" ;;
        TERM) grep -q "/job_$SLURM_JOB_ID" /proc/self/cgroup && kill -s TERM "$tw_program" && kill -s CONT "$tw_program" ;;
        *) kill -s "$1" "$tw_program" ;;
    esac
} 2>/dev/null
"""
_PASS_NONE = "tw_pass() { :; }  # Slurm signals the tasks of srun itself\n"


def _line(name: str, value: str = "") -> str:
    """One line for sbatch, which takes a backslash for what follows it, inside of any quotes."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or re.search(r"[\n\r\0]", value):
        raise UserError(
            "slurm-option", f"--{name}={value!r} cannot stand in a batch script", expected="an option of sbatch's, one line"
        )
    if value and not re.fullmatch(r"[A-Za-z0-9_.,:@%+=/\[\]-]+", value):
        value = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"


def _own_lines(script: str) -> list[str]:
    """The script's own lines for sbatch: those before its first command."""
    found = []
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            found.append(line.rstrip())
    return found


def _has(lines: list[str], short: str, long: str) -> bool:
    pattern = rf"\s(--{long}\b" + (rf"|-{short})" if short else ")")
    return any(re.search(pattern, line) for line in lines)


def _by_steps(spec: Spec) -> bool:
    """Are signals for the tasks that srun starts? Else they are for the batch script's own process."""
    if spec.command:
        return spec.num_tasks > 1
    return re.search(r"^[^#\n]*\bsrun\b", spec.script, re.MULTILINE) is not None


def _clock(seconds: float) -> str:
    whole = max(1, math.ceil(seconds))
    return f"{whole // 86400}-{whole // 3600 % 24:02}:{whole // 60 % 60:02}:{whole % 60:02}"


def _lines(spec: Spec, folder: Path) -> list[str]:
    """For sbatch, of which a later one counts: what we take for granted, what the script says itself, and what was asked for."""
    own = _own_lines(spec.script)
    name = _line("job-name", Job(id="", spec=spec, state="PENDING").name)
    lines = [] if spec.name and own else [name]
    if not spec.output and not _has(own, "o", "output"):
        lines += [_line("output", f"{folder}/%j.out"), _line("error", f"{folder}/%j.err")]
    lines += [_line("no-requeue"), *own]
    if spec.name and own:
        lines.append(name)
    if spec.output:
        lines.append(_line("output", spec.output))
    if spec.error:
        lines.append(_line("error", spec.error))
    if spec.time_limit:
        lines.append(_line("time", _clock(spec.time_limit)))
    if spec.command or spec.num_tasks != 1:
        lines.append(_line("ntasks", str(spec.num_tasks)))
    if spec.command or spec.num_nodes != 1:
        lines.append(_line("nodes", str(spec.num_nodes)))
    if spec.tasks_per_node:
        lines.append(_line("ntasks-per-node", str(spec.tasks_per_node)))
    if spec.cpus_per_task:
        lines.append(_line("cpus-per-task", str(spec.cpus_per_task)))
    if any(not word.removeprefix("any:").isdecimal() for word in spec.after):
        raise UserError("job-after", "jobs to wait for are given by their numbers", found=", ".join(spec.after))
    if spec.after:  # a job whose turn cannot come ends, rather than wait for ever
        well = [i for i in spec.after if not i.startswith("any:")]
        some = [i.removeprefix("any:") for i in spec.after if i.startswith("any:")]
        words = [":".join(["afterok", *well])] * bool(well) + [":".join(["afterany", *some])] * bool(some)
        lines += [_line("dependency", ",".join(words)), _line("kill-on-invalid-dep", "yes")]
    if spec.signal and not _has(own, "", "signal"):
        number, before = spec.signal
        who = _slurm_signal(number) if _by_steps(spec) else f"B:{_slurm_signal(_CARRIED.get(number, number))}"
        lines.append(_line("signal", f"{who}@{math.ceil(before)}"))
    if spec.requeue:
        lines += [_line("requeue"), _line("open-mode", "append")]  # what the first run said stays
    if spec.folder:
        lines.append(_line("chdir", spec.folder))
    if spec.labels:
        lines.append(_line("comment", json.dumps(spec.labels, sort_keys=True)))
    for name, value in sorted(spec.options.items()):
        name = name.replace("_", "-")
        if name in ("array", "wrap", "wait", "parsable", "test-only"):
            raise UserError(
                "slurm-option", f"--{name} cannot be passed on to sbatch", fix="submit one job for each task of an array"
            )
        if name != "mpi":
            lines.append(_line(name, value))
    return lines


def _signal_name(number: int) -> str:
    """As bash knows it."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return str(number)


def _slurm_signal(number: int) -> str:
    """As Slurm knows it: some names it does not."""
    name = _signal_name(number)
    return name if name in ("HUP", "INT", "QUIT", "ALRM", "TERM", "USR1", "USR2", "CONT", "STOP", "TSTP", "KILL") else str(number)


def _program(spec: Spec) -> str:
    """What sets the words of the program."""
    if spec.command:
        words = ["srun"] if spec.num_tasks > 1 else []
        if words and spec.cpus_per_task:  # since 22.05 srun does not take it from the job
            words.append(f"--cpus-per-task={spec.cpus_per_task}")
        if words and "mpi" in spec.options:
            words.append(f"--mpi={spec.options['mpi']}")
        return f"set -- {shlex.join([*words, *spec.command])}"
    first = spec.script.partition("\n")[0]
    if not first.startswith("#!") or not first[2:].strip():
        raise UserError("job-script", "this does not look like a batch script", found=repr(first[:80]),
                        expected="a first line such as #!/bin/bash")  # fmt: skip
    end = f"TILEWORK_{hashlib.sha256(spec.script.encode()).hexdigest()[:16]}"  # its own hash cannot stand in it
    text = spec.script if spec.script.endswith("\n") else spec.script + "\n"
    interpreter = first[2:].strip().split(None, 1)  # as the kernel does it: at most one argument. /tmp may forbid programs
    line = shlex.join(interpreter) + ' "$tw_scratch/script" ' + shlex.join(spec.arguments)
    return (
        'tw_scratch=$(mktemp -d "${TMPDIR:-/tmp}/tilework-job.XXXXXX") || exit 1\n'
        f"cat >\"$tw_scratch/script\" <<'{end}'\n{text}{end}\n"
        f'chmod 700 "$tw_scratch/script"\nset -- {line.rstrip()}'
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
        if bool(spec.command) == bool(spec.script):
            raise UserError("job-spec", "a job is a command or a script", found="both" if spec.command else "neither")
        lines = ["#!/bin/bash", *_lines(spec, self.folder), ""]
        if spec.tiles:
            tiles = spec.tiles if spec.tiles == SHARED or spec.tiles.partition(":")[0] == "job" else f"job:{spec.tiles}"
            lines.append(f"export TILEWORK_TILES={shlex.quote(tiles)}")
        asked = spec.signal[0] if spec.signal else 0
        passing = _PASS_NONE if spec.command and _by_steps(spec) else _PASS
        trapped = [
            _signal_name(n)
            for n in sorted({*_TRAPPED, *([asked] if asked else [])} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT})
        ]
        folder = shlex.quote(str(self.folder))
        again = _REQUEUE.format(seconds=60 * math.ceil(spec.time_limit / 60) - 2) if spec.requeue and spec.time_limit else ""
        wrapper = _WRAPPER.format(
            folder=folder, passing=passing, trapped=" ".join(trapped), program=_program(spec), requeue=again
        )
        return "\n".join(lines) + "\n" + wrapper

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
            batch = number != signal.SIGKILL and not _by_steps(record.spec if record else job.spec)
            sent = _CARRIED.get(number, number) if batch and record else number
            words = [f"--signal={_slurm_signal(sent)}", *(["--batch"] if batch else [])]
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
        if spec.output or not _has(_own_lines(spec.script), "o", "output"):
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
