"""The rows `compile-time` and `overhead`: what Tilework itself costs. No peers; targets are in verdict.py.

compile-time  seconds of tilework.compile in a process that has compiled another, tiny model before, with a cache that knows
              only that one: what a user waits for who changes the model. The median of three, with default options, and with
              programs="fused".
overhead      microseconds beside the arithmetic, on the smallest model there is (one weight, one bias, batch 1):
              in a loop of 10 000 steps in one call, each step; and of one call from Python, beyond such a step.

As a program, this file is the child process of both: python -m bench.costs (compile ROW PROGRAMS OUT | overhead OUT) CORES
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from .processes import Settings, run_child
from .rows import row_named

COMPILED_ROWS = ("logreg-1", "lenet-64", "unet-4")
COMPILE_ROUNDS = 3  # of which the median counts
LOOP_STEPS = 10_000
CALLS = 3_000


def measure_compile_time(settings: Settings) -> dict[str, dict[str, Any]]:
    """{row: {"all": seconds, "fused": seconds}}"""
    result: dict[str, dict[str, Any]] = {}
    cores = ",".join(map(str, settings.cores))
    cache = (settings.out / "cache" / "compile-time").resolve()
    fresh = {"TILEWORK_CACHE": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    for row in COMPILED_ROWS:
        result[row] = {}
        for programs in ("all", "fused"):
            answers = []
            for _ in range(COMPILE_ROUNDS):
                for part in ("programs", "names", "inductor"):  # the compiler's headers stay: they are made once a machine
                    shutil.rmtree(cache / part, ignore_errors=True)
                arguments = ["compile", row, programs, str(settings.out), cores]
                answers.append(run_child("bench.costs", arguments, "compile-time", settings, settings.prepare_limit, fresh))
            answer = sorted(answers, key=lambda a: a["seconds"])[len(answers) // 2]
            result[row][programs] = answer["seconds"]
            result[row][f"{programs}_parts"] = answer["parts"]
            settings.report(f"  compile-time {row:<10} programs={programs:<6} {answer['seconds']:6.2f} s  {answer['parts']}")
    return result


def measure_overhead(settings: Settings) -> dict[str, float]:
    """{"loop_us": a step in a loop, "call_us": a call from Python beyond the step}"""
    cores = ",".join(map(str, settings.cores))
    answer = run_child("bench.costs", ["overhead", str(settings.out), cores], "overhead", settings, settings.prepare_limit)
    settings.report(f"  overhead   {answer['loop_us']:.2f} us a step in a loop, {answer['call_us']:.2f} us a call from Python")
    return answer


def _tiny_step() -> Any:
    import torch

    import tilework

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return tilework.Step(
        model=model,
        inputs=(torch.randn(1, 1),),
        targets=(torch.randn(1, 1),),
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
    )


def _compile(name: str, programs: Any, out: Path) -> dict[str, Any]:
    import tilework

    from .models import build, make_data, optimizer_for

    row, options = row_named(name), tilework.Options(programs=programs)
    folder = out / "artifacts"
    folder.mkdir(parents=True, exist_ok=True)
    tilework.compile(_tiny_step(), folder / "tiny.pef", options=options)
    model, loss = build(row)
    x, y = (t[: row.batch] for t in make_data(row))
    step = tilework.Step(model=model, inputs=(x,), targets=(y,), loss=loss, optimizer=optimizer_for(row, model.parameters()))
    os.sync()  # the headers, where they were made just now: 150 MB
    begin = time.perf_counter()
    done = tilework.compile(step, folder / f"compile-time-{name}.pef", options=options)
    return {"seconds": time.perf_counter() - begin, "parts": done.seconds}


def _overhead(out: Path) -> dict[str, float]:
    import torch

    import tilework

    from .contenders_tilework import ONLY_LOSS

    path = out / "artifacts" / "overhead.pef"
    path.parent.mkdir(parents=True, exist_ok=True)
    tilework.compile(_tiny_step(), path, options=tilework.Options(programs="fused"))
    session = tilework.load(path)
    x, y = torch.randn(LOOP_STEPS, 1), torch.randn(LOOP_STEPS, 1)
    loops, calls = [], []
    one, its = x[:1], y[:1]
    for _ in range(12):
        begin = time.perf_counter()
        session.run(x, y, num_steps=LOOP_STEPS, **ONLY_LOSS)
        middle = time.perf_counter()
        for _ in range(CALLS):
            session.run(one, its)
        loops.append((middle - begin) / LOOP_STEPS)
        calls.append((time.perf_counter() - middle) / CALLS)
    loop, call = statistics.median(loops[2:]), statistics.median(calls[2:])  # the first two warm up
    return {"loop_us": loop * 1e6, "call_us": (call - loop) * 1e6}


def main() -> None:
    what, *arguments, cores = sys.argv[1:]
    os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
    answer = _overhead(Path(arguments[0])) if what == "overhead" else _compile(arguments[0], arguments[1], Path(arguments[2]))
    print("RESULT", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
