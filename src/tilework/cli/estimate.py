"""tilework estimate: how fast many replicas would train, from what one rank does here."""

from __future__ import annotations

import json as json_lib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..parallel.estimate import NETWORKS
from .common import err, out, print_json

NAME = "estimate"
HELP = "Predict step time and efficiency with many replicas, from one rank's measured step and measured collectives."
EXAMPLE = "Example: tilework estimate out/gpt.pef --replicas 64 --nodes 8 --network eth100"


def _networks(incomplete: str) -> list[str]:
    return [n for n in NETWORKS if n.startswith(incomplete)]


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The .pef file, compiled with --replicas 2.")],
    replicas: Annotated[int, typer.Option(metavar="N", help="Replicas in all.")] = 2,
    nodes: Annotated[int, typer.Option(metavar="N", help="Machines that they are on.")] = 1,
    network: Annotated[str, typer.Option(metavar="NAME", autocompletion=_networks,
                                         help="eth10, eth25, eth100, ib200, ib400, or LATENCY_US,GB_PER_S.")] = "eth25",
    measured: Annotated[Path | None, typer.Option(metavar="FILE", help="What measure --collectives --json printed.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Also run 1, 2 and 4 ranks here, and compare.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curve to 10 000 replicas.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    from ..artifact.reader import read_artifact
    from ..errors import UserError
    from ..parallel import estimate
    from ..parallel.bandwidth import fitted

    if replicas < 1 or nodes < 1 or nodes > replicas:
        raise UserError("estimate", "replicas and machines", found=f"{replicas} replicas on {nodes} machines",
                        expected="at least one replica on each machine")  # fmt: skip
    link = _network(network)
    manifest = read_artifact(artifact).manifest
    size = sum(manifest.buffers[b].type().num_bytes for bucket in manifest.buckets for b in bucket.buffers)
    sweep = json_lib.loads(measured.read_text()) if measured else _sweep(json)
    within = fitted(sweep["rows"], "device") or fitted(sweep["rows"], "ring")
    if within is None:
        raise UserError("estimate", f"{measured}: no rows of a sweep", fix="tilework measure --collectives --json > FILE")
    step = _step_alone(artifact)
    m = estimate.Measured(step, size, within, sweep["ranks"])
    here = estimate.Measured(step, size, within, sweep["ranks"], len(os.sched_getaffinity(0)))
    # Gradients of one bucket are complete when the backward pass is: there is nothing to hide behind.
    overlap = len(manifest.buckets) > 1 and any(p.completes for p in manifest.programs.values())
    asked = estimate.predict(m, replicas, nodes, link, overlap=overlap)
    compared = [_compared(artifact, here, link, n) for n in (1, 2, 4)] if check else []
    ahead = estimate.curve(m, -(-replicas // nodes), link, overlap=overlap)
    if plot:
        _draw(plot, ahead, m, network, -(-replicas // nodes))
    assumed = [
        f"one rank's step takes {step * 1e3:.3g} ms here, on one core; {size / 1e6:.3g} MB of gradients",
        "every rank has a core of its own; ranks that share this machine's cores (--check) take turns",
        f"within a machine: {within[0] * 1e6:.3g} us + {within[1] * 1e9:.3g} ns per byte, fitted to {sweep['ranks']} ranks here",
        f"between machines: {link.latency * 1e6:.3g} us a message, {link.bandwidth / 1e9:.3g} GB/s (given, not measured)",
        f"a reduction between machines hides behind {estimate.BACKWARD:.0%} of the step" if overlap
        else "no reduction hides behind the backward pass: the gradients are one bucket",
        "no stragglers, no congestion",
    ]  # fmt: skip
    if json:
        print_json(
            {"predicted": _row(asked, step), "curve": [_row(p, step) for p in ahead], "compared": compared, "assumed": assumed}
        )
        return
    out.print(f"{asked.replicas} replicas on {nodes} machine{'s' * (nodes > 1)}: {asked.step * 1e3:.4g} ms per step, "
              f"{asked.reduce * 1e3:.3g} ms of reduce ({asked.algorithm}); efficiency {asked.efficiency(step):.1%}",
              markup=False)  # fmt: skip
    if compared:
        table = Table("ranks", "predicted", "measured", "measured / predicted", box=None)
        for c in compared:
            ratio = c["measured"] / c["predicted"]
            table.add_row(str(c["ranks"]), f"{c['predicted'] * 1e3:.4g} ms", f"{c['measured'] * 1e3:.4g} ms", f"{ratio:.2f}")
        out.print(table)
    table = Table("replicas", "machines", "step", "efficiency", "samples/s, times one rank", box=None)
    for p in ahead:
        gain = p.replicas * p.efficiency(step)
        table.add_row(str(p.replicas), str(p.nodes), f"{p.step * 1e3:.4g} ms", f"{p.efficiency(step):.1%}", f"{gain:,.1f}")
    out.print(table)
    for line in assumed:
        out.print(f"assumed: {line}", markup=False)


def _row(p: Any, alone: float) -> dict[str, Any]:
    return {"replicas": p.replicas, "nodes": p.nodes, "algorithm": p.algorithm, "reduce_seconds": p.reduce,
            "step_seconds": p.step, "efficiency": p.efficiency(alone)}  # fmt: skip


def _network(text: str) -> Any:
    from ..errors import UserError, did_you_mean
    from ..parallel.estimate import Network

    if text in NETWORKS:
        return Network(*NETWORKS[text])
    try:
        latency, bandwidth = (float(part) for part in text.split(","))
        if latency > 0 and bandwidth > 0:
            return Network(latency * 1e-6, bandwidth * 1e9)
    except ValueError:
        pass
    raise UserError("estimate", "the network", found=text, expected=f"{', '.join(NETWORKS)}, or microseconds,GB/s such as 20,5",
                    fix=did_you_mean(text, NETWORKS))  # fmt: skip


def _sweep(quiet: bool) -> Any:
    if not quiet:
        err.print("measuring collectives with 2 ranks", markup=False)
    return json_lib.loads(_ran(["measure", "--collectives", "--ranks", "2", "--json"]))


def _ran(words: list[str]) -> str:
    from ..errors import MachineError

    done = subprocess.run([sys.executable, "-m", "tilework", *words], capture_output=True, text=True)
    if done.returncode:
        raise MachineError(
            "estimate", f"tilework {' '.join(words)} failed", found=(done.stderr.strip().splitlines() or [""])[-1][:200]
        )
    return done.stdout


def _step_alone(artifact: Path) -> float:
    """One rank, one core, as ranks of a full machine have it."""
    words = [sys.executable, "-c", _ALONE, str(artifact)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


_ALONE = "import sys; from tilework.cli.estimate import print_step; print_step(sys.argv[1])"


def print_step(path: str) -> None:
    """Of several ranks the first one speaks."""
    from ..parallel import current

    found = time_step(path)
    group = current()
    if group is None or group.rank == 0:
        print(found, flush=True)


def time_step(path: str) -> float:
    """Seconds per step on one core, the median of calls of many steps. Under a launcher: of this rank, with the others."""
    from ..check.check import random_inputs, some_weights
    from ..parallel import launched, start
    from ..parallel.group import own_share
    from ..runtime.session import load

    group = start() if launched().size > 1 else None
    if group is None:
        os.sched_setaffinity(0, own_share(sorted(os.sched_getaffinity(0)), 0, 2**20)[:1])
    session = load(path, num_threads=1, group=group, trust=True)
    session.load_tensors(some_weights(session))
    inputs = random_inputs(session.manifest.signature)
    session.run(*inputs)
    begin = time.perf_counter()
    session.run(*inputs)
    count = max(3, int(0.2 / (time.perf_counter() - begin)))
    if group is not None:
        count = group.tell(count)[0]
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count):
            session.run(*inputs, outputs="loss")
        times.append((time.perf_counter() - begin) / count)
    median = statistics.median(times)
    return max(group.tell(median)) if group is not None else median


def _compared(artifact: Path, m: Any, link: Any, ranks: int) -> dict[str, Any]:
    from ..parallel.estimate import predict

    if ranks == 1:
        found = _step_alone(artifact)
    else:
        said = _ran(["launch", "-n", str(ranks), "--no-tag", "--", sys.executable, "-c", _ALONE, str(artifact)])
        found = float(said.split()[-1])
    return {"ranks": ranks, "predicted": predict(m, ranks, 1, link).step, "measured": found}


def _draw(path: Path, ahead: list[Any], m: Any, network: str, per_node: int) -> None:
    from ..errors import UserError

    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("estimate", "--plot needs matplotlib", fix="pip install 'tilework[plot]'") from None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    counts = [p.replicas for p in ahead]
    axes.plot(counts, [100 * p.efficiency(m.step) for p in ahead], marker="o")
    axes.set_xscale("log")
    axes.set_ylim(0, 105)
    axes.set_xlabel("replicas")
    axes.set_ylabel("efficiency (%)")
    alone = f"step {m.step * 1e3:.3g} ms, {m.gradient_bytes / 1e6:.3g} MB of gradients"
    axes.set_title(f"predicted: {per_node} per machine, {network}; {alone}", fontsize=9)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
