"""Fuzzing by hand:

    python tests/fuzz/run.py --programs 500 --seed 3 [--device cpu|reference|both|cuda] [--minutes 20] [--jobs 1] [--asan]
    python tests/fuzz/run.py --program 3/17            one program again: its source, and what is wrong with it
    python tests/fuzz/run.py --recipe "{...}"          the same for a recipe

Programs run in a process of their own, so that one which ends its process is a finding and not the end. Failures are shrunk.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random

os.environ.setdefault("TILEWORK_LEASE", "0")
import torch

sys.path.insert(0, str(Path(__file__).parent))
from compare import Differs, check
from programs import Recipe, drawn, source
from shrink import shrink

HERE = Path(__file__).resolve()
DEVICES = {"cpu": ("cpu",), "reference": ("reference",), "both": ("reference", "cpu"), "cuda": ("cuda",)}


def one(recipe: Recipe, devices: tuple[str, ...]) -> str:
    """'ok', 'wobbly', 'refused <id>', or 'failed <what>': one line."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = check(recipe, Path(folder), devices)
        except Differs as e:
            return "failed " + str(e).split("\n")[0]
        except Exception as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            return f"failed {type(e).__name__} at {Path(where.filename).name}: {' '.join(str(e).split())[:300]}"
    return f"refused {outcome.refused}" if outcome.refused else "wobbly" if outcome.wobbly else "ok"


def kind(line: str) -> str:
    """What is alike in two failures of the same fault: the device, or the exception."""
    return line.split(":")[0] if line.startswith("failed") else line


class Worker:
    """A process that runs one recipe after the other."""

    def __init__(self, device: str) -> None:
        self.command = [sys.executable, str(HERE), "--device", device, "--worker"]
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, recipe: Recipe) -> str:
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(repr(recipe) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return line.removeprefix("RESULT ").strip()
        said = self.process.communicate()[1]
        first = next(
            (s for s in said.splitlines() if "ERROR: AddressSanitizer" in s or "runtime error" in s),
            said.strip().splitlines()[-1:],
        )
        code, self.process = self.process.returncode, None
        return f"failed process ended with {code}: {first}"

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


def serve(devices: tuple[str, ...]) -> None:
    torch.set_num_threads(2)
    for line in sys.stdin:
        print("RESULT", one(eval(line), devices).replace("\n", " "), flush=True)


def _alike(worker: Worker, want: str, recipe: Recipe) -> bool:
    return kind(worker(recipe)) == want


def fuzz(args: argparse.Namespace) -> int:
    start, counts, findings = time.monotonic(), collections.Counter(), 0
    worker = Worker(args.device)
    made = 0
    for i in range(args.programs):
        if args.minutes and time.monotonic() - start > 60 * args.minutes:
            break
        recipe = drawn(Random(f"{args.seed}/{i}"))
        result = worker(recipe)
        made += 1
        counts[result if not result.startswith("failed") else "failed"] += 1
        if not result.startswith("failed"):
            continue
        findings += 1
        shipped = worker(recipe | {"variant": "shipped"})
        print(f"\n==== program {args.seed}/{i}: {result}\nas it ships (a compile checks itself): {shipped}", flush=True)
        if args.shrink:
            small = shrink(recipe, functools.partial(_alike, worker, kind(result)), args.shrink)
            print(f"{source(small)}\n{small}\n{worker(small)}", flush=True)
        else:
            print(f"{source(recipe)}\n{recipe}", flush=True)
    worker.close()
    refused = sum(n for k, n in counts.items() if k.startswith("refused"))
    print(f"\n{made} programs on {args.device} from seed {args.seed}: {findings} failed, {refused} refused, "
          f"{counts['wobbly']} as firm as eager PyTorch only, {time.monotonic() - start:.0f} s")  # fmt: skip
    for name, n in counts.most_common():
        print(f"  {n:5d}  {name}")
    return 1 if findings else 0


def with_asan() -> None:
    """Goes on as the same command with AddressSanitizer's library loaded first, and native code compiled for it."""
    # libstdc++ as well: without it AddressSanitizer does not find what throws exceptions, and stops at the first one
    library = " ".join(
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    )
    os.environ |= {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "TILEWORK_CXXFLAGS": "-fsanitize=address -fno-omit-frame-pointer -g1",
        "TILEWORK_OWN_TEMPORARIES": "1",  # each an allocation of its own: a kernel that leaves one is seen
        "TILEWORK_CACHE": os.environ.get("TILEWORK_CACHE", str(Path.home() / ".cache/tilework")) + "-asan",
    }
    command = [sys.executable, *(a for a in sys.argv if a != "--asan")]
    print("AddressSanitizer:", shlex.join(command), flush=True)
    os.execv(sys.executable, command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--device", choices=DEVICES, default="both")
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--shrink", type=int, default=60, metavar="ATTEMPTS")
    parser.add_argument("--asan", action="store_true")
    parser.add_argument("--program", help="SEED/NUMBER")
    parser.add_argument("--recipe")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.asan:
        with_asan()
    if args.worker:
        serve(DEVICES[args.device])
        return 0
    if args.program or args.recipe:
        recipe = eval(args.recipe) if args.recipe else drawn(Random(args.program))
        print(source(recipe), recipe, sep="\n", flush=True)
        torch.set_num_threads(2)
        print(one(recipe, DEVICES[args.device]))
        return 0
    return fuzz(args)


if __name__ == "__main__":
    sys.exit(main())
