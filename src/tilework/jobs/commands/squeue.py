"""squeue over the local queue. Where several users share the machine's tiles, what holds some of others' is shown as well."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time

from ...errors import TileworkError
from ...tiles import client
from ..local import LocalQueue
from ..spec import Job, Spec
from ..supervisor import PARTITION
from .flags import Failure, Parser, guarded
from .tables import by_letters, by_names, clock

_DEFAULT, _LONG = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R", "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
_SHORT = {"PENDING": "PD", "RUNNING": "R", "COMPLETED": "CD", "FAILED": "F", "CANCELLED": "CA", "TIMEOUT": "TO", "LOST": "NF"}


def _ran(job: Job) -> str:
    return clock((job.ended or time.time()) - job.started) if job.started else "0:00"


def _where(job: Job) -> str:
    if job.state == "RUNNING":
        return job.nodes or socket.gethostname()
    if job.state != "PENDING":
        return f"({job.reason or job.state})"
    if job.reason.startswith("after job"):
        return "(Dependency)"
    return "(Resources)" if job.reason else "(Priority)"


def _partition(job: Job) -> str:
    return job.spec.options.get("partition", PARTITION)


def _gres(job: Job) -> str:
    return f"gres:{job.spec.options['gres']}" if "gres" in job.spec.options else "N/A"


_FIELDS = {
    "i": ("JOBID", lambda j: j.id), "A": ("JOBID", lambda j: j.id), "P": ("PARTITION", _partition),
    "j": ("NAME", lambda j: j.name), "u": ("USER", lambda j: j.user), "t": ("ST", lambda j: _SHORT[j.state]),
    "T": ("STATE", lambda j: j.state), "M": ("TIME", _ran), "D": ("NODES", lambda j: "1"), "R": ("NODELIST(REASON)", _where),
    "N": ("NODELIST", lambda j: j.nodes), "r": ("REASON", lambda j: _where(j).strip("()") if j.state == "PENDING" else "None"),
    "l": ("TIME_LIMIT", lambda j: clock(j.spec.time_limit) if j.spec.time_limit else "UNLIMITED"),
    "C": ("CPUS", lambda j: str(j.spec.num_tasks * max(1, j.spec.cpus_per_task))), "b": ("TRES_PER_NODE", _gres),
    "Z": ("WORK_DIR", lambda j: j.spec.folder), "o": ("COMMAND", lambda j: " ".join(j.spec.command) or j.name),
    "V": ("SUBMIT_TIME", lambda j: time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(j.submitted))),
}  # fmt: skip
_NAMES = {
    "jobid": "i", "partition": "P", "name": "j", "username": "u", "statecompact": "t", "state": "T", "timeused": "M",
    "numnodes": "D", "reasonlist": "R", "nodelist": "N", "reason": "r", "timelimit": "l", "numcpus": "C", "tres-per-node": "b",
    "gres": "b",
    "workdir": "Z", "command": "o", "submittime": "V",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return guarded("squeue", lambda: _show(sys.argv[1:] if argv is None else argv))


def _show(argv: list[str]) -> int:
    known = Parser(prog="squeue", allow_abbrev=False, add_help=False)
    known.add_argument("--help", action="help")
    known.add_argument("-u", "--user", default="")
    known.add_argument("--me", action="store_true")
    known.add_argument("-j", "--jobs", "--job", default="")
    known.add_argument("-n", "--name", default="")
    known.add_argument("-p", "--partition", default="")
    known.add_argument("-w", "--nodelist", default="")
    known.add_argument("-t", "--states", default="")
    known.add_argument("-h", "--noheader", action="store_true")
    known.add_argument("-l", "--long", action="store_true")
    known.add_argument("-a", "--all", action="store_true")
    known.add_argument("-o", "--format", default="")
    known.add_argument("-O", "--Format", default="", dest="names")
    known.add_argument("--json", action="store_true")
    args = known.parse_args(argv)
    states = {s.upper() for s in args.states.split(",") if s}
    every = states == {"ALL"}
    found = LocalQueue().jobs(ended=bool(args.jobs or states))
    ids, users = set(filter(None, args.jobs.split(","))), set(filter(None, args.user.split(",")))
    if ids:
        if missing := ids - {j.id for j in found}:
            raise Failure(f"Invalid job id specified: {', '.join(sorted(missing))}")
        found = [j for j in found if j.id in ids]
    if states and not every:
        found = [j for j in found if {j.state, _SHORT[j.state]} & states]
    if not ids and not states and not args.me:
        found += _of_others()
    found = [j for j in found if (not users or j.user in users) and (not args.name or j.name in args.name.split(","))
             and (not args.partition or _partition(j) == args.partition)]  # fmt: skip
    if args.json:
        print(json.dumps({"jobs": [j.as_json() for j in found]}, indent=1))
        return 0
    try:
        if args.names:
            lines = by_names(args.names, found, {name: _FIELDS[letter] for name, letter in _NAMES.items()}, not args.noheader)
        else:
            text = args.format or (_LONG if args.long else _DEFAULT)
            lines = by_letters(text, found, _FIELDS, not args.noheader)
    except KeyError as e:
        raise Failure(f"Invalid field requested: {e.args[0]}") from None
    if lines:
        print("\n".join(lines))
    return 0


def _of_others() -> list[Job]:
    """Other users' jobs, as far as the daemon of tiles shows them: those that hold tiles."""
    found = []
    with contextlib.suppress(TileworkError, OSError):
        for seen in client.view(start=False).leases:
            if seen.kind == "job" and seen.uid != os.getuid():
                what = Spec(command=(seen.command or "job",))
                found.append(
                    Job(id=seen.job, spec=what, state="RUNNING", user=seen.user, started=seen.since, nodes=socket.gethostname())
                )
    return found
