"""The coverage table: every case in a process of its own.

python tests/coverage/run.py [--only PATTERN] [--jobs 2] [--device cpu] [--out docs/coverage.md] [--json FILE [--go-on]]
python tests/coverage/run.py --case hf/bert       one, in this process, with its traceback
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("TILEWORK_LEASE", "0")
sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from judge import Outcome, all_cases, run

OPTIONS = {"programs": "fused", "opt_level": 1}


def one(name: str, device: str) -> Outcome:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return run(name, Path(folder), device=device, **OPTIONS)


def apart(name: str, device: str) -> Outcome:
    """In a process of its own: one that ends it is a failure of that case and not the end of all."""
    command = [sys.executable, __file__, "--case", name, "--device", device, "--quiet"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return Outcome("failed", "did not end within 15 minutes")
    line = next((s for s in done.stdout.splitlines() if s.startswith("OUTCOME ")), None)
    if line is None:
        return Outcome("failed", f"process ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return Outcome(**json.loads(line.removeprefix("OUTCOME ")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, help="outcomes, written after each case")
    parser.add_argument("--go-on", action="store_true", help="leave out the cases that --json has already")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case")
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        outcome = one(args.case, args.device)
        print("OUTCOME", json.dumps(vars(outcome))) if args.quiet else print(outcome)
        return 0 if outcome.trains else 1
    names = [n for n in all_cases() if any(fnmatch.fnmatch(n, p) for p in args.only.split(","))]
    found: dict[str, Outcome] = {}
    if args.go_on and args.json and args.json.exists():
        found = {n: Outcome(**o) for n, o in json.loads(args.json.read_text()).items() if n in names}

    def show(name: str) -> None:
        found[name] = outcome = apart(name, args.device)
        if args.json:
            args.json.write_text(json.dumps({n: vars(o) for n, o in list(found.items())}, indent=1))
        said = " ".join(outcome.detail.split())[:230]
        print(f"{len(found):4d}/{len(names)} {name:40s} {outcome.verdict:10s} {outcome.compile_cpu:5.1f} s  {said}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(show, [n for n in names if n not in found]))
    print(collections.Counter(o.verdict for o in found.values()))
    if args.out:
        args.out.write_text(page({n: found[n] for n in names}))
    return 0


def page(found: dict[str, Outcome]) -> str:
    """docs/coverage.md."""
    cases = all_cases()
    trains = [n for n, o in found.items() if o.trains]
    rest = [n for n, o in found.items() if not o.trains]
    expected = [n for n in rest if cases[n]().refused and found[n].verdict == "refused"]
    count = len(found) - len(expected)
    lines = [
        "# Models of public libraries",
        "",
        f"{len(trains)} of {count} models ({100 * len(trains) / count:.1f} %) train with eager PyTorch's numbers.",
        "",
        "Each model is tiny, in `train()` mode, with its library's defaults for dropout, caches and the rest. It trains for",
        "five steps and is compared with eager PyTorch, from the same weights and with the same random numbers. Losses must",
        "agree within 1e-4, and parameters within 2 % of the largest update. If float32 is too chaotic to tell, float64 decides.",
        "",
        f"{len(expected)} more models are there to be refused, with the line at fault: a static step cannot run them.",
        "",
        f'Written by `make coverage` with torch {torch.__version__.split("+")[0]}; compiled with `programs="fused"` at -O1.',
        "CPU seconds are for whole compiles on a machine that did two or three things at a time. Below 7 s, most programs came",
        "from the cache.",
        "",
        "## Not trained",
        "",
        "| model | result | message |",
        "|---|---|---|",
    ]
    for name in rest:
        said = " ".join(found[name].detail.split(" see: ")[0].split()).replace("|", "\\|")
        said = re.sub(r"\S*/site-packages/", "", said)
        lines.append(f"| {name} | {found[name].verdict}{' (as expected)' if name in expected else ''} | {said[:400]} |")
    lines += ["", "## Trained", "", "| model | compile (CPU s) | operators called through torch's dispatcher |", "|---|---|---|"]
    for name in trains:
        called = ", ".join(found[name].called[:4]) + (" ..." if len(found[name].called) > 4 else "")
        decided = " (float64 decided)" if "float64" in found[name].verdict else ""
        lines.append(f"| {name}{decided} | {found[name].compile_cpu:.1f} | {called.replace('*', 'all')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
