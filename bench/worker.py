"""A contender's own process: python -m bench.worker KIND NAME OUT CORES. The measuring process (measure.py) starts it.

One line of JSON comes in on stdin, {"do": method, ...arguments}, and one goes out: {"result": ...} or {"error": ...}. What
the frameworks print goes to stderr, which the measuring process sends to a log file, and never among the answers.

KIND is step (the rows of rows.py), epoch or call (epochs.py); CORES like 0,1. The process pins itself to these cores before
any framework is imported, because the frameworks count their threads by them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

STEP_CONTENDERS = {
    "tilework": "contenders_tilework",
    "eager": "contenders_torch",
    "compile-model": "contenders_torch",
    "compile-step": "contenders_torch",
    "compile-step-max": "contenders_torch",
    "jax-jit": "contenders_jax",
    "jax-scan": "contenders_jax",
}
EPOCH_CONTENDERS = {
    "tilework": "epochs_tilework",
    "eager": "epochs_torch",
    "eager-arrays": "epochs_torch",
    "compile-step": "epochs_torch",
    "jax-scan": "epochs_jax",
}
CALL_CONTENDERS = {
    "tilework": "epochs_tilework",
    "eager": "epochs_torch",
    "compile-step": "epochs_torch",
    "jax-jit": "epochs_jax",
}
KINDS = {"step": STEP_CONTENDERS, "epoch": EPOCH_CONTENDERS, "call": CALL_CONTENDERS}


def make_contender(kind: str, name: str, out: Path) -> Any:
    module = importlib.import_module(f".{KINDS[kind][name]}", __package__)
    return module.make(name, out) if kind == "step" else module.make(kind, name, out)


def environment(contender: str, out: Path, num_threads: int) -> dict[str, str]:
    """For a contender's process: the same number of threads for every library, and caches of its own below `out`."""
    caches = (out / "cache").resolve()
    count = str(num_threads)
    return {
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / f"inductor-{contender}"),
        "TILEWORK_CACHE": str(caches / "tilework"),
        "PYTHONUNBUFFERED": "1",
    }


def main() -> None:
    kind, name, out, cores = sys.argv[1:5]
    os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # from here on, print() and C++ streams go to the log
    contender: Any = None
    for line in commands:
        command = json.loads(line)
        try:
            contender = contender or make_contender(kind, name, Path(out))
            answer = {"result": getattr(contender, command.pop("do"))(**command)}
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {str(e).strip()[:1000]}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
