"""measure-performance and measure-sections."""

from __future__ import annotations

import json as json_module
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilework.frontend.measuring import in_one_call, repeat

from .. import distributed
from ..compiling import as_call, batch_dim_of, leaves, runnable
from ..sambasession import session


def _examples(runner: Any, inputs: Any, train: bool) -> list[Any]:
    """Apps measure with the examples that they compiled with, whose values mean nothing."""
    call = runnable(runner.model, as_call(inputs), batch_dim_of(inputs), train=train)
    return list(runner._flat(list(leaves(call))))


def _once(runner: Any, given: list[Any], forward_only: bool, steps: int) -> Callable[[], Any]:
    if forward_only:
        return lambda: runner.core.infer(*given)
    return lambda: runner.core.run(*given, num_steps=steps)


def measure_performance(
    model: Any,
    inputs: Any,
    batch_size: int = 1,
    n_chips: int = 1,
    inference: bool | None = None,
    run_graph_only: bool = False,
    n_iterations: int = 100,
    json: str | None = None,
    compiled_stats_json: str | None = None,
    data_parallel: bool = False,
    reduce_on_rdu: bool = False,
    use_sambaloader: bool = False,
    min_duration: float = 0.0,
    set_output_grads: bool = True,
    json_counters: str | None = None,
    world_size: int | None = None,
    **_: Any,
) -> tuple[float, float]:
    """Prints and returns (samples a second, seconds a run)."""
    runner = session._traced_runner()
    forward_only = bool(inference) or runner.inference
    given = _examples(runner, inputs, train=not forward_only)
    steps = 1 if forward_only else runner.num_spatial
    if steps > 1:
        given = [g.repeat(steps, *[1] * (g.dim() - 1)) for g in given]
    workers = distributed.get_world_size()
    if workers > 1:
        min_duration = 0.0  # every rank makes as many steps as the others
    once = _once(runner, given, forward_only, steps)
    graph_only = run_graph_only and not forward_only and steps == 1
    together = in_one_call(runner.core, given, n_iterations) if graph_only else None
    print(f"Measuring peformance with world size:  {workers}")
    print("initial run starts.", flush=True)
    begin = time.perf_counter()
    for _i in range(min(10, n_iterations)):
        once()
    print("initial run completes.", flush=True)
    if together is not None:  # the device alone
        took, count = repeat(together, 1, min_duration)
        count *= n_iterations
    else:
        took, count = repeat(once, n_iterations, min_duration)
    latency = took / count
    throughput = workers * batch_size * steps / latency
    print(f"e2e_latency: {latency:.9f} seconds, throughput: {throughput:.3f} samples/s, measured over {count} iterations.")
    print(f"NOTE: This is the combined throughput for {workers} workers")
    print(f"total duration: {time.perf_counter() - begin:.6f} s", flush=True)
    if compiled_stats_json:
        programs = {k: {"sections": p.sections, "operators": len(runner.core.artifact.graphs[k].nodes)}
                    for k, p in runner.manifest.programs.items()}  # fmt: skip
        stats = {"programs": programs, "buffers_bytes": sum(b.type().num_bytes for b in runner.manifest.buffers.values())}
        Path(compiled_stats_json).write_text(json_module.dumps(stats, indent=1) + "\n")
    if json:
        report = {"e2e_latency": latency, "throughput": throughput, "samples_per_second": throughput, "num_iterations": count,
                  "batch_size": batch_size, "steps_per_run": steps, "world_size": workers, "n_chips": n_chips,
                  "inference": forward_only}  # fmt: skip
        Path(json).write_text(json_module.dumps(report, indent=1) + "\n")
    return throughput, latency


def measure_sections(
    model: Any,
    inputs: Any,
    num_sections: int | None = None,
    n_iterations: int = 100,
    batch_size: int = 1,
    json: str | None = None,
    data_parallel: bool = False,
    reduce_on_rdu: bool = False,
    min_duration: float = 0.0,
    **_: Any,
) -> dict[str, float]:
    """Prints and returns seconds for each section."""
    runner = session._traced_runner()
    given = _examples(runner, inputs, train=not runner.inference)
    names = {"fwd": "fwd", "bwd": "bckwd", "opt": "opt"}
    present = [s for s in ("fwd", "bwd", "opt") if s in runner.core.training_sections] or ["fwd"]
    found: dict[str, float] = {}
    for section in present[: num_sections or len(present)]:
        times = []
        for _i in range(max(1, n_iterations)):
            for earlier in present[: present.index(section)]:
                session.run(given, None, None, [names[earlier]])
            begin = time.perf_counter()
            session.run(given, None, None, [names[section]])
            times.append(time.perf_counter() - begin)
        found[names[section]] = sorted(times)[len(times) // 2]
    total = sum(found.values())
    print(f"{'section':<10} {'latency':>14} {'share':>8}")
    for name, seconds in found.items():
        print(f"{name:<10} {seconds:>12.9f} s {100 * seconds / total if total else 0:>7.1f}%")
    print(f"median of {n_iterations} iterations, batch size {batch_size}", flush=True)
    if json:
        Path(json).write_text(json_module.dumps({"sections": found, "batch_size": batch_size}, indent=1) + "\n")
    return found
