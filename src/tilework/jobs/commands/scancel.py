"""scancel over the local queue."""

from __future__ import annotations

import argparse
import sys

from ...errors import UserError
from ..local import LocalQueue
from ..spec import signal_of
from .flags import Parser, guarded, said


def main(argv: list[str] | None = None) -> int:
    return guarded("scancel", lambda: _cancel(sys.argv[1:] if argv is None else argv))


def _cancel(argv: list[str]) -> int:
    known = Parser(prog="scancel", allow_abbrev=False)
    known.add_argument("-s", "--signal", default="")
    known.add_argument("-u", "--user", default="")
    known.add_argument("--me", action="store_true")
    known.add_argument("-n", "--name", "--jobname", default="")
    known.add_argument("-t", "--state", default="")
    known.add_argument("-b", "--batch", action="store_true")
    known.add_argument("-f", "--full", action="store_true")
    known.add_argument("-v", "--verbose", action="count", default=0)
    known.add_argument("-Q", "--quiet", action="store_true")
    known.add_argument("jobs", nargs="*")
    args: argparse.Namespace = known.parse_args(argv)
    queue, code = LocalQueue(), 0
    ids = [part for word in args.jobs for part in word.split(",") if part]
    if args.user or args.me or args.name or args.state:
        found = queue.jobs(ended=False)
        ids += [j.id for j in found if (not args.user or j.user == args.user) and (not args.name or j.name == args.name)
                and (not args.state or j.state.startswith(args.state.upper()))]  # fmt: skip
    elif not ids:
        said("scancel", ["No job identification provided"])
        return 1
    number = signal_of(args.signal)[0] if args.signal else None
    for id in dict.fromkeys(ids):
        try:
            queue.cancel(id, None if number == 15 else number)
        except UserError as e:
            if e.id == "job-unknown":
                said("scancel", [f"Kill job error on job id {id}: Invalid job id specified"])
                code = 1
            elif e.id != "job-over":  # as Slurm does: one that has ended is as it should be
                raise
    return code
