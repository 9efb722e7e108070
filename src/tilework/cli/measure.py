"""tilework measure: how fast an artifact runs here, whole and section by section."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .common import devices, out, print_json, progress

NAME = "measure"
HELP = "Time an artifact on random inputs: the fused step, each section, inference and loading."
EXAMPLE = "Example: tilework measure out/lenet.pef --seconds 2"


def command(
    artifact: Annotated[Path | None, typer.Argument(metavar="ARTIFACT", help="The .pef file.")] = None,
    collectives: Annotated[bool, typer.Option("--collectives", help="Time all-reduce between ranks instead, by size.")] = False,
    ranks: Annotated[int, typer.Option(metavar="N", help="Ranks for --collectives, where no launcher started any.")] = 2,
    seconds: Annotated[float, typer.Option(metavar="N", help="How long to time each row.")] = 1.0,
    weights: Annotated[Path | None, typer.Option(metavar="FILE", help="Start from these weights.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", autocompletion=devices,
                                               help="Run on this device instead of the artifact's own.")] = None,
    tiles: Annotated[str | None, typer.Option(metavar="TILES", help="Tiles of its own: 4, chips:1, gpus:1, all.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads. All cores by default.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Accept a file that other users could have changed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    from ..errors import UserError

    if collectives:
        from .collectives import measured

        raise typer.Exit(measured(ranks, json=json))
    if artifact is None:
        raise UserError("artifact-missing", "no artifact is named", fix="tilework measure FILE.pef, or --collectives")
    from ..artifact.names import Kind
    from ..check.check import random_inputs, some_weights
    from ..runtime.session import load

    begin = time.perf_counter()
    session = load(artifact, device=device, weights=weights, num_threads=threads, trust=trust, tiles=tiles)
    loading = time.perf_counter() - begin
    session.load_tensors(some_weights(session))
    signature = session.manifest.signature
    inputs = random_inputs(signature)
    samples = signature.num_rows or 1
    rows: dict[str, dict[str, Any]] = {}
    with progress(quiet=json) as report:

        def timed(name: str, once: Callable[[], object]) -> None:
            report(f"timing {name}")
            rows[name] = _time(once, seconds)

        if session.fused and signature.losses:
            timed("step", lambda: session.run(*inputs))
        if "fwd" in signature.programs and signature.num_micro_batches == 1:
            timed("fwd", lambda: session.run(*inputs, sections=["fwd"]))
            made = session.run(*inputs, sections=["fwd"]).flat
            grads = None if signature.losses else {a.name: t for a, t in zip(signature.outputs, made, strict=True)
                                                  if signature.buffer(Kind.OUTGRAD, a.name) in session.memory}  # fmt: skip
            timed("bwd", lambda: session.run(sections=["bwd"], out_grads=grads))
            if "opt" in signature.programs:
                timed("opt", lambda: session.run(sections=["opt"]))
        if signature.num_micro_batches == 1:
            timed("infer", lambda: session.infer(*inputs[: signature.num_model_inputs]))
        for other in session.manifest.signatures[1:]:
            given = random_inputs(other)
            if "step" in other.programs and other.losses:
                timed(f"step {other.name}", lambda given=given, n=other.name: session.run(*given, signature=n))  # type: ignore[misc]
            given = given[: other.num_model_inputs]
            if other.num_micro_batches == 1:
                timed(f"infer {other.name.removeprefix('infer_')}",
                      lambda given=given, n=other.name: session.infer(*given, signature=n))  # type: ignore[misc]  # fmt: skip
    if json:
        print_json({"device": session.device_name, "samples_per_step": samples, "load_seconds": loading, "rows": rows})
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", "median", "fastest", "calls", "samples/s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['median_us']:.1f} us", f"{row['min_us']:.1f} us", str(row["calls"]),
                      f"{samples / row['median_us'] * 1e6:.0f}" if name in ("step", "infer") else "")  # fmt: skip
    out.print(table)
    out.print(f"loaded in {loading * 1e3:.0f} ms; {samples} samples per step; device {session.device_name}")


def _time(once: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Median and fastest of single calls, after a warm-up. Microseconds."""
    for _ in range(3):
        once()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        begin = time.perf_counter()
        once()
        times.append(time.perf_counter() - begin)
    return {"median_us": statistics.median(times) * 1e6, "min_us": min(times) * 1e6, "calls": len(times)}
