"""tilework run --run-dir: training in a folder of its own, with checkpoints, that goes on after any end."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .common import err, find_function, out, print_json, user_code

if TYPE_CHECKING:
    from ..data.feed import Feed
    from ..runtime.session import Session


LIBRARY = ("convolution", "attention", "fft", "linalg")  # calls of torch's library whose sums depend on the number of threads


def keep_threads(artifact: Path, trust: bool) -> None:
    """A run can be continued exactly if sums are rounded the same way however busy the machine is. Our own loops and products see
    to that. For programs with calls of torch's library, the number of threads has to stay (TILEWORK_ADAPT)."""
    from ..artifact.reader import read_artifact

    found = read_artifact(artifact, trust=trust)
    called = any(p.called for p in found.manifest.programs.values())
    if called or any(word in n.op for g in found.graphs.values() for n in g.nodes for word in LIBRARY):
        os.environ.setdefault("TILEWORK_ADAPT", "0")


def train(
    session: Session,
    folder: Path,
    *,
    data: str,
    epochs: int,
    steps: int | None,
    save_every: int,
    keep: int,
    resume: bool,
    hyper: dict[str, float],
    seed: int,
    shuffle: bool,
    workers: int,
    bad_records: str,
    in_memory: bool,
    cache: Path | None,
    log_dir: Path | None,
    histograms: int,
    images: int,
    json: bool,
) -> None:
    from ..runs.training import Training

    def say(text: str) -> None:
        err.print(text, markup=False, highlight=False)

    rank, ranks = (session.group.rank, session.group.size) if session.group else (0, 1)
    feed = feed_of(session, data, seed=seed, shuffle=shuffle, num_workers=workers, bad_records=bad_records, in_memory=in_memory,
                   cache=cache, rank=rank, ranks=ranks, report=say)  # fmt: skip
    training = Training(session, feed, folder, steps=steps, epochs=epochs, save_every=save_every, keep=keep, resume=resume,
                        hyper=hyper, log_dir=log_dir, histograms=histograms, images=images,
                        asked={"command": sys.argv, "epochs": epochs, "source": data}, report=say,
                        progress=_Progress())  # fmt: skip
    done = training.run()
    if not training.first:
        return
    made = len(done.losses)
    summary = {"step": done.step, "steps": training.steps, "resumed": done.resumed, "stopped": done.stopped,
               "seconds": round(done.seconds, 3),
               "first_loss": done.first_loss, "last_loss": done.losses[-1] if made else None, "run": str(folder)}  # fmt: skip
    if json:
        print_json(summary)
    elif not made:
        out.print(f"{folder}: all {done.step} steps were done already", markup=False)
    else:
        tail = [*done.losses][-max(1, made // 20) :]
        out.print(f"step {done.step} of {training.steps} after {done.seconds:.2f} s on {session.device_name}; "
                  f"loss {done.first_loss:.4f} -> {sum(tail) / len(tail):.4f} (mean of the last {len(tail)}); "
                  f"saved in {folder}", markup=False)  # fmt: skip
    if done.stopped:
        raise typer.Exit(128 + signal.Signals[done.stopped])


class _Progress:
    def __init__(self) -> None:
        import time

        self.clock, self.last = time.monotonic, time.monotonic()

    def __call__(self, step: int, steps: int, epoch: int, loss: float, rate: float) -> None:
        if self.clock() - self.last > 2.0:
            self.last = self.clock()
            err.print(f"epoch {epoch}, step {step}/{steps}: loss {loss:.4f}, {rate:.0f} samples/s", markup=False)


def feed_of(
    session: Session,
    data: str,
    *,
    in_memory: bool = False,
    cache: Path | None = None,
    report: Callable[[str], None] = lambda _: None,
    **how: Any,
) -> Feed:
    """The data that `data` names, in the batches that the session takes."""
    from ..artifact.graph import DTYPES
    from ..data.feed import Feed
    from ..data.named import FORMS, fitted, source_of
    from ..errors import UserError

    signature = session.manifest.signature
    if signature.batch_dim != 0:
        raise UserError("data-shape", "this artifact's batches do not lie along the first dimension",
                        found=f"batch_dim {signature.batch_dim}", expected="batch_dim 0")  # fmt: skip
    wanted = [(a.name, DTYPES[a.type.dtype], tuple(a.type.shape[1:])) for a in signature.inputs]
    place = data.partition(":")[0]
    if ":" in data and place not in FORMS and (not place.isidentifier() or importlib.util.find_spec(place) is not None):
        if cache is not None:
            raise UserError("data-cache", f"--data-cache: nobody knows which files {data} reads", expected="data with a form",
                            fix="let the function keep what it has read itself; or --data-in-memory")  # fmt: skip
        with user_code("opening the data"):
            found = find_function(data)()
        if not all(hasattr(found, name) for name in ("rows", "place", "__len__")):
            raise UserError("data-option", f"{data} returned something that a run cannot be continued with",
                            found=type(found).__name__, expected="a source of records (tilework.data)",
                            fix="return tilework.data.Arrays((x, y)), or tilework.data.Each(count, read, place)")  # fmt: skip
        source = fitted(found, wanted, data, in_memory=in_memory)
    else:
        source = source_of(data, wanted, in_memory=in_memory, cache=cache, report=report)
    return Feed(source, signature.num_rows or 1, report=report, **how)
