"""tilework job: commands in a queue, the machine's own or Slurm's."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError
from ..tiles.messages import printable
from .output import duration, print_json

if TYPE_CHECKING:
    from ..jobs.spec import Job, Queue, Spec

NAME = "job"
HELP = "Queue commands and scripts: on this machine's own queue, or on Slurm where there is one."
EXAMPLE = "Example: tilework job submit --tiles 2 -- python train.py"
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=HELP)
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Id = Annotated[str, typer.Argument(metavar="JOB", help="The job's number.")]
Kind = Annotated[str | None, typer.Option("--queue", metavar="KIND", help="local or slurm; by default what is there.")]


def _queue(kind: str | None) -> Queue:
    from ..jobs import queue

    return queue(kind)


@app.command(epilog=EXAMPLE, context_settings={"allow_interspersed_args": False})
def submit(
    words: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command, or with --script a script, and arguments.")],
    script: Annotated[bool, typer.Option("--script", help="COMMAND is a batch script: its text is kept as it is now.")] = False,
    name: Annotated[str, typer.Option(metavar="NAME", help="What to call the job.", show_default=False)] = "",
    tiles: Annotated[str, typer.Option(metavar="TILES", help="4, chips:2 or shared; one chip by default.",
                                       show_default=False)] = "",
    ranks: Annotated[int, typer.Option("-n", "--ranks", metavar="N", min=1, help="How many ranks of the command.")] = 1,
    limit: Annotated[str, typer.Option("--time", metavar="TIME", help="Time limit: 90s, 15m, 2h, HH:MM:SS.",
                                       show_default=False)] = "",
    after: Annotated[list[str] | None, typer.Option(metavar="JOB", help="After this job ended well; any:JOB: at all.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label. Can be repeated.")] = None,
    output: Annotated[str, typer.Option(metavar="FILE", help="Where output goes; %j is the job's number.",
                                        show_default=False)] = "",
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to run it; here by default.")] = None,
    warn: Annotated[str, typer.Option("--signal", metavar="SIG@SECONDS", help="A signal before the time is over: USR1@60.",
                                      show_default=False)] = "",
    requeue: Annotated[bool, typer.Option("--requeue", help="Queue it again if its time is over or the machine fails.")] = False,
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="For Slurm: partition, gres, mpi.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and stop.")] = False,
    wait_: Annotated[bool, typer.Option("--wait", help="Wait for its end, and end with its exit code.")] = False,
    queue: Kind = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Put a command or a script into the queue."""
    from ..jobs.spec import Spec, labels_of, seconds_of, signal_of

    there = _queue(queue)
    spec = Spec(
        command=() if script else tuple(words), script=_text(words[0]) if script else "",
        arguments=tuple(words[1:]) if script else (), name=name or os.path.basename(words[0]), tiles=tiles, num_tasks=ranks,
        labels=labels_of(label), output=output, time_limit=seconds_of(limit) if limit else None, after=tuple(after or ()),
        folder=str((folder or Path.cwd()).absolute()), signal=signal_of(warn) if warn else None, requeue=requeue,
        options=labels_of(option),
    )  # fmt: skip
    if dry_run:
        _show_script(there, spec, json)
        return
    job = there.submit(spec)
    if not json:
        print(f"job {job.id}", flush=True)
    if not wait_:
        if json:
            print_json(job.as_json())
        return
    (job,) = there.wait([job.id])
    print_json(job.as_json()) if json else _print_end(job)
    raise typer.Exit(job.exit_code if job.exit_code is not None else int(job.state != "COMPLETED"))


def _text(path: str) -> str:
    try:
        if text := Path(path).read_text():
            return text
        raise UserError("job-script", f"{path}: the script is empty")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError("job-script", f"{path}: the script cannot be read", found=str(getattr(e, "strerror", None) or e)) from e


def _show_script(there: Queue, spec: Spec, json: bool) -> None:
    rendered = getattr(there, "rendered", None)
    text = rendered(spec) if rendered is not None else ""
    if json:
        import msgspec

        print_json({"script": text, "spec": msgspec.to_builtins(spec)})
    elif text:
        print(text, end="")
    else:
        print(spec.script or shlex.join(spec.command))


@app.command("list", epilog="Example: tilework job list --all --label project=demo")
def list_(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="At most the newest N.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only those with this label.")] = None,
    queue: Kind = None,
    json: Json = False,
) -> None:
    """List the jobs that wait and run, or all of them."""
    from ..jobs.spec import labels_of

    found = _queue(queue).jobs(ended=all_, limit=limit, labels=labels_of(label))
    if json:
        print_json([job.as_json() for job in found])
        return
    rows = [("JOB", "STATE", "NAME", "TILES", "WAITED", "RAN", "EXIT", "LABELS", "REASON"), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1] + [0]
    lines = (" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    sys.stdout.write("\n".join(lines) + "\n")


def _row(job: Job) -> tuple[str, ...]:
    now = time.time()
    ran = duration((job.ended or now) - job.started) if job.started else ""
    waited = duration((job.started or job.ended or now) - job.submitted)
    labels = printable(" ".join(f"{k}={v}" for k, v in job.spec.labels.items()), 60)
    code = "" if job.exit_code is None else str(job.exit_code)
    name, tiles = printable(job.name, 24), job.tiles or job.spec.tiles
    return job.id, job.state, name, tiles, waited, ran, code, labels, printable(job.reason, 200)


@app.command(epilog="Example: tilework job show 12")
def show(
    id: Id,
    lines: Annotated[int, typer.Option(metavar="N", min=0, help="How many of the last lines of output.")] = 10,
    queue: Kind = None,
    json: Json = False,
) -> None:
    """Show state, reason, script, tiles and last output."""
    job = _queue(queue).job(id)
    last = {Path(p).name: _last(p, lines) for p in dict.fromkeys((job.output, job.error)) if p}
    if json:
        print_json({**job.as_json(), "last_lines": last})
        return
    spec = job.spec
    about = {
        "job": job.id, "name": job.name, "user": job.user, "state": job.state, "reason": job.reason,
        "exit code": "" if job.exit_code is None else str(job.exit_code),
        "tiles": job.tiles or f"asked for: {spec.tiles or 'one chip'}",
        "nodes": job.nodes, "ranks": str(spec.num_tasks), "submitted": _when(job.submitted), "started": _when(job.started),
        "ended": _when(job.ended), "time limit": duration(spec.time_limit) if spec.time_limit else "",
        "after": ", ".join(spec.after), "labels": " ".join(f"{k}={v}" for k, v in spec.labels.items()), "folder": spec.folder,
        "command": shlex.join(spec.command), "output": job.output, "error": job.error if job.error != job.output else "",
        "runs": str(job.runs) if job.runs > 1 else "",
    }  # fmt: skip
    for key, value in about.items():
        if value:
            print(f"{key:<11} {printable(value, 1000)}")
    if spec.script:
        print("script      " + " ".join(spec.arguments) + "\n" + "\n".join(f"  {line}" for line in spec.script.splitlines()))
    for file, found in last.items():
        if found:
            print(f"last lines of {file}:\n" + "\n".join(f"  {line}" for line in found))


def _when(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""


def _last(path: str, count: int) -> list[str]:
    found = _end_of(path, count)
    return (_end_of(f"{path}.1", count - len(found)) if len(found) < count else []) + found


def _end_of(path: str, count: int) -> list[str]:
    try:
        with open(path, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - 64 * 1024))
            return f.read().decode(errors="replace").splitlines()[-count:] if count else []
    except OSError:
        return []


@app.command(epilog="Example: tilework job logs -f 12")
def logs(
    id: Id,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
    error: Annotated[bool, typer.Option("--error", help="What it wrote to standard error.")] = False,
    queue: Kind = None,
) -> None:
    """Print what a job has written."""
    there = _queue(queue)
    job, at = there.job(id), 0
    if Path(before := f"{job.error if error else job.output}.1").exists():  # it was turned over
        _copy(before, 0)
    while True:
        path = job.error if error else job.output
        if path and Path(path).exists():
            at = _copy(path, at)
        elif not follow and not path:
            raise UserError("job-output", f"job {id} has written nothing yet", found=job.state)
        if not follow or job.is_over:
            return
        time.sleep(0.2)
        job = there.job(id)


def _copy(path: str, at: int) -> int:
    with open(path, "rb") as f:
        if os.fstat(f.fileno()).st_size < at:  # turned over meanwhile
            at = 0
        f.seek(at)
        while part := f.read(1 << 20):
            sys.stdout.buffer.write(part)
        sys.stdout.flush()
        return f.tell()


@app.command(epilog="Example: tilework job cancel 12 13")
def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="JOB", help="The jobs' numbers.")],
    send: Annotated[str, typer.Option("--signal", metavar="SIG", help="Only send this signal.", show_default=False)] = "",
    queue: Kind = None,
) -> None:
    """End jobs, or send them a signal."""
    from ..jobs.spec import signal_of

    there, wrong = _queue(queue), list[UserError]()
    for id in ids:
        try:
            there.cancel(id, signal_of(send)[0] if send else None)
        except UserError as e:
            wrong.append(e)
    if len(wrong) > 1:
        raise UserError(wrong[0].id, "some jobs could not be cancelled:\n    " + "\n    ".join(e.summary for e in wrong))
    if wrong:
        raise wrong[0]


@app.command(epilog="Example: tilework job label 12 project=demo old-")
def label(
    id: Id,
    words: Annotated[list[str], typer.Argument(metavar="NAME=VALUE", help="Labels to set; NAME- takes one away.")],
    queue: Kind = None,
    json: Json = False,
) -> None:
    """Set labels of a job, or take them away."""
    from ..jobs.spec import labels_of

    changes: dict[str, str | None] = {word[:-1]: None for word in words if word.endswith("-") and "=" not in word}
    changes |= labels_of([word for word in words if "=" in word or not word.endswith("-")])
    job = _queue(queue).label(id, changes)
    print_json(job.as_json()) if json else print(" ".join(f"{k}={v}" for k, v in job.spec.labels.items()) or "no labels")


@app.command(epilog="Example: tilework job wait 12 13")
def wait(
    ids: Annotated[list[str], typer.Argument(metavar="JOB", help="The jobs' numbers.")],
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", min=0, help="At most so long.")] = None,
    queue: Kind = None,
    json: Json = False,
) -> None:
    """Wait until jobs have ended; 0 if all ended well."""
    done = _queue(queue).wait(ids, timeout)
    if json:
        print_json([job.as_json() for job in done])
    for job in done if not json else ():
        _print_end(job)
    raise typer.Exit(int(any(job.state != "COMPLETED" for job in done)))


def _print_end(job: Job) -> None:
    code = "" if job.exit_code is None else f", exit code {job.exit_code}"
    print(f"job {job.id}: {job.state}{code}" + (f" ({job.reason})" if job.reason and job.state != "COMPLETED" else ""))


@app.command(epilog="Example: tilework job taskprolog --gres NAME > /etc/slurm/taskprolog.sh")
def taskprolog(
    gres: Annotated[str, typer.Option(metavar="NAME", help="The name of the generic resource in slurm.conf.")],
    per_task: Annotated[bool, typer.Option("--per-task", help="Counts in --gres are meant for each task.")] = False,
) -> None:
    """Print a TaskProlog for an administrator of Slurm."""
    from ..jobs.prolog import script

    print(script(gres, per_task=per_task), end="")
