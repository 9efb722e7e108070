"""The command line that every app has: compile, run, test, measure-performance, measure-sections, and the app's own flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tilework
from tilework.frontend import failures
from tilework.frontend.arguments import Ignored, Parser, prefer_the_programs

from ... import logging
from .. import distributed
from ..sambasession import session

COMMANDS = {
    "compile": "compile the model and write the PEF",
    "run": "train (or infer) with a PEF",
    "test": "run on host and device and compare",
    "measure-performance": "measure latency and throughput of a PEF",
    "measure-sections": "measure each section of a PEF",
}
# Flags that ask something of the vendor's compiler or chip. They are accepted, and said to be ignored, once each.
IGNORED_SWITCHES = ("--mac-v1", "--mac-v2", "--enable-conv-tiling", "--plot", "--stage-instrumentation", "--run-early-tp",
                    "--disable-retry-lower-visible-resources", "--all-regions-hbm", "--hbm-auto-alloc", "--samba-only",
                    "--use-o1-default-rules", "--weight-grad-reduce", "--tiling-accum", "--fix-rank-rdu-mapping", "-o0", "-o1",
                    "-o3", "--o0", "--o1", "--o3", "--enable-stoc-rounding", "--verbose-report")  # fmt: skip
IGNORED_VALUES = ("--mac-human-decision", "--compiler-configs-file", "--compiler-configs", "--target-runtime-version",
                  "--target-sambaflow-version", "--optimization-rules", "--compiler-mode", "--resource-report-path",
                  "--distlearn-config", "--data-parallel-mode", "--json-counters")  # fmt: skip
IGNORED_LISTS = ("--resources-scaling-factors", "--o1-experimental-opts")
Add = Callable[[argparse.ArgumentParser], Any]


def _say(text: str) -> None:
    logging.samba_logger.info(text, log_limit=1)


def parse_app_args(
    argv: Sequence[str] | None = None,
    common_parser_fn: Add | None = None,
    compile_parser_fn: Add | None = None,
    test_parser_fn: Add | None = None,
    run_parser_fn: Add | None = None,
    dev_mode: bool = False,
    **more: Any,
) -> argparse.Namespace:
    """The app's arguments. Under --data-parallel the process group is up when this returns."""
    failures.install()
    words = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(description="Compile and run a model.", epilog="Each command has its own --help.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser, metavar="COMMAND")
    own = {"compile": compile_parser_fn, "run": run_parser_fn, "test": test_parser_fn,
           "measure-performance": more.get("measure_performance_parser_fn") or run_parser_fn,
           "measure-sections": run_parser_fn}  # fmt: skip
    for command, what in COMMANDS.items():
        sub = commands.add_parser(command, help=what, description=what)
        _vendor_flags(sub, command, dev_mode)
        vendors = list(sub._actions)
        for add in (common_parser_fn, own[command]):
            if add is not None:
                add(sub)
        prefer_the_programs(sub, vendors)
    args = parser.parse_args(words)
    failures.debug = bool(getattr(args, "debug", False))
    logging.set_level(getattr(args, "log_level", None))
    session.args = args
    if getattr(args, "data_parallel", False):
        distributed.start(args)
    return args


def _vendor_flags(p: argparse.ArgumentParser, command: str, dev_mode: bool) -> None:
    compiling = command == "compile"
    p.add_argument("-b", "--batch-size", type=int, default=1, help="batch size; shapes are fixed when compiling (default: 1)")
    if compiling:
        p.add_argument("--batch-sizes", type=sizes, default=None, help="other sizes that the PEF runs as well: 64,16")
    p.add_argument("-mb", "--microbatch-size", type=int, default=None, help="micro-batches of this size, one update per batch")
    p.add_argument("-p", "--pef", default=None, required=not compiling, help="the PEF file")
    p.add_argument("--pef-name", default=None, help="name of the PEF (default: from the time and the process)")
    p.add_argument("--output-folder", default="out", help="where compile puts it (default: out)")
    p.add_argument("--inference", action="store_true", help="forward only")
    p.add_argument("--mapping", choices=("section", "spatial"), default="section", help="spatial: many steps in one run")
    p.add_argument("--num-spatial-batches", type=int, default=1, help="mini-batches in one run with --mapping spatial")
    p.add_argument("--data-parallel", action="store_true", help="one replica per rank; gradients are averaged")
    p.add_argument("-ws", "--world-size", type=int, default=None, help="ranks that the PEF must be able to serve")
    p.add_argument(
        "--reduce-on-rdu", action="store_true", help="average gradients inside the native step, instead of on the host"
    )
    p.add_argument("--local-rank", type=int, default=-1, help=argparse.SUPPRESS)
    p.add_argument("--n-chips", type=int, default=1, help="kept in the PEF")
    p.add_argument("--num-tiles", type=int, default=None, help="tiles that a run leases; kept in the PEF")
    p.add_argument("--arch", default=None, help="kept in the PEF")
    p.add_argument("--graphamp-preset", default=None, help="mp0 or default: float32; any other preset computes in bfloat16")
    p.add_argument("--enable-mixed-precision-ops", nargs="*", default=None, help="computes in bfloat16")
    p.add_argument("--log-level", default=None, help="debug, info, warning, error")
    p.add_argument("--debug", action="store_true", help="show tracebacks")
    p.add_argument("--verbose", action="store_true", help="say more")
    p.add_argument("-n", "--num-iterations", type=int, default=100, help="iterations to measure (default: 100)")
    p.add_argument("--min-duration", type=float, default=0.0, help="measure at least this many seconds")
    p.add_argument("--run-graph-only", action="store_true", help="measure without passing the inputs again")
    p.add_argument("--num-sections", type=int, default=None, help="how many sections to measure")
    p.add_argument("--json", default=None, help="write the measurements to this file")
    p.add_argument("--compiled-stats-json", default=None, help="write what was compiled to this file")
    p.add_argument("--bench-report-json", default=None, help="newer name of --json")
    p.add_argument("--visualize", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--acc-report-json", default=None, help="write the accuracy to this file")
    p.add_argument("--absolute-numeric-threshold", type=float, default=None, help="for test")
    p.add_argument("--relative-numeric-threshold", type=float, default=None, help="for test")
    p.add_argument("--dump-accuracy-debug-info", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--listen-for-input", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--mock-inference", action="store_true", help=argparse.SUPPRESS)
    shown = None if dev_mode or "--debug" in sys.argv else argparse.SUPPRESS
    for flag in IGNORED_SWITCHES:
        p.add_argument(flag, nargs=0, action=Ignored, say=_say, default=False, help=shown or "ignored")
    for flag in IGNORED_VALUES:
        p.add_argument(flag, nargs="?", action=Ignored, say=_say, default=None, help=argparse.SUPPRESS)
    for flag in IGNORED_LISTS:
        p.add_argument(flag, nargs="*", action=Ignored, say=_say, default=None, help=argparse.SUPPRESS)


def sizes(text: str) -> list[int]:
    """Its name is part of argparse's message."""
    return [int(part) for part in text.split(",") if part]


def flags_of(command: str) -> list[tuple[str, Any, str]]:
    """(spelled, default, meaning) of every flag that a command has before the app adds its own."""
    parser = Parser(add_help=False)
    _vendor_flags(parser, command, dev_mode=True)
    hidden = {"--local-rank": "set by launchers", "--visualize": "read by apps", "--dump-accuracy-debug-info": "read by apps",
              "--listen-for-input": "read by apps", "--mock-inference": "read by apps"}  # fmt: skip
    found = []
    for action in parser._actions:
        spelled, meaning = ", ".join(action.option_strings), str(action.help)
        if isinstance(action, Ignored):
            meaning = "accepted, no effect"
        elif action.help is argparse.SUPPRESS:
            meaning = hidden[action.option_strings[-1]]
        found.append((spelled, action.default, meaning))
    return found


def parse_yaml_to_args(yaml_path: str | Path, args: argparse.Namespace | None = None) -> argparse.Namespace:
    """The keys of a YAML file as arguments, in place where a Namespace is given. Dashes become underscores."""
    import yaml

    args = args if args is not None else argparse.Namespace()
    try:
        content = yaml.safe_load(Path(yaml_path).read_text()) or {}
        found = type(content).__name__
    except (OSError, yaml.YAMLError) as e:
        content, found = None, str(e)
    if not isinstance(content, dict):
        raise tilework.UserError("sambaflow-yaml", f"{yaml_path}: no arguments can be read from it", found=found,
                                 expected="a YAML file with one key for each argument")  # fmt: skip
    for key, value in content.items():
        setattr(args, str(key).replace("-", "_"), value)
    return args
