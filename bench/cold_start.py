"""The row `cold-start`: from the start of a new process to its first finished step. The processes are first_step.py.

tilework        loads an artifact
eager           plain PyTorch, for orientation
compile-model   torch.compile with its caches on disk warm (Inductor's and AOTAutograd's, TORCHINDUCTOR_CACHE_DIR)
jax-cache       jax.jit with JAX's persistent compilation cache warm, its thresholds at zero
jax-export      the step from jax.export's serialized form, with the same cache warm: neither traced nor compiled again

Everyone runs once before, untimed; then all take turns, a new process each time. Medians.
"""

from __future__ import annotations

import time
from typing import Any

from .first_step import CONTENDERS
from .measure import PAUSE_SECONDS, check_losses, summary
from .processes import ContenderError, Settings, run_child

ROWS = ("logreg-1", "lenet-64")
MIN_ROUNDS = 5


def measure_cold_start(row: str, contenders: list[str], settings: Settings) -> dict[str, Any]:
    """{contender: {"whole": summary, "beyond": summary}}, in seconds."""
    cores = ",".join(map(str, settings.cores))

    def start(name: str, *more: str) -> dict[str, Any]:
        arguments = [name, row, str(settings.out), cores, str(time.monotonic()), *more]
        return run_child("bench.first_step", arguments, f"cold-{name}", settings, settings.prepare_limit)

    runs: dict[str, list[dict[str, Any]]] = {}
    skipped: dict[str, str] = {}
    for name in contenders:
        try:
            start(name, "prepare")
            start(name)  # the first run from the prepared state may still fill a cache
            runs[name] = []
        except ContenderError as e:
            skipped[name] = str(e)
            settings.report(f"  cold-start {row} {name:<14} left out: {str(e)[:200]}")
    for _ in range(max(MIN_ROUNDS, min(settings.rounds, 9))):
        for name in [n for n in runs if n not in skipped]:
            time.sleep(PAUSE_SECONDS)
            try:
                runs[name].append(start(name))
            except ContenderError as e:
                skipped[name] = f"failed while timed: {e}"
    done = {name: own for name, own in runs.items() if name not in skipped}
    check_losses({name: [r["loss"] for r in own] for name, own in done.items()}, rtol=1e-3)
    result = {}
    for name, own in done.items():
        result[name] = {part: summary([r[part] for r in own]) for part in ("whole", "beyond")}
        whole, beyond = (result[name][p]["median"] for p in ("whole", "beyond"))
        settings.report(f"  cold-start {row} {name:<14} {whole:6.2f} s, {beyond:6.2f} s of it beyond importing the framework")
    return {"contenders": result, "skipped": skipped}


ALL = list(CONTENDERS)
