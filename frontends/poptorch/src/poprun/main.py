"""The command poprun: `poprun --num-instances 2 --num-replicas 2 python train.py`. Instances are processes that Tilework
connects, and the replicas of one instance are threads of it."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from datetime import datetime

from tilework.errors import TileworkError
from tilework.frontend.arguments import Parser
from tilework.parallel.launch import launch

# Flags of partitions, hosts and MPI, with the number of values that each takes.
IGNORED = {
    "--vipu-partition": 1,
    "--vipu-allocation": 1,
    "--vipu-server-host": 1,
    "--vipu-server-port": 1,
    "--vipu-server-timeout": 1,
    "--update-partition": 1,
    "--reset-partition": 1,
    "--remove-partition": 1,
    "--mpi-global-args": 1,
    "--mpi-local-args": 1,
    "--numa-aware": 1,
    "--offline-mode": 1,
    "--synchronise-host-clocks": 1,
    "--import-config": 1,
    "--export-config": 1,
}


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="poprun", description="Run instances of a program on this machine.")
    made.add_argument("--num-instances", type=int, default=1, help="processes")
    made.add_argument("--num-replicas", type=int, default=1, help="replicas in all, as many in each instance")
    made.add_argument("--ipus-per-replica", type=int, default=1, help="kept for the program; it has no effect here")
    made.add_argument("-H", "--host", default="", help="this machine's name; other machines are refused")
    made.add_argument("--executable-cache-path", default="", help="where compiled code is kept")
    made.add_argument("--only-output-from-instance", type=int, default=None)
    made.add_argument("--print-topology", nargs="?", const="yes", default="no", choices=("yes", "no"))
    made.add_argument("-v", "--verbose", action="count", default=0)
    for flag in IGNORED:
        made.add_argument(flag, default=None, help=argparse.SUPPRESS)
    made.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return made


def say(level: str, text: str, verbose: int) -> None:
    """A line of the log: warnings and errors always, I with -v, D with -vv."""
    if level in "WE" or (level == "I" and verbose) or (level == "D" and verbose > 1):
        when = datetime.now().strftime("%H:%M:%S.%f")[:-3]
        print(f"{when} {os.getpid()} POPRUN [{level}] {text}", flush=True)


def topology(host: str, instances: int, replicas: int) -> str:
    """Which replicas are in which instance."""
    numbers = [str(i) for i in range(replicas)]
    last = " | ".join(numbers)
    width = max(len(last), len(host), 13)
    each = replicas // instances
    cells = [" | ".join(numbers[i * each : (i + 1) * each]) for i in range(instances)]
    top = " | ".join(str(i).center(len(c)) for i, c in enumerate(cells))
    rows = [
        ("hosts", host.ljust(width)),
        ("ILDs", "0".center(width)),
        ("instances", top.center(width)),
        ("replicas", last.center(width)),
    ]
    total = width + 14
    lines = [" " + "=" * total, "|" + "poprun topology".center(total) + "|", "|" + "=" * total + "|"]
    for i, (name, text) in enumerate(rows):
        lines += ["|" + "-" * 11 + "|" + "-" * (width + 2) + "|"] if i else []
        lines.append(f"| {name:<9} | {text} |")
    return "\n".join([*lines, " " + "-" * total])


def problem(args: argparse.Namespace) -> str:
    if not args.command:
        return "there is no program to run: poprun --num-replicas 2 python train.py"
    if args.num_instances < 1 or args.num_replicas < 1:
        return "--num-instances and --num-replicas are 1 or more"
    if args.num_replicas % args.num_instances:
        return f"{args.num_replicas} replicas cannot be divided evenly among {args.num_instances} instances"
    others = [h for h in args.host.split(",") if h and h.split(":")[0] not in ("localhost", "127.0.0.1", socket.gethostname())]
    if others:
        return f"poprun starts instances on this machine only, not on {others[0]}: use mpirun or srun on a cluster"
    if shutil.which(args.command[0]) is None:
        return f"there is no command {args.command[0]!r}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command[:1] == ["--"]:
        args.command = args.command[1:]
    wrong = problem(args)
    if wrong:
        print(f"poprun: {wrong}", file=sys.stderr)
        return 2
    for flag in IGNORED:
        if getattr(args, flag.lstrip("-").replace("-", "_")) is not None:
            say("I", f"{flag} has no meaning here and is ignored", args.verbose)
    if args.verbose or args.print_topology == "yes":
        print(topology(socket.gethostname(), args.num_instances, args.num_replicas), flush=True)
    each = args.num_replicas // args.num_instances
    say("D", f"Starting {args.num_instances} instances of {each} replicas: {' '.join(args.command)}", args.verbose)

    def environment(rank: int) -> dict[str, str]:
        found = {
            "POPDIST_NUM_TOTAL_REPLICAS": args.num_replicas, "POPDIST_NUM_LOCAL_REPLICAS": each,
            "POPDIST_NUM_IPUS_PER_REPLICA": args.ipus_per_replica, "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": 1,
            "POPDIST_REPLICA_INDEX_OFFSET": rank * each, "POPDIST_LOCAL_INSTANCE_INDEX": rank,
            "OMPI_COMM_WORLD_SIZE": args.num_instances, "OMPI_COMM_WORLD_RANK": rank,
        }  # fmt: skip
        if args.executable_cache_path:
            found["POPTORCH_CACHE_DIR"] = args.executable_cache_path
        return {k: str(v) for k, v in found.items()}

    only = args.only_output_from_instance
    try:
        code = launch(args.command, args.num_instances, tag="[1,{rank}]<{stream}>:", environment=environment,
                      speaks=lambda rank: only in (None, rank))  # fmt: skip
    except TileworkError as e:
        print(e, file=sys.stderr)
        return e.exit_code
    say("I" if code == 0 else "E", f"mpirun (PID {os.getpid()}) terminated with exit code {code}", args.verbose)
    return code


def run() -> None:
    raise SystemExit(main())
