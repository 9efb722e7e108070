"""sbatch over the local queue: a script into the queue."""

from __future__ import annotations

import os
import sys

from ..local import LocalQueue
from .flags import Failure, guarded, in_script, parser, said, spec_of


def main(argv: list[str] | None = None) -> int:
    return guarded("sbatch", lambda: _submit(sys.argv[1:] if argv is None else argv))


def _submit(argv: list[str]) -> int:
    known = parser("sbatch")
    known.add_argument("-W", "--wait", action="store_true")
    known.add_argument("--parsable", action="store_true")
    known.add_argument("--wrap", default="")
    known.add_argument("words", nargs="...")
    args = known.parse_args(argv)
    if args.wrap:
        if args.words:
            raise Failure("Script arguments are not permitted with --wrap option.")
        text, name, arguments = f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{args.wrap}\n", "wrap", []
    else:
        path, arguments = (args.words[0], args.words[1:]) if args.words else ("", [])
        text, name = _read(path), os.path.basename(path) or "sbatch"
        if not text.startswith("#!"):
            raise Failure(
                "This does not look like a batch script.  The first",
                "line must start with #! followed by the path to an interpreter.",
                "For instance: #!/bin/sh",
            )
        words = in_script(text)
        args = known.parse_args([*words, *argv]) if words else args  # what is on the command line counts
    if not args.output:
        args.output = "slurm-%j.out"
    spec, notes = spec_of(args, name, script=text, arguments=tuple(arguments))
    said("sbatch", notes, "")
    queue = LocalQueue()
    job = queue.submit(spec)
    if not args.quiet or args.parsable:
        print(job.id if args.parsable else f"Submitted batch job {job.id}", flush=True)
    if not args.wait:
        return 0
    (job,) = queue.wait([job.id])
    return job.exit_code if job.exit_code is not None else int(job.state != "COMPLETED")


def _read(path: str) -> str:
    try:
        if not path:
            return sys.stdin.read()
        with open(path) as f:
            return f.read()
    except (OSError, UnicodeDecodeError):
        raise Failure(f"Unable to open file {path}") from None
