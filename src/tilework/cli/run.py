"""tilework run: train from an artifact."""

from __future__ import annotations

import inspect
import itertools
import json as json_lib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import devices, err, find_function, out, print_json, user_code
from .output import strict

NAME = "run"
HELP = "Train: run an artifact over data and save the weights."
EXAMPLE = "Example: tilework run out/lenet.pef --data digits --epochs 2"


class Place(StrEnum):
    device = "device"
    host = "host"


class Bad(StrEnum):
    stop = "stop"
    skip = "skip"


class How(StrEnum):
    auto = "auto"
    ring = "ring"
    hierarchical = "hierarchical"


FORMS = ("synthetic", "idx", "npy", "hdf5", "csv", "images", "tokens")  # of data, beside digits: data/named.py


def _data(incomplete: str) -> list[str]:
    return [name for name in ("digits", "random", *(f"{form}:" for form in FORMS)) if name.startswith(incomplete)]


# Options that do nothing without a folder for the run.
IN_FOLDER = ("save_every", "keep", "resume", "num_workers", "shuffle", "data_in_memory", "data_cache", "bad_records", "log_dir",
             "histograms", "images")  # fmt: skip
WITHOUT_FOLDER = ("save", "log")


def command(
    context: typer.Context,
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The .pef file.")],
    data: Annotated[str, typer.Option(metavar="SOURCE", autocompletion=_data,
                                      help="digits, random, FILE.py:function, or files: docs/runs.md.")] = "random",
    data_path: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with the full MNIST files, for digits.")] = None,
    epochs: Annotated[int, typer.Option(metavar="N", min=1, help="Passes over the data.")] = 1,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after this many steps.")] = None,
    weights: Annotated[Path | None, typer.Option(metavar="FILE", help="Start from these weights.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Save weights and optimizer state at the end.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", autocompletion=devices,
                                               help="Run on this device instead of the artifact's own.")] = None,
    hyper: Annotated[list[str] | None, typer.Option("--hyper", metavar="NAME=VALUE",
                                                    help="Hyperparameter, e.g. lr=0.01. Can be repeated.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed for dropout and for the order of digits.")] = 0,
    tiles: Annotated[str | None, typer.Option(metavar="TILES", help="Tiles of its own: 4, chips:1, gpus:1, all.")] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="CPU threads. All cores by default.")] = None,
    reduce: Annotated[Place, typer.Option(help="With several ranks: where gradients are averaged.")] = Place.device,
    algorithm: Annotated[How, typer.Option(help="With several ranks: how the host averages them.")] = How.auto,
    shard: Annotated[bool, typer.Option("--shard", help="Share out the optimizer state among the ranks.")] = False,
    nan_error: Annotated[bool, typer.Option("--nan-error", help="Stop with an error when the loss is not a number.")] = False,
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for this run's checkpoints and log.")] = None,
    save_every: Annotated[int, typer.Option(metavar="N", help="With --run-dir: steps between checkpoints.")] = 1000,
    keep: Annotated[int, typer.Option(metavar="N", help="With --run-dir: newest checkpoints to keep, beside the best.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help="With --run-dir: continue from its newest checkpoint.")] = False,
    num_workers: Annotated[int, typer.Option(metavar="N", help="With --run-dir: processes that read the data.")] = 0,
    shuffle: Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="With --run-dir: a new order in each epoch.")] = True,
    data_in_memory: Annotated[bool, typer.Option("--data-in-memory", help="With --run-dir: read all data once.")] = False,
    data_cache: Annotated[Path | None, typer.Option(metavar="DIR", help="With --run-dir: keep decoded records here.")] = None,
    bad_records: Annotated[Bad, typer.Option(help="With --run-dir: what to do with records that cannot be read.")] = Bad.stop,
    log_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="With --run-dir: what TensorBoard shows.")] = None,
    histograms: Annotated[int, typer.Option(metavar="EVERY", help="With --log-dir: steps between histograms of weights.")] = 0,
    images: Annotated[int, typer.Option(metavar="EVERY", help="With --log-dir: steps between pictures of masks.")] = 0,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Write step and loss as JSON lines.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Accept a file that other users could have changed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:  # fmt: skip
    from ..errors import UserError
    from ..parallel import launched, start
    from ..runtime.session import load

    unused = _given(context, IN_FOLDER if run_dir is None else WITHOUT_FOLDER)
    if unused:
        why, fix = (
            ("only for", "add --run-dir DIR") if run_dir is None else ("not for", "the folder has checkpoints and metrics.jsonl")
        )
        raise UserError("run-folder", f"{', '.join(unused)}: {why} a run in a folder of its own", fix=fix)
    if run_dir is not None:
        from .in_folder import keep_threads

        keep_threads(artifact, trust)
    group = start() if launched().size > 1 else None
    session = load(artifact, device=device, weights=weights, num_threads=threads, seed=seed, nan_error=nan_error, trust=trust,
                   tiles=tiles, group=group, reduce=reduce.value, algorithm=algorithm.value,
                   shard=shard)  # fmt: skip
    values = {}
    for item in hyper or []:
        name, _, text = item.partition("=")
        try:
            values[name] = float(text)
            if not math.isfinite(values[name]):
                raise ValueError
        except ValueError:
            raise UserError("hyper-unknown", f"--hyper {item}", expected="name=number, such as lr=0.01, and finite") from None
    session.set(values)
    if run_dir is not None:
        from .in_folder import train

        if weights is not None:
            session.seed(seed)  # not the random state that the weights were saved with: this is another run

        if data == "digits" and data_path:
            data = f"digits:{data_path}"
        train(session, run_dir, data=data, epochs=epochs, steps=steps, save_every=save_every, keep=keep, resume=resume,
              hyper=values, seed=seed, shuffle=shuffle, workers=num_workers, bad_records=bad_records.value,
              in_memory=data_in_memory, cache=data_cache,
              log_dir=log_dir, histograms=histograms, images=images, json=json)  # fmt: skip
        return
    batches = _batches(data, data_path, session, seed, steps)
    if group is not None:
        batches = _of_rank(batches, group.rank, group.size)
    losses: list[float] = []
    if group is not None:
        group.barrier()  # ranks begin together: what they wait for each other is not their speed
    begin = last = time.perf_counter()
    first = group is None or group.rank == 0  # of several ranks one speaks, and writes files
    lines = open(log, "w") if log and first else None  # noqa: SIM115
    try:
        for epoch in range(epochs):
            left = None if steps is None else steps - len(losses)
            for found in _trained(session, batches(epoch), left):
                for loss in found:
                    losses.append(loss)
                    if lines:
                        lines.write(json_lib.dumps(strict({"step": len(losses), "epoch": epoch + 1, "loss": loss})) + "\n")
                now = time.perf_counter()
                if not json and first and now - last > 2.0:
                    err.print(f"epoch {epoch + 1}/{epochs}, step {len(losses)}: loss {losses[-1]:.4f}, "
                              f"{len(losses) / (now - begin):.0f} steps/s", markup=False)  # fmt: skip
                    last = now
    finally:
        if lines:
            lines.close()
    took = time.perf_counter() - begin
    bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if bad is not None and first:
        err.print(f"tilework: warning: from step {bad + 1} on the loss is {losses[bad]}; --nan-error stops there, and "
                  "--run-dir names the record", markup=False)  # fmt: skip
    if not losses:
        raise UserError("data-empty", "the data contained no complete batch", found=data,
                        expected=f"at least {session.manifest.signature.num_rows} rows")  # fmt: skip
    if save:
        session.gather()
        if first:
            session.save(save)
    if session.shards is not None and first and not json:
        err.print(session.shards.describe(), markup=False)
    ranks = _over_ranks(session, len(losses), took) if group is not None else {}
    if not first:
        return
    summary = {"steps": len(losses), "seconds": round(took, 3), "steps_per_second": round(len(losses) / took, 1),
               "first_loss": losses[0], "last_loss": losses[-1], "device": session.device_name,
               "saved": str(save) if save else None, "log": str(log) if log else None, **ranks}  # fmt: skip
    if json:
        print_json(summary)
    else:
        tail = losses[-max(1, len(losses) // 20) :]
        out.print(f"{len(losses)} steps in {took:.2f} s ({len(losses) / took:.0f} steps/s) on {session.device_name}; "
                  f"loss {losses[0]:.4f} -> {sum(tail) / len(tail):.4f} (mean of the last {len(tail)})"
                  + (f"; saved {save}" if save else ""))  # fmt: skip
        if ranks:
            each = ", ".join(f"{v:.0f}" for v in ranks["samples_per_second_by_rank"])
            out.print(f"{ranks['ranks']} ranks: {each} samples/s, {ranks['samples_per_second']:.0f} together; "
                      f"efficiency {1 - ranks['reduce_share']:.1%}, the rest of the time went into reduce",
                      markup=False)  # fmt: skip


def _given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of the options that are on the command line."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [f"--{k.replace('_', '-')}" for k, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _of_rank(batches: Callable[[int], Iterable[Any]], rank: int, size: int) -> Callable[[int], Iterable[Any]]:
    """Every rank its own batches, by turns, and as many as the others: what is left over is left out."""

    def own(epoch: int) -> Iterator[Any]:
        source = iter(batches(epoch))
        while len(turn := list(itertools.islice(source, size))) == size:
            yield turn[rank]

    return own


def _over_ranks(session: Any, steps: int, took: float) -> dict[str, Any]:
    rows = session.manifest.signature.num_rows or 1
    times = session.page.times()
    busy = sum(v for k, v in times.items() if k != "idle") or 1.0
    told = session.group.tell({"rate": steps * rows / took, "reduce": times["reduce"] / busy})
    return {"ranks": session.group.size, "samples_per_second_by_rank": [round(t["rate"], 1) for t in told],
            "samples_per_second": round(sum(t["rate"] for t in told), 1),
            "reduce_share": round(sum(t["reduce"] for t in told) / len(told), 4)}  # fmt: skip


def _trained(session: Any, batches: Iterable[Any], limit: int | None) -> Iterator[list[float]]:
    """Trains over the batches, `limit` of them at most, many steps in one call. Yields the losses of each call's steps.

    The first step is run alone: its time says how many steps make a call that is long enough to be efficient, and short
    enough to show progress. An exception in the user's data code is reported as the user's."""
    source = iter(itertools.islice(batches, limit))
    begin = time.perf_counter()
    yield from _calls(session, itertools.islice(source, 1), 1)
    fused = session.fused is not None
    yield from _calls(session, source, max(1, min(256, int(0.2 / (time.perf_counter() - begin)))) if fused else 1)


def _calls(session: Any, source: Iterator[Any], num_steps: int) -> Iterator[list[float]]:
    from ..runtime.loader import Loader

    sizes = [c.signature.num_rows for c in session.calls if c.fused]
    chunks = Loader(source, num_steps=num_steps).chunks(session.manifest.signature.batch_dim, sizes)
    while True:
        with user_code("reading the data"):
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield _losses(session.run(*chunk.inputs, num_steps=chunk.num_steps, outputs="loss"), chunk.num_steps)


def _losses(result: Any, num_steps: int) -> list[float]:
    """One loss a step; 0 where there is none."""
    if result.losses is None:
        return [0.0] * num_steps
    return [float(v) for v in result.losses.reshape(num_steps, -1).float().mean(1)]


def _batches(data: str, folder: Path | None, session: Any, seed: int, steps: int | None) -> Callable[[int], Iterable[Any]]:
    """A function from the epoch's number to its batches."""
    from ..check.check import random_inputs
    from ..errors import UserError
    from ..zoo import digits

    signature = session.manifest.signature
    rows = signature.num_rows or 1
    if data == "random":
        return lambda epoch: itertools.repeat(random_inputs(signature, seed + epoch), steps or 1)
    form, _, place = data.partition(":")
    if form == "digits":
        x, y = digits.load("train", place or folder)
        shape = signature.inputs[0].type.shape
        if math.prod(shape[1:]) != 784 or len(signature.inputs) != 2:
            raise UserError("data-shape", "this artifact does not take digits",
                            found=", ".join(f"{a.name} {a.type.type()}" for a in signature.inputs),
                            expected="images of 784 values, and labels")  # fmt: skip
        return lambda epoch: ((a.reshape(rows, *shape[1:]), b) for a, b in digits.batches(x, y, rows, seed + epoch))
    if form in FORMS:
        from ..data.feed import Position
        from .in_folder import feed_of

        feed = feed_of(session, data, seed=seed)
        return lambda epoch: (chunk.inputs for chunk in feed.chunks(Position(epoch), itertools.repeat(1)))
    function = find_function(data)
    takes = len(inspect.signature(function).parameters)
    return lambda epoch: function(rows) if takes else function()
