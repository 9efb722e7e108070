"""Tilework compared with eager PyTorch, torch.compile and JAX: whole training steps on a CPU, in one table.

    python -m bench --smoke                     under three minutes: three rows, checked and timed briefly
    python -m bench                             everything; an hour on two cores, most of it other compilers' work
    python -m bench --rows lenet-1,epoch        some rows; --add keeps the other rows of the last run
    python -m bench --contenders tilework,eager,jax-scan --rounds 5
    python -m bench --keep                      the result becomes bench/results.json, which later runs are compared with
    python -m bench --redraw                    table and charts again from the last run's JSON

Rows: logreg-1 ffn-1 ffn-64 lenet-1 lenet-64 unet-4 lstm-32 gpt-4, epoch, call-item, cold-start, compile-time, overhead, growth.
Results: bench.json, bench.md, bench.png, growth.png in out/bench (--out). What is measured and how: bench/README.md.

Exit code 0; 1 where a contender's arithmetic is wrong, where --strict finds a row worse than kept, or where --smoke finds
Tilework slower than eager; 2 for a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import cold_start, costs
from .machine import describe_machine
from .measure import WrongArithmetic, measure_row
from .processes import ContenderError, Settings, Workers
from .report import markdown, write_json
from .rows import ROWS, row_named
from .verdict import must_hold, ratios, regressions
from .worker import CALL_CONTENDERS, EPOCH_CONTENDERS, STEP_CONTENDERS

KEPT = Path(__file__).parent / "results.json"
OTHER_ROWS = ("epoch", "call-item", "cold-start", "compile-time", "overhead", "growth")
SMOKE_ROWS = ("logreg-1", "ffn-1", "lenet-1")
SMOKE_CONTENDERS = ("tilework", "eager", "jax-scan")
ALL_CONTENDERS = sorted({*STEP_CONTENDERS, *EPOCH_CONTENDERS, *CALL_CONTENDERS, *cold_start.ALL})


def names(text: str, known: Iterable[str], what: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise argparse.ArgumentTypeError(f"no {what} {name!r}{hint} Known: {', '.join(known)}")
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    rows = (*ROWS, *OTHER_ROWS)
    manual = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=manual)
    parser.add_argument("--smoke", action="store_true", help="three rows, three contenders, three short rounds")
    parser.add_argument("--rows", type=lambda t: names(t, rows, "row"), help="comma-separated; all by default")
    parser.add_argument(
        "--contenders", type=lambda t: names(t, ALL_CONTENDERS, "contender"), help="comma-separated; all by default"
    )
    parser.add_argument("--rounds", type=int, help="how often each contender is timed (9; large rows at most 5)")
    parser.add_argument("--slice", type=float, default=0.5, help="seconds of a timing (0.5)")
    parser.add_argument("--threads", type=int, help="cores to pin to, and threads (all allowed cores, at most 2)")
    parser.add_argument("--skip", default="", help="contender:row,... to leave out")
    parser.add_argument("--prepare-limit", type=float, default=900.0, help="seconds that a contender may compile for a row (900)")
    parser.add_argument(
        "--whole-epoch", action="store_true", help="the row epoch: all 60 000 samples for the slow contenders too"
    )
    parser.add_argument("--growth", action=argparse.BooleanOptionalAction, help="the growth chart (part of a full run)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--add", action="store_true", help="keep the rows of the last run that this one does not measure")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of the table")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="write the result to bench/results.json, README.md and docs/benchmark.md (also with --redraw)",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a row is worse than kept")
    parser.add_argument("--redraw", action="store_true", help="measure nothing: table and charts from the last JSON")
    args = parser.parse_args(arguments)
    if args.keep and args.smoke:
        parser.error("--keep is for full measurements, not for --smoke")
    allowed = len(os.sched_getaffinity(0))
    args.threads = args.threads or min(2, allowed)
    if not 1 <= args.threads <= allowed:
        parser.error(f"--threads {args.threads}: this process may use {allowed} cores")
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    args.skip = frozenset(tuple(part.split(":", 1)) for part in args.skip.split(",") if part)
    for pair in args.skip:
        if len(pair) != 2 or pair[0] not in ALL_CONTENDERS or pair[1] not in rows:
            parser.error(f"--skip {':'.join(pair)}: expected contender:row, like compile-step-max:unet-4")
    full = [r for r in rows if r != "growth" or args.growth is not False]
    args.rows = args.rows or (list(SMOKE_ROWS) if args.smoke else full)
    if args.growth and "growth" not in args.rows:
        args.rows.append("growth")
    args.contenders = args.contenders or (list(SMOKE_CONTENDERS) if args.smoke else ALL_CONTENDERS)
    return args


class Run:
    """One run: its settings, and the result, which is on disk after each row."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        rounds = args.rounds or (3 if args.smoke else 9)
        self.settings = Settings(
            out=args.out,
            cores=tuple(sorted(os.sched_getaffinity(0))[: args.threads]),
            rounds=rounds,
            slice_seconds=0.2 if args.smoke else args.slice,
            prepare_limit=args.prepare_limit,
            quick=args.smoke,
            skip=args.skip,
        )
        self.wrong: list[str] = []
        self.result: dict[str, Any] = {"rows": {}}
        if args.add and (args.out / "bench.json").exists():
            self.result = json.loads((args.out / "bench.json").read_text())
        self.result |= {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m bench", *sys.argv[1:]]),
            "machine": describe_machine(),
            "settings": {"threads": args.threads, "rounds": rounds, "slice_seconds": self.settings.slice_seconds},
            "notes": [],
        }
        if importlib.util.find_spec("jax") is None:
            self.result["notes"].append("JAX is not installed: its contenders are left out")
            self.settings.report("JAX is not installed: its contenders are left out")

    def chosen(self, known: Iterable[str]) -> list[str]:
        have_jax = importlib.util.find_spec("jax") is not None
        return [c for c in known if c in self.args.contenders and (have_jax or not c.startswith("jax"))]

    def save(self) -> None:
        order = (*ROWS, *OTHER_ROWS)
        self.result["rows"] = dict(sorted(self.result["rows"].items(), key=lambda pair: order.index(pair[0])))
        for row in self.result["rows"].values():
            row |= ratios(row)
            row.setdefault("date", self.result["date"])  # with --add, rows come from several runs
        self.result["must_hold"] = must_hold(self.result)
        if KEPT.exists() and not self.args.smoke:
            self.result["regressions"] = regressions(self.result, json.loads(KEPT.read_text()))
        write_json(self.args.out / "bench.json", self.result)
        (self.args.out / "bench.md").write_text(markdown(self.result))

    def attempt(self, name: str, measure: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What `measure` gives; where the row cannot be measured, the reason, and the run goes on."""
        try:
            return measure(*arguments, **named)
        except WrongArithmetic as e:
            self.wrong.append(str(e))
            self.settings.report(f"  {name}: WRONG ARITHMETIC: {e}")
            return {"error": f"wrong arithmetic: {e}"}
        except ContenderError as e:
            self.settings.report(f"  {name}: not measured: {e}")
            return {"error": f"not measured: {e}"}

    def rows(self) -> None:
        from .models import write_data

        wanted, total = self.args.rows, len(self.args.rows)
        with Workers("step", self.settings) as workers:
            for name in [n for n in wanted if n in ROWS]:
                self.settings.report(f"[{wanted.index(name) + 1}/{total}] {name}")
                row = row_named(name)
                write_data(row, self.args.out)
                chosen = self.chosen(STEP_CONTENDERS)
                self.result["rows"][name] = self.attempt(name, measure_row, name, chosen, workers, row.rtol, row.large)
                self.save()
        write_data(row_named("logreg-1"), self.args.out)  # the rows below start from its weights
        for name, kind, known in (("epoch", "epoch", EPOCH_CONTENDERS), ("call-item", "call", CALL_CONTENDERS)):
            if name in wanted:
                self.settings.report(f"[{wanted.index(name) + 1}/{total}] {name}")
                with Workers(kind, self.settings) as workers:
                    whole = {"whole_epoch": self.args.whole_epoch}
                    self.result["rows"][name] = self.attempt(
                        name, measure_row, name, self.chosen(known), workers, 1e-3, True, **whole
                    )
                self.save()
        if "cold-start" in wanted:
            self.settings.report(f"[{wanted.index('cold-start') + 1}/{total}] cold-start")
            for name in cold_start.ROWS:
                write_data(row_named(name), self.args.out)
                chosen = self.chosen(cold_start.ALL)
                measured = self.attempt(name, cold_start.measure_cold_start, name, chosen, self.settings)
                self.result.setdefault("cold_start", {})[name] = {"contenders": {}, **measured}
                self.save()
        if "tilework" in self.args.contenders:
            self.costs()
        if "growth" in wanted:
            self.growth()

    def costs(self) -> None:
        for name, key, measure in (
            ("compile-time", "compile_time", costs.measure_compile_time),
            ("overhead", "overhead", costs.measure_overhead),
        ):
            if name in self.args.rows:
                self.settings.report(f"[{self.args.rows.index(name) + 1}/{len(self.args.rows)}] {name}")
                measured = self.attempt(name, measure, self.settings)
                if "error" in measured:
                    self.result["notes"].append(f"{name}: {measured['error']}")
                    self.result.pop(key, None)
                else:
                    self.result[key] = measured
                self.save()

    def growth(self) -> None:
        from .growth import CONTENDERS, SERIES, Points, measure_growth

        for series in SERIES:
            self.settings.report(f"[{self.args.rows.index('growth') + 1}/{len(self.args.rows)}] growth with {series}")

            def keep(points: Points, series: str = series) -> None:
                self.result.setdefault("growth", {})[series] = points
                self.save()

            failed = self.attempt(series, measure_growth, series, self.chosen(CONTENDERS), self.settings, keep)
            if failed:
                self.result["notes"].append(f"growth with {series}: {failed['error']}")


def draw(result: dict[str, Any], out: Path) -> list[Path]:
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from .chart import draw_growth, draw_speeds

    made = [out / "bench.png"] if draw_speeds(result, out / "bench.png") else []
    return made + ([out / "growth.png"] if draw_growth(result.get("growth", {}), result, out / "growth.png") else [])


def keep_result(result: dict[str, Any]) -> None:
    """Later runs are compared with it, and README and documentation show it."""
    from .readme import write

    write_json(KEPT, result)
    write(result)


def too_slow(result: dict[str, Any]) -> list[str]:
    """--smoke: the rows in which Tilework is missing, or not faster than eager."""
    return [name for name, row in result["rows"].items() if row.get("vs_eager", 0.0) < 1.0]


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.redraw:
        path = args.out / "bench.json"
        if not path.exists():
            sys.exit(f"{path}: there is no result to draw from")
        result = json.loads(path.read_text())
        (args.out / "bench.md").write_text(markdown(result))
        draw(result, args.out)
        print(markdown(result, variants=False))
        if args.keep:
            keep_result(result)
        return 0
    shutil.rmtree(args.out / "logs", ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    run.rows()
    run.save()
    result = run.result
    print(json.dumps(result, indent=1) if args.json else markdown(result, variants=False))
    for path in [args.out / "bench.json", args.out / "bench.md", *draw(result, args.out)]:
        run.settings.report(f"written: {path}")
    if args.keep:
        keep_result(result)
        run.settings.report(f"kept: {KEPT.name}, README.md, docs/benchmark.md")
    if run.wrong:
        return 1
    if args.smoke and too_slow(result):
        run.settings.report(f"Tilework is not faster than eager in: {', '.join(too_slow(result))}")
        return 1
    return 1 if args.strict and result.get("regressions") else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves the blocks that end the contenders' processes
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted; what was measured is in the output folder", file=sys.stderr)
        sys.exit(130)
