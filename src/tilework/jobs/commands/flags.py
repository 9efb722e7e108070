"""The flags of sbatch and srun that scripts use, and the job that they mean."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import NoReturn

from ... import __version__
from ...errors import TileworkError, UserError
from ...tiles.site import read_site
from ..spec import Spec, seconds_of, signal_of

# Said by many scripts, and without a meaning on one machine: kept with the job, and no more.
_NOTED = ("account", "qos", "mem", "mem_per_cpu", "comment", "mpi", "partition", "nodelist", "gres", "open_mode", "distribution",
          "mail_type", "mail_user")  # fmt: skip


class Failure(Exception):
    """What a command says, and its exit code."""

    def __init__(self, *lines: str, code: int = 1) -> None:
        super().__init__("\n".join(lines))
        self.lines, self.code = lines, code


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if unknown:
            raise Failure(f"unrecognized option '{unknown[1]}': the local queue does not know it")
        raise Failure(message)


def resources() -> dict[str, str]:
    """Generic resources by the names that frontends' users know, and what they are here: chips, or tiles."""
    found = {"tile": "tiles", "chip": "chips", "gpu": "gpus"}
    for point in entry_points(group="tilework.site"):
        found |= getattr(point.load(), "RESOURCES", {})
    return found


def parser(command: str) -> Parser:
    made = Parser(prog=command, add_help=True, allow_abbrev=False, usage=f"{command} [OPTIONS] ...")
    add = made.add_argument
    add("-V", "--version", action="version", version=f"tilework {__version__}, local queue")
    add("-J", "--job-name", default="")
    add("-o", "--output", default="")
    add("-e", "--error", default="")
    add("-n", "--ntasks", type=int)
    add("-N", "--nodes", default="")
    add("--ntasks-per-node", "--tasks-per-node", type=int)
    add("-c", "--cpus-per-task", type=int, default=0)
    add("-w", "--nodelist", default="")
    add("-t", "--time", default="")
    add("-p", "--partition", default="")
    add("-d", "--dependency", default="")
    add("-D", "--chdir", default="")
    add("-A", "--account", default="")
    add("-q", "--qos", default="")
    add("-m", "--distribution", default="")
    add("--gres", default="")
    for name in resources():
        if name not in ("tile", "chip"):  # --gpus=2, and what vendors' plug-ins add
            add(f"--{name}s", type=int, default=0, dest=f"num_{name}")
    add("--mpi", default="")
    add("--mem", default="")
    add("--mem-per-cpu", default="")
    add("--comment", default="")
    add("--mail-type", default="")
    add("--mail-user", default="")
    add("--export", default="ALL")
    add("--signal", default="")
    add("--open-mode", choices=("append", "truncate"), default="append")
    add("--requeue", action="store_true")
    add("--no-requeue", action="store_false", dest="requeue")
    add("--exclusive", action="store_true")
    add("-Q", "--quiet", action="store_true")
    add("-v", "--verbose", action="count", default=0)
    return made


def in_script(text: str) -> list[str]:
    """The words of a script's #SBATCH lines: those before its first command."""
    words: list[str] = []
    for line in text.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            words += shlex.split(line[len("#SBATCH") :], comments=True)
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def num_tasks(args: argparse.Namespace) -> tuple[int, int]:
    """(tasks, nodes), as Slurm counts them."""
    nodes = int(found[0]) if (found := re.findall(r"[0-9]+", args.nodes)) else 1
    each = args.ntasks_per_node or 0
    tasks = args.ntasks if args.ntasks is not None else nodes * each if each else max(1, nodes)
    if tasks < 1 or nodes < 1:
        raise Failure("Invalid numeric value for the number of tasks or nodes")
    return tasks, nodes


def tiles_of(args: argparse.Namespace) -> str:
    """What --gres, --gpus and the like ask for. Of a node, as Slurm reads it; of a task where the site says so."""
    known = resources()
    asked = [(name, n) for name in known if (n := getattr(args, f"num_{name}", 0))]
    for word in filter(None, args.gres.split(",")):
        name, *rest = word.removeprefix("gres:").split(":")
        if name not in known or (rest and not rest[-1].isdecimal()):
            raise Failure(f"Invalid generic resource (gres) specification: {word}; here there are {', '.join(sorted(known))}")
        asked.append((name, int(rest[-1]) if rest else 1))
    if len(asked) > 1:
        raise Failure("one kind of generic resource at a time: " + ", ".join(f"{n}:{c}" for n, c in asked))
    if not asked:
        return ""
    (name, count), kind = asked[0], known[asked[0][0]]
    if read_site().jobs.gres_per == "task":
        tasks, nodes = num_tasks(args)
        count *= args.ntasks_per_node or -(-tasks // nodes)
    return str(count) if kind == "tiles" else f"{kind}:{count}"


def after(text: str) -> tuple[str, ...]:
    """afterok:1:2,afterany:3"""
    found: list[str] = []
    for part in filter(None, re.split(r"[,?]", text)):
        kind, *ids = part.split(":")
        if kind not in ("afterok", "afterany") or not ids:
            raise Failure(f"Job dependency problem: {part} (the local queue knows afterok and afterany)")
        found += [id if kind == "afterok" else f"any:{id}" for id in ids]
    return tuple(found)


def environment(export: str) -> dict[str, str]:
    """--export: ALL, NONE, or names and NAME=VALUE."""
    words = export.split(",")
    found = dict(os.environ) if "ALL" in words else {k: os.environ[k] for k in ("PATH", "HOME", "USER") if k in os.environ}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found


def spec_of(args: argparse.Namespace, name: str, **what: object) -> tuple[Spec, list[str]]:
    """The job, and what has to be said about it."""
    tasks, nodes = num_tasks(args)
    notes, host = list[str](), socket.gethostname()
    if nodes > 1:
        notes.append(f"{nodes} nodes asked for: this queue has one, {host}, where all {tasks} tasks run")
    others = [n for n in re.split(r",(?![^\[]*\])", args.nodelist) if n and n.split(".")[0] != host.split(".")[0]]
    if others:
        notes.append(f"--nodelist={args.nodelist}: this queue has one node, {host}")
    spec = Spec(
        name=args.job_name or name, tiles=tiles_of(args), num_tasks=tasks, num_nodes=nodes,
        tasks_per_node=args.ntasks_per_node or 0, cpus_per_task=args.cpus_per_task, environment=environment(args.export),
        time_limit=seconds_of(args.time) if args.time and args.time.upper() not in ("0", "UNLIMITED", "INFINITE") else None,
        after=after(args.dependency), folder=os.path.abspath(args.chdir or os.getcwd()), requeue=args.requeue,
        signal=signal_of(args.signal) if args.signal else None, output=args.output, error=args.error,
        options={k.replace("_", "-"): str(v) for k in _NOTED if (v := getattr(args, k))}, **what,  # type: ignore[arg-type]
    )  # fmt: skip
    return spec, notes


def said(command: str, lines: Sequence[str], prefix: str = "error: ") -> None:
    for line in lines:
        print(f"{command}: {prefix}{line}", file=sys.stderr, flush=True)


def guarded(command: str, run: object) -> int:
    """Runs a command's function; what goes wrong is said as Slurm's own commands say it."""
    try:
        return run()  # type: ignore[operator, no-any-return]
    except Failure as e:
        said(command, e.lines)
        return e.code
    except UserError as e:
        said(command, [e.summary + (f": {e.found}" if e.found else ""), *([e.fix] if e.fix else [])])
        return 1
    except TileworkError as e:
        said(command, str(e).splitlines())
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
