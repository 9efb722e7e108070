"""A job as a batch script for Slurm: lines for sbatch, and a wrapper that passes signals on and notes how the program ended."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import signal
from pathlib import Path

from ..errors import UserError
from .spec import SHARED, Job, Spec

# Which signal brings another to the program by way of the batch script: STOP would stop the shell, and of a TERM it cannot know
# whether Slurm has sent it to the program as well, as it does without cgroups when it ends a job. CONT comes before every TERM of
# Slurm's, and of two trapped signals that come at once bash loses one: it must not be trapped.
CARRIED = {
    int(sent): int(by)
    for sent, by in ((signal.SIGSTOP, signal.SIGTSTP), (signal.SIGTERM, signal.SIGPWR), (signal.SIGCONT, signal.SIGIO))
}
_TRAPPED = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
    signal.SIGTSTP, signal.SIGPWR, signal.SIGIO,
)  # fmt: skip


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


def own_lines(script: str) -> list[str]:
    """The script's own lines for sbatch: those before its first command."""
    found = []
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            found.append(line.rstrip())
    return found


def says(lines: list[str], short: str, long: str) -> bool:
    pattern = rf"\s(--{long}\b" + (rf"|-{short})" if short else ")")
    return any(re.search(pattern, line) for line in lines)


def by_steps(spec: Spec) -> bool:
    """Are signals for the tasks that srun starts? Else they are for the batch script's own process."""
    if spec.command:
        return spec.num_tasks > 1
    return re.search(r"^[^#\n]*\bsrun\b", spec.script, re.MULTILINE) is not None


def _clock(seconds: float) -> str:
    whole = max(1, math.ceil(seconds))
    return f"{whole // 86400}-{whole // 3600 % 24:02}:{whole // 60 % 60:02}:{whole % 60:02}"


def _lines(spec: Spec, folder: Path) -> list[str]:
    """For sbatch, of which a later one counts: what we take for granted, what the script says itself, and what was asked for."""
    own = own_lines(spec.script)
    name = _line("job-name", Job(id="", spec=spec, state="PENDING").name)
    lines = [] if spec.name and own else [name]
    if not spec.output and not says(own, "o", "output"):
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
    if spec.signal and not says(own, "", "signal"):
        number, before = spec.signal
        who = slurm_signal(number) if by_steps(spec) else f"B:{slurm_signal(CARRIED.get(number, number))}"
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


def signal_name(number: int) -> str:
    """As bash knows it."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return str(number)


def slurm_signal(number: int) -> str:
    """As Slurm knows it: some names it does not."""
    name = signal_name(number)
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


def rendered(spec: Spec, folder: Path) -> str:
    """`folder`: where the wrapper notes how it ended."""
    if bool(spec.command) == bool(spec.script):
        raise UserError("job-spec", "a job is a command or a script", found="both" if spec.command else "neither")
    lines = ["#!/bin/bash", *_lines(spec, folder), ""]
    if spec.tiles:
        tiles = spec.tiles if spec.tiles == SHARED or spec.tiles.partition(":")[0] == "job" else f"job:{spec.tiles}"
        lines.append(f"export TILEWORK_TILES={shlex.quote(tiles)}")
    asked = spec.signal[0] if spec.signal else 0
    passing = _PASS_NONE if spec.command and by_steps(spec) else _PASS
    trapped = [
        signal_name(n)
        for n in sorted({*_TRAPPED, *([asked] if asked else [])} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT})
    ]
    again = _REQUEUE.format(seconds=60 * math.ceil(spec.time_limit / 60) - 2) if spec.requeue and spec.time_limit else ""
    wrapper = _WRAPPER.format(
        folder=shlex.quote(str(folder)), passing=passing, trapped=" ".join(trapped), program=_program(spec), requeue=again
    )
    return "\n".join(lines) + "\n" + wrapper
