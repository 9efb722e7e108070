"""Training that can be stopped anywhere: after any number of kills, the same losses and the same weights, bit for bit.

A checkpoint holds weights, optimizer state, hyperparameters, random state, the number of the step and where the data stood.
Batches depend on the seed and their number alone (tilework.data), random numbers on the seed and the step, and many steps in one
call give what single calls give. So it does not matter how often a run was stopped, how many steps are in a call, and how many
processes read the data. The number of threads may change how sums are rounded: a run that is to be exact keeps it.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..artifact.names import Buffer, Kind, is_kind
from ..data.feed import Feed, Position
from ..errors import MachineError, TileworkError, UserError
from ..runtime.loader import Chunk
from ..runtime.session import Session
from .checkpoints import Checkpoints, Saved, name_of
from .curves import NAME, draw, series_of
from .folder import METRICS, RunFolder
from .pictures import Pictures

if TYPE_CHECKING:
    from .board import Board

CALL_SECONDS = 0.2  # of one call of many steps: long enough to be efficient, short enough to hear a signal
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # the end of a job's time, and a scheduler that takes the machine back
Report = Callable[[str], None]


@dataclass
class Done:
    """How it went, since this process began."""

    step: int = 0
    resumed: int | None = None  # the step of the checkpoint that it began from
    stopped: str = ""  # the signal that ended it early
    first_loss: float | None = None
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=4096))  # the newest
    seconds: float = 0.0


class Training:
    """
    folder      of the run; its checkpoints are in there
    steps       where to stop, counted from the very beginning; epochs: passes over the data after which to stop
    save_every  steps between checkpoints; there is always one at the end
    keep        how many of the newest checkpoints to keep, beside the best
    resume      continue from the newest checkpoint, if there is one
    hyper       hyperparameters to set, also where the checkpoint has others
    log_dir     a folder for TensorBoard
    histograms  steps between histograms of the parameters there; 0: none
    images      steps between pictures there of what a segmentation model sees and finds; 0: none
    """

    def __init__(
        self,
        session: Session,
        feed: Feed,
        folder: str | Path,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        save_every: int = 1000,
        keep: int = 3,
        resume: bool = False,
        hyper: Mapping[str, float] | None = None,
        log_dir: str | Path | None = None,
        histograms: int = 0,
        images: int = 0,
        asked: dict[str, Any] | None = None,
        report: Report = lambda _: None,
        progress: Callable[[int, int, int, float, float], None] = lambda *_: None,
    ) -> None:
        if save_every < 1:
            raise UserError("checkpoint-keep", "steps between checkpoints", found=str(save_every), expected="1 or more")
        shown = {k: n for k, n in {"histograms": histograms, "images": images}.items() if n}
        if any(n < 0 or log_dir is None for n in shown.values()):
            raise UserError("run-board", "what TensorBoard is to show", found=", ".join(f"{k} {n}" for k, n in shown.items()),
                            expected="steps between them, 1 or more, and a folder", fix="add log_dir (--log-dir)")  # fmt: skip
        if steps is None and epochs is None:
            raise UserError("run-folder", "nothing says where this run ends", expected="steps or epochs")
        self.session, self.feed, self.save_every, self._asked_steps, self.epochs = session, feed, save_every, steps, epochs
        self.steps = steps if steps is not None else 0  # with epochs: known once it is known where the data stand
        self.histograms, self.images = histograms, images
        self._pictures = Pictures(session, feed) if images else None
        self.group = session.group if session.group is not None and session.group.size > 1 else None
        self.first = self.group is None or self.group.rank == 0  # of several ranks one speaks
        self.folder, self._report, self.progress = RunFolder(folder), report, progress
        self.done = Done()
        self._resume, self._hyper, self._signal = resume, dict(hyper or {}), ""
        if self.first:
            self.folder.begin({"artifact": str(session.artifact.path), "digest": session.artifact.digest, "steps": steps,
                               "data": feed.describe(), "threads": torch.get_num_threads(), **(asked or {})},
                              resume=resume)  # fmt: skip
        self._norms = session.computes_grad_norm
        self._log_dir = Path(log_dir) if log_dir is not None and self.first else None
        self._board: Board | None = None
        self._told_problem = False
        self._drawing = (0.0, 0.0)  # when curves.png was drawn last, and how long that took
        if self.group is not None:
            self.group.barrier()
        rank, ranks = (self.group.rank, self.group.size) if self.group is not None else (0, 1)
        speak = self.say if self.first else lambda text: report(f"rank {rank}: {text}")
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep=keep, rank=rank, ranks=ranks, report=speak)

    def say(self, text: str) -> None:
        if self.first:
            self.folder.say(text)
            self._report(text)

    # ---- the way through ----

    def run(self) -> Done:
        begin = time.perf_counter()
        position = self._begin() if self._resume else Position()
        if self.done.resumed is None:
            self.session.num_steps = 0  # those that its weights come from are another run's
        self.steps = self._end_of(position)
        if self.first:
            with suppress(OSError):
                self.folder.note(steps=self.steps)
        self.session.set(self._hyper)
        if self.first:
            self.folder.cut_metrics(self.session.num_steps)
        if self._log_dir is not None:
            from .board import Board

            try:
                self._board = Board(self._log_dir, self.session.num_steps)
            except OSError as e:
                raise MachineError("run-unwritten", f"{self._log_dir}: nothing can be written there", found=str(e),
                                   fix="name a folder that you can write to (--log-dir)") from e  # fmt: skip
        try:
            with _listening(self):
                self._train(position)
        except BaseException as e:
            self.checkpoints.wait()
            self._end(f"failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", begin)
            raise
        self._end(f"stopped by {self.done.stopped}" if self.done.stopped else "done", begin)
        if lines := len(self.folder.waiting):
            raise MachineError("run-unwritten", f"{self.folder.path}: {METRICS} lacks its last {lines} lines",
                               found=self.folder.problem, fix="free some space for the next run")  # fmt: skip
        return self.done

    def _end(self, state: str, begin: float) -> None:
        if self._board is not None:
            self._to_board(lambda board: board.close())
        self.done.step, self.done.seconds = self.session.num_steps, time.perf_counter() - begin
        self._draw()
        if self.first:
            last = self.done.losses[-1] if self.done.losses else None
            try:
                self.folder.note(state=state, step=self.done.step, loss=last, seconds=round(self.done.seconds, 3))
            except OSError as e:
                self.say(f"run.json does not say how the run ended: {e}")
            self.folder.say(f"{state} at step {self.done.step}")
            self.folder.unlock()

    def _end_of(self, position: Position) -> int:
        """The step to stop at. An epoch's number of steps may have changed since the steps before it (ranks, rows of a batch)."""
        if self.epochs is None:
            return self.steps
        whole = self.session.num_steps + max(0, (self.epochs - position.epoch) * self.feed.num_batches - position.batch)
        return whole if self._asked_steps is None else min(self._asked_steps, whole)

    def _train(self, position: Position) -> None:
        """The first call is one step: its time says how many steps make a call. Where data come more slowly than steps are made,
        calls become smaller, so that a signal is heard in time."""
        session, started, size, saved, epoch = self.session, time.perf_counter(), 0, -1, -1
        most = 1
        while session.num_steps < self.steps and not self.done.stopped:
            if position.epoch != epoch:
                epoch, most = position.epoch, max(size, 1)
            with closing(self.feed.chunks(position, self._sizes(most))) as chunks:
                ended: float | None = None  # when the call before ended
                for chunk in chunks:
                    begin = time.perf_counter()
                    try:
                        result = session.run(*chunk.inputs, num_steps=chunk.num_steps, outputs="loss")
                    except UserError as e:
                        raise self._blamed(e, chunk, position) from e
                    took = time.perf_counter() - begin
                    since = time.perf_counter() - ended if ended is not None else took
                    losses, stop, took, since = self._together(_losses(result, chunk.num_steps), took, since)
                    self._record(losses, took, time.perf_counter() - started, chunk, position)
                    position, now = self._after(position, chunk.num_steps), session.num_steps
                    self._show(now)
                    end = now >= self.steps or bool(stop)
                    if now % self.save_every == 0 or end:
                        self._save(position, losses[-1], background=not end)
                        saved = now
                        if not end:
                            self._draw_if_cheap()
                    if stop:
                        self.done.stopped = stop
                        self.say(f"{stop}: saved at step {now}")
                    slow = since > 4 * CALL_SECONDS and chunk.num_steps > 1 and since > 2 * took
                    if slow:  # on all ranks, which have the same times
                        most = max(1, int(CALL_SECONDS / (since / chunk.num_steps)))
                    if end or not size or slow:
                        break
                    ended = time.perf_counter()
            if not size:
                epoch = -1
                size = max(1, min(256, int(CALL_SECONDS / max(took, 1e-9)))) if session.fused is not None else 1
        self.checkpoints.wait()
        if (problem := self.checkpoints.problem) is not None and saved == session.num_steps:
            steps = self.checkpoints.steps()
            there = f"the checkpoint of step {steps[-1]} is good" if steps else "there is no earlier one"
            raise MachineError("run-unwritten", f"the last checkpoint, of step {saved}, was not written",
                               found=f"{type(problem).__name__}: {problem}",
                               fix=f"free some space, then --resume: {there}") from problem  # fmt: skip

    def _after(self, position: Position, count: int) -> Position:
        batch = position.batch + count
        return Position(position.epoch + 1) if batch >= self.feed.num_batches else Position(position.epoch, batch)

    def _sizes(self, most: int) -> Iterator[int]:
        """Steps of each call, more and more: none goes past a checkpoint, or what is shown, or the end. They are the same on all
        ranks."""
        at, size = self.session.num_steps, 2
        while at < self.steps:
            stops = [every - at % every for every in (self.save_every, self.histograms, self.images) if every]
            count = min(size, most, *stops, self.steps - at)
            yield count
            at, size = at + count, 2 * size

    def _together(self, losses: list[float], took: float, since: float) -> tuple[list[float], str, float, float]:
        """Of all ranks: the mean losses, the signal that any of them got, the mean times."""
        if self.group is None:
            return losses, self._signal, took, since
        own = torch.tensor([*losses, took, since, *(float(self._signal == s.name) for s in SIGNALS)], dtype=torch.float64)
        self.group.all_reduce(own)
        found = own.tolist()
        stop = next((s.name for s, n in zip(SIGNALS, found[len(losses) + 2 :], strict=True) if n), "")
        mean = [v / self.group.size for v in found[: len(losses) + 2]]
        return mean[:-2], stop, mean[-2], mean[-1]

    def _record(self, losses: list[float], took: float, since: float, chunk: Chunk, position: Position) -> None:
        now, epoch = self.session.num_steps, position.epoch
        rows = self.feed.batch_size * self.feed.ranks
        rate = round(len(losses) * rows / took, 1) if took else 0.0
        first = now - len(losses) + 1
        norms = self.session.grad_norms(len(losses)).tolist() if self._norms and self.first else []
        rates = _learning_rates(self.session.hyper)
        if self.first:
            self.folder.add_metrics({"step": first + i, "epoch": epoch + 1, "loss": loss, "samples_per_second": rate,
                                     "seconds": round(since, 3), **rates, **({"grad_norm": norms[i]} if norms else {})}
                                    for i, loss in enumerate(losses))  # fmt: skip
            if self.folder.problem and not self._told_problem:
                self.say(f"{METRICS} cannot be written now: {self.folder.problem}; its lines wait, and training goes on")
            self._told_problem = bool(self.folder.problem)
        self._to_board(lambda board: board.add(first, losses, rate, self.session.hyper, norms))
        if self.done.first_loss is None:
            self.done.first_loss = losses[0]
        self.done.losses.extend(losses)
        bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if bad is not None:
            found = f"{self._before(losses, bad)}; {self._inputs_of(chunk, position, bad)}"
            raise UserError("loss-nan", f"the loss of step {first + bad} (epoch {epoch + 1}) is {losses[bad]}",
                            found=found, expected="a finite number",
                            fix=f"{self._newest()}a smaller learning rate, clip_norm, or a look at the data of that batch may "
                            "help; nothing was saved after it")  # fmt: skip
        self.progress(now, self.steps, epoch + 1, losses[-1], rate)

    def _before(self, losses: list[float], bad: int) -> str:
        before = [*self.done.losses][: len(self.done.losses) - len(losses) + bad][-3:]
        return f"losses before it: {', '.join(f'{v:.4g}' for v in before)}" if before else "it is the first step"

    def _inputs_of(self, chunk: Chunk, position: Position, step: int) -> str:
        """Which record of a step's batch is not finite."""
        records, rows = self.feed.records(position, chunk.num_steps)[step], self.feed.batch_size
        for argument, tensor in zip(self.session.manifest.signature.inputs, chunk.inputs, strict=True):
            own = tensor[step * rows : (step + 1) * rows].reshape(rows, -1)
            bad = torch.nonzero(~torch.isfinite(own).all(1)).flatten().tolist() if own.is_floating_point() else []
            if bad:
                return (
                    f"{argument.name} is not finite in record {records[bad[0]]} ({self.feed.source.place(int(records[bad[0]]))})"
                )
        numbers = ", ".join(map(str, records[:8])) + (" and more" if rows > 8 else "")
        return f"the inputs of its batch are finite (record{'s' if rows > 1 else ''} {numbers})"

    def _blamed(self, error: UserError, chunk: Chunk, position: Position) -> UserError:
        """An index that is out of range: in which steps, and where it can be told, in which record."""
        if error.id != "input-values":
            return error
        first = self.session.num_steps + 1
        steps = f"step {first}" if chunk.num_steps == 1 else f"one of the steps {first} to {first + chunk.num_steps - 1}"
        whole = [(a.name, t) for a, t in zip(self.session.manifest.signature.inputs, chunk.inputs, strict=True)
                 if not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool and t.numel()]  # fmt: skip
        found = "; ".join(f"{name}: {int(t.min())} to {int(t.max())}" for name, t in whole) or error.found
        limit = re.search(r"0 <= \w+ < (\d+)", error.found)
        blamed: dict[int, list[str]] = {}  # records, and what is out of range in them
        for name, t in whole if limit else []:
            rows = t.reshape(chunk.num_steps * self.feed.batch_size, -1)
            bad = torch.nonzero(((rows < 0) | (rows >= int(limit[1]))).any(1)).flatten().tolist()  # type: ignore[index]
            if bad:
                number = int(self.feed.records(position, chunk.num_steps).flatten()[bad[0]])
                blamed.setdefault(number, []).append(name)
        if limit and blamed:
            places = [f"{', '.join(names)} of record {n} ({self.feed.source.place(n)})" for n, names in blamed.items()]
            found += f" (0 to {int(limit[1]) - 1} are there); {'; '.join(places)}"
        return UserError(error.id, f"{error.summary}, in {steps} (epoch {position.epoch + 1})", found=found,
                         fix=f"{self._newest()}correct the class labels or token numbers")  # fmt: skip

    def _newest(self) -> str:
        self.checkpoints.wait()
        steps = self.checkpoints.steps()
        return f"the checkpoint of step {steps[-1]} is good (--resume); " if steps else ""

    # ---- what can be looked at ----

    def _show(self, now: int) -> None:
        """What TensorBoard gets beside the losses."""
        if self._board is None:
            return
        self._to_board(lambda board: board.add_memory(now, self.session.planned_bytes))
        if self.histograms and now % self.histograms == 0:
            values = {Buffer(k).name: t for k, t in self.session.tensors().items() if is_kind(k, Kind.PARAM)}
            self._to_board(lambda board: board.add_parameters(now, values))
        if self._pictures is not None and now % self.images == 0:
            picture = self._pictures.drawn()
            self._to_board(lambda board: board.add_picture(now, picture))

    def _to_board(self, add: Callable[[Board], None]) -> None:
        """TensorBoard gets nothing more once it could not be written to. A run does not end by that."""
        if self._board is not None:
            try:
                add(self._board)
            except OSError as e:
                self._board = None
                self.say(f"TensorBoard gets nothing more: {self._log_dir} cannot be written: {e}")

    def _draw_if_cheap(self) -> None:
        """At a checkpoint, unless that would take more than a fiftieth of the time."""
        drawn, took = self._drawing
        if time.perf_counter() - drawn > 50 * took:
            self._draw()

    def _draw(self) -> None:
        """curves.png. A run does not end because it cannot be drawn."""
        if not self.first:
            return
        begin = time.perf_counter()
        try:
            draw(self.folder.path / NAME, series_of(self.folder.metrics()), str(self.folder.path))
        except (TileworkError, OSError) as e:
            self.say(f"{NAME} was not drawn: {e.fix if isinstance(e, TileworkError) else e}")
        self._drawing = (time.perf_counter(), time.perf_counter() - begin)

    # ---- checkpoints ----

    def _save(self, position: Position, loss: float, *, background: bool) -> None:
        state = self.session.snapshot()
        bad = [k for k, t in state.tensors.items() if is_kind(k, Kind.PARAM) and not bool(torch.isfinite(t).all())]
        if bad:
            raise UserError("loss-nan", f"after step {state.num_steps} there are weights that are not finite",
                            found=", ".join(Buffer(k).name for k in bad[:5]),
                            fix=f"{self._newest()}a smaller learning rate or clip_norm may help")  # fmt: skip
        self.checkpoints.save(state, artifact=self.session.artifact.digest, metrics={"loss": loss}, background=background,
                              position={"epoch": position.epoch, "batch": position.batch, **self.feed.describe()},
                              sharded=self.session.shards is not None, extra={"threads": torch.get_num_threads()})  # fmt: skip

    def _begin(self) -> Position:
        """From the newest checkpoint that is whole; from the beginning where there is none."""
        found = self.checkpoints.newest()
        step = found[0].step if found is not None else -1
        if self.group is not None and len({tuple(t) for t in self.group.tell([step])}) > 1:
            seen = f"step {step}" if found is not None else "none"
            raise UserError("checkpoint-damaged", "the ranks see different checkpoints", found=f"{seen} here",
                            fix="all ranks need to see the run's folder")  # fmt: skip
        if found is None:
            self.say("there is no checkpoint yet: starting from the beginning")
            return Position()
        saved, state = found
        self.session.restore(state)
        self.done.resumed = saved.step
        self.say(f"continuing from {name_of(saved.step)}")
        for text in self._changes(saved):
            self.say(f"not the same as before: {text}; the numbers may differ from those of a run that was not stopped")
        return self._position(saved)

    def _changes(self, saved: Saved) -> Iterator[str]:
        if saved.artifact != self.session.artifact.digest:
            yield "the artifact was compiled again"
        now = {**self.feed.describe(), "threads": torch.get_num_threads()}
        before = {**saved.position, "threads": saved.extra.get("threads")}
        for name, value in self._hyper.items():
            now[name] = value
            before[name] = next((v for k, v in saved.hyper.items() if k == name or k.endswith(f".{name}")), None)
        for name, value in now.items():
            if before.get(name) != value:
                yield f"{name} was {before.get(name)}, is {value}"

    def _position(self, saved: Saved) -> Position:
        """Where the data go on: where as many records of the epoch have been seen, by any number of ranks."""
        p = saved.position
        epoch, batch = int(p["epoch"]), int(p["batch"])
        before, now = int(p["batch_size"]) * int(p["ranks"]), self.feed.batch_size * self.feed.ranks
        if before != now:
            seen = batch * before
            batch = seen // now
            if seen % now:
                self.say(f"{seen % now} records of this epoch come a second time")
        return Position(epoch + 1) if batch >= self.feed.num_batches else Position(epoch, batch)


@contextmanager
def _listening(training: Training) -> Iterator[None]:
    """Signals that ask for an end are noted; the training saves first. Only the main thread can listen."""

    def note(number: int, _: Any) -> None:
        training._signal = signal.Signals(number).name

    try:
        before = {s: signal.signal(s, note) for s in SIGNALS}
    except ValueError:  # another thread
        before = {}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _losses(result: Any, num_steps: int) -> list[float]:
    """One loss a step; 0 where there is none."""
    if result.losses is None:
        return [0.0] * num_steps
    return [float(v) for v in result.losses.reshape(num_steps, -1).float().mean(1)]


def _learning_rates(hyper: Mapping[str, float]) -> dict[str, float]:
    """One, as lr, where all groups have the same; otherwise by their names."""
    rates = {k: v for k, v in hyper.items() if k.split(".")[-1] == "lr"}
    return {"lr": next(iter(rates.values()))} if len(set(rates.values())) == 1 else rates
