"""srun over the local queue: within a job, tasks on its tiles; elsewhere, a job of its own, which runs here as soon as it can."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys

from msgspec.structs import replace

from ...parallel.launch import launch
from ..book import Book, state_folder
from ..local import LocalQueue
from ..supervisor import MARK, mark_of
from .flags import Failure, guarded, num_tasks, parser, said, spec_of, tiles_of


def main(argv: list[str] | None = None) -> int:
    return guarded("srun", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    known = parser("srun")
    known.add_argument("-l", "--label", action="store_true")
    known.add_argument("-u", "--unbuffered", action="store_true")
    known.add_argument("-K", "--kill-on-bad-exit", nargs="?", const="1", default="0")
    known.add_argument("-O", "--overcommit", action="store_true")
    known.add_argument("--overlap", action="store_true")
    known.add_argument("words", nargs="...")
    args = known.parse_args(argv)
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise Failure("No command given to execute.")
    if _in_a_job():
        return _step(args, words)
    spec, notes = spec_of(args, os.path.basename(words[0]))
    said("srun", notes, "")
    # The job is this same command again, within the job that is made for it.
    own = [sys.executable, "-m", "tilework.jobs.commands.srun", *(["-l"] if args.label else []), "-n", str(spec.num_tasks)]
    own += (["--mpi", args.mpi] if args.mpi else []) + (["-K"] if args.kill_on_bad_exit != "0" else [])
    queue = LocalQueue()
    id, supervisor = queue.attached(replace(spec, command=(*own, "--", *words), num_tasks=1))
    waited = False

    def in_line(line: str) -> None:
        nonlocal waited
        if line and not waited:
            waited = True
            said("srun", [f"job {id} queued and waiting for resources"], "")
        elif not line and waited:
            said("srun", [f"job {id} has been allocated resources"], "")

    code = supervisor.run(in_line)
    job = queue.job(str(id))
    if job.state != "COMPLETED" and job.reason and not job.reason.startswith(("exit code", "interrupted")):
        said("srun", [f"job {id}: {job.reason}"])
    return code


def _in_a_job() -> bool:
    """By the mark of a live job of this queue: the variables alone may have been left over."""
    mark, id = os.environ.get(MARK, ""), os.environ.get("TILEWORK_JOB", "")
    return bool(mark) and id.isdecimal() and mark == mark_of(Book(state_folder()), int(id))


def _step(args: object, words: list[str]) -> int:
    given = getattr(args, "ntasks", None) is not None or getattr(args, "ntasks_per_node", None) or getattr(args, "nodes", "")
    tasks = num_tasks(args)[0] if given else int(os.environ.get("SLURM_NTASKS") or 1)  # type: ignore[arg-type]
    if getattr(args, "gres", ""):
        tiles_of(args)  # type: ignore[arg-type]  # a mistake in it is said; a step runs on its job's tiles
    if shutil.which(words[0]) is None:
        raise Failure(f"execve(): {words[0]}: No such file or directory", code=2)
    host, step = socket.gethostname(), str(os.getpid())
    common = {
        "SLURM_NTASKS": str(tasks), "SLURM_NPROCS": str(tasks), "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_ID": step,
        "SLURM_STEPID": step, "SLURM_STEP_NODELIST": host, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(tasks), "SLURM_TASKS_PER_NODE": str(tasks), "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }  # fmt: skip

    def variables(rank: int) -> dict[str, str]:
        return {**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_TASK_PID": ""}

    def failed(rank: int, code: int) -> None:
        why = (signal.strsignal(-code) or "Killed") if code < 0 else f"Exited with exit code {code}"
        said("srun", [f"{host}: task {rank}: {why}"])

    signal.signal(signal.SIGINT, signal.default_int_handler)
    tag = "{rank}: " if getattr(args, "label", False) else None
    stops = getattr(args, "kill_on_bad_exit", "0") != "0"
    return launch(words, tasks, tag=tag, environment=variables, failed=failed, stops=stops)


if __name__ == "__main__":
    sys.exit(main())
