"""A session: a loaded artifact with its device copies of parameters, buffers and optimizer state.

session = tilework.load("lenet.pef")
result = session.run(x, y)           # one whole step: fwd, bwd, opt, in one native call
result.loss, result.outputs
session.to_host(model)               # only now does the host's model change
"""

from __future__ import annotations

import builtins
import operator
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .. import hosts
from ..artifact.graph import DTYPES
from ..artifact.names import NORMS, WEIGHTS, Buffer, Kind, is_kind
from ..artifact.reader import Artifact, read_artifact
from ..artifact.structure import unflatten
from ..errors import UserError, did_you_mean
from ..tiles.page import COPY, LOAD, SAVE, WAIT
from . import checkpoint, sync, together
from .advice import advise
from .arguments import by_name, joined
from .calls import Calls
from .checkpoint import State
from .checks import raise_failed
from .devices import NotANumber, device_class, rank_base
from .fitting import require
from .hyper import part_of, resolve
from .leasing import Footing
from .loader import Chunk
from .reducing import Reducer
from .results import Result
from .running import OutGrads, Running, no_gradients

if TYPE_CHECKING:
    from ..parallel.group import Group
    from ..parallel.shards import Shards


class Session:
    """A loaded artifact, with its own copies of parameters, buffers and optimizer state. tilework.load makes it."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        device: str | None = None,
        weights: str | Path | Literal[False] | None = None,
        num_threads: int | None = None,
        seed: int = 0,
        nan_error: bool = False,
        rank: int = 0,
        footing: Footing | None = None,
    ) -> None:
        self._footing = footing or Footing(leased=False)
        self.page = self._footing.page
        self.artifact = artifact
        self.manifest = artifact.manifest
        self.device_name = device or self.manifest.fingerprint.device
        require(self.manifest.fingerprint, self.device_name, artifact.path)
        self.nan_error = nan_error
        self.rank = rank
        self.group: Group | None = None
        self.joined: dict[str, Any] = {}  # how, as join() takes it
        self._gathered_at = -1
        self._closed = self._freed = False
        kind = device_class(self.device_name)
        self._computes = kind.computes
        self._device = kind(artifact, num_threads or self._footing.num_threads)
        self.memory = sync.Buffers(self.manifest, self._device.memory)
        self.page.set_bytes(self._device.memory.num_bytes)
        natively = self._device.meter(self.page)
        self.calls = [
            Calls(self.manifest, signature, self._device, self.page, natively=natively, nan_error=nan_error)
            for signature in self.manifest.signatures
        ]
        self._running = Running(self.manifest, self.calls, self.memory, self.page, nan_error=nan_error)
        self._first = self.calls[0]
        self._only = len(self.calls) == 1
        self.seed(seed)
        self._has_weights = not self.manifest.parameters
        self._followed: list[torch.optim.Optimizer] = []
        self._but: frozenset[str] = frozenset()  # hyperparameters that do not follow
        self._seen: dict[str, float] = {}  # what the followed optimizers said last
        self._sets_hyper = self._advised = False
        # Buffers and the slot of the page are the session's own: one call at a time, whichever thread it comes from.
        self._lock = threading.RLock()
        for name, tensor in artifact.constants.items():
            self.memory.write(name, tensor)
        for name, value in sync.initial_state(self.manifest).items():
            self.memory.fill(name, value)
        self._set(self.manifest.hyperparameters)
        self._first_weights(weights)

    # ---- set-up ----

    def _first_weights(self, given: str | Path | Literal[False] | None) -> None:
        if given is False:
            return
        if given is not None:
            self.load(given)
        elif self.artifact.weights is not None:
            self.load_tensors(self.artifact.weights)
        elif (beside := self.artifact.weights_beside) is not None:
            checkpoint.require_digest(beside, self.manifest.weights.sha256, self.artifact.path)
            self.load(beside)

    def seed(self, seed: int, counter: int = 0, inferred: int = 0) -> None:
        """Restart the random numbers (dropout and others) from this seed. seed(*random_state()) continues from where it was.
        infer() draws from a separate stream, so it does not affect training. Replicas draw different numbers."""
        self._seed = seed
        self._device.seed(rank_base(seed, self.rank), counter, inferred)

    def random_state(self) -> tuple[int, int, int]:
        """(seed, micro-batches drawn since, batches that infer() drew since)."""
        return (self._seed, *self._device.random_state()[1:])

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far, including those before a loaded checkpoint."""
        return self._running.num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._running.num_steps = value

    # ---- hyperparameters ----

    @property
    def hyper(self) -> dict[str, float]:
        """Every run-time hyperparameter and its value on the device."""
        known = self.manifest.hyperparameters
        buffers = {k: Kind.HYPER.of(k) for k in known}
        return {k: float(self.memory.read(b)) if b in self.memory else known[k] for k, b in buffers.items()}

    def set(self, values: Mapping[str, float] | None = None, /, **named: float) -> None:
        """Change hyperparameters, from the next step on. A bare name (lr, momentum, p) sets it in every group or site."""
        self._set({**(values or {}), **named})
        self._sets_hyper = True

    def _set(self, values: Mapping[str, float]) -> None:
        for full, value in resolve(self.manifest, values, None).items():
            self.memory.fill(Kind.HYPER.of(full), value)

    def follow(self, *optimizers: torch.optim.Optimizer, but: str | Iterable[str] = ()) -> None:
        """Read hyperparameters from these host optimizers before each call, so that torch's LR schedulers work. The ones named in
        `but` are left alone."""
        names = [but] if isinstance(but, str) else list(but)
        kept = frozenset(resolve(self.manifest, dict.fromkeys(names, 0.0), None))
        if kept != self._but or len(optimizers) != len(self._followed) or any(map(operator.is_not, optimizers, self._followed)):
            self._followed, self._but, self._seen = list(optimizers), kept, {}
        for optimizer in optimizers:  # the scheduler's check that optimizer.step() comes first: our steps count
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def _follow_now(self) -> None:
        now = sync.hyper_of(self.manifest, self._followed)
        if now != self._seen:
            self._seen = now
            self._set({k: v for k, v in now.items() if k not in self._but})

    # ---- replicas ----

    def reduce_with(self, reducer: Reducer | None) -> None:
        """Make this session one of several replicas: between bwd and opt, `reducer` combines their gradients. The artifact must
        be compiled for replicas (num_replicas)."""
        self._running.reducer, self._running.natively = reducer, False
        for calls in self.calls:
            calls.ready.clear()

    def join(
        self,
        group: Group,
        *,
        reduce: Literal["device", "host"] = "device",
        algorithm: Literal["auto", "ring", "hierarchical"] = "auto",
        average: bool = True,
        overlap: bool | None = None,
        shard: bool = False,
    ) -> None:
        """Make this session one of several replicas, one for each rank of the group (tilework.parallel.start). Every rank calls
        it. Weights and optimizer state become rank 0's; from then on each step's gradients are averaged over all ranks.

        reduce      "device": inside the native step, through memory that the ranks of a machine share; "host": between the
                    native calls, by torch.distributed.
        algorithm   how the host reduces: along one ring, or within each machine first (hierarchical); "auto" measures both.
        average     False: gradients are added up.
        overlap     reduce gradients while the backward pass makes the others. By default where ranks are on several machines.
        shard       each rank updates some of the parameters and keeps only their optimizer state; for an artifact that was
                    compiled with num_shards. Before save(), every rank calls gather().
        """
        from ..parallel.replicas import joined

        with self._lock:
            for calls in self.calls:
                if calls.fused:
                    self._running.require_replicas(calls)
            self.group, self.rank = group, group.rank
            self.joined = {"reduce": reduce, "algorithm": algorithm, "average": average, "overlap": overlap,
                           "shard": shard}  # fmt: skip
            self.seed(self._seed)
            together.sum_over(group, self._device, self.manifest, algorithm)
            reducer, native = joined(group, self._device, reduce, algorithm, average=average, overlap=overlap)
            self.reduce_with(reducer if group.size > 1 else None)
            self._running.natively = native and group.size > 1 and not shard
            self._running.num_ranks = group.size
            if self._has_weights:
                self._equal_weights()
            if shard and group.size > 1:
                self._running.shards = together.shared_out(group, self._device, self.manifest)

    @property
    def shards(self) -> Shards | None:
        """Which parts of the update are this rank's, and what memory that takes."""
        return self._running.shards

    def gather(self) -> None:
        """Bring the optimizer state of all ranks here, for save() and to_host(). Every rank calls it. The next step gives the
        memory back. Without sharding there is nothing to do."""
        with self._lock:
            if self._running.shards is not None:
                self._running.shards.gather()
                self._gathered_at = self.num_steps

    def _need_state(self) -> None:
        if self._running.shards is not None and self._gathered_at != self.num_steps:
            raise UserError("run-shards", "the optimizer state is shared out among the ranks",
                            fix="every rank calls session.gather() first")  # fmt: skip

    def _equal_weights(self) -> None:
        if self.group is not None:
            with self.page.during(WAIT):
                together.equal_weights(self.group, self.memory)

    # ---- running ----

    def run(
        self,
        *inputs: Any,
        sections: Sequence[str] | None = None,
        out_grads: OutGrads | None = None,
        hyper: Mapping[str, Any] | None = None,
        keep_gradients: bool = False,
        num_steps: int = 1,
        outputs: str | Mapping[str, str] = "all",
        signature: str | None = None,
        **named: Any,
    ) -> Result:
        """Run a training step: all sections, fused into one native call if possible, or the sections that are named.

        inputs      model inputs and then targets, nested as at compile time or flat, or by name: run(**batch). bwd and opt
                    alone need none.
        sections    any of fwd, bwd, reduce, opt. ["fwd"] changes no weight; ["bwd", "opt"] continue from the last fwd.
        out_grads   gradients of outputs, by name or position, if the loss was computed on the host.
        hyper       hyperparameters to set first. An array gives each step of the call its own value; the last one stays.
        keep_gradients  run section by section, so that gradients() can be read afterwards.
        num_steps   this many optimizer steps in one call; the batch holds the inputs of all of them.
        outputs     what a call with several micro-batches returns: "all", "last", "sum", only the "loss", or
                    {output name: all, last or sum}. Losses are always returned, one per micro-batch.
        signature   the signature to run, by name; by default the one with the shapes of the inputs.
        """
        if named:
            inputs = by_name(self.manifest.signature, inputs, named)
        with self._lock:
            calls = self._first if self._only and signature is None else self._calls_for(inputs, num_steps, signature)
            if self._followed:
                self._follow_now()
            if sections is None and out_grads is None and hyper is None and not keep_gradients:
                prepared = calls.ready.get((num_steps, outputs)) if type(outputs) is str else None
                if prepared is not None:  # the same as last time: nothing to work out
                    return self._running.fused(calls, prepared, inputs, num_steps, ())
            return self._run(calls, inputs, sections, out_grads, hyper or {}, keep_gradients, num_steps, outputs)

    def calls_of(self, signature: str) -> Calls:
        found = next((c for c in self.calls if c.signature.name == signature), None)
        if found is None:
            known = [c.signature.name for c in self.calls]
            raise UserError("signatures", f"no signature {signature!r} in this artifact", expected=did_you_mean(signature, known))
        return found

    def _calls_for(self, inputs: tuple[Any, ...], num_steps: int, signature: str | None, *, infer: bool = False) -> Calls:
        """The signature whose shapes these are; the first one, which says what is wrong, where there is none. Sections that take
        no inputs belong to the call before them."""
        if signature is not None:
            return self.calls_of(signature)
        if not inputs:
            return self._running.newest
        for calls in (self._running.newest, *self.calls):
            role = "infer" if infer else calls.fused or "fwd"
            if role in calls.programs and calls.takes(inputs, role, num_steps):
                return calls
        return self._first

    def _run(
        self,
        calls: Calls,
        inputs: tuple[Any, ...],
        sections: Sequence[str] | None,
        out_grads: OutGrads | None,
        hyper: Mapping[str, Any],
        keep_gradients: bool,
        num_steps: int,
        outputs: str | Mapping[str, str],
    ) -> Result:
        self._need_weights()
        if not isinstance(num_steps, int) or num_steps < 1:
            raise UserError("run-loop", "num_steps", found=repr(num_steps), expected="a whole number, 1 or more")
        single = {k: v for k, v in hyper.items() if isinstance(v, (int, float)) or not hasattr(v, "__len__")}
        many = resolve(self.manifest, {k: v for k, v in hyper.items() if k not in single}, num_steps)
        self._set(single)
        self._sets_hyper = self._sets_hyper or bool(hyper)
        schedule = {b: v for k, v in many.items() if (b := Kind.HYPER.of(k)) in self.memory}
        fused = calls.fused is not None and out_grads is None and (not keep_gradients or calls.fused == "accumulate")
        wanted: builtins.set[str] = set()
        if not (sections is None and fused and calls.signature.losses):
            wanted = calls.wanted(sections)
        whole = fused and (not wanted or wanted >= set(calls.sections) - {"reduce"})
        if "opt" in wanted or whole:
            self._advise()
        reduces = self._running.reducer is not None
        if reduces and not (whole and (sections is None or ("reduce" in wanted and "accumulate" in calls.programs))):
            whole = False  # sections that are named do what they say, and no more
        if whole and reduces and not self._running.natively:
            return self._running.reduced(calls, inputs, num_steps, outputs, schedule)
        if whole:
            assert calls.fused is not None
            prepared = calls.prepare(calls.fused, num_steps, outputs, tuple(schedule), reduce=reduces)
            if not schedule and isinstance(outputs, str):
                calls.ready[num_steps, outputs] = prepared
            return self._running.fused(calls, prepared, inputs, num_steps, tuple(schedule.values()))
        if num_steps != 1 or schedule:
            raise UserError("run-loop", "several steps in one call need the fused step",
                            fix="run without sections=, out_grads= and keep_gradients=")  # fmt: skip
        return self._running.sections(calls, wanted, inputs, out_grads, outputs)

    def _advise(self) -> None:
        """Once, before the first call that trains: what the host has changed since the compile."""
        if not self._advised:
            self._advised = True
            advise(self.artifact, self._followed, self._sets_hyper, stacklevel=4)  # advice for who called run()

    def loop(
        self, loader: Iterable[Chunk], *, hyper: Mapping[str, Any] | None = None, outputs: str | Mapping[str, str] = "all"
    ) -> Iterator[Result]:
        """Train over a tilework.Loader, many steps per call. Yields the result of each call.

        hyper   as in run(); an array has one value for each step of the whole pass.
        """
        chunks = getattr(loader, "chunks", None)
        done = 0
        sizes = [rows for calls in self.calls if calls.fused and (rows := calls.signature.num_rows) is not None]
        for chunk in chunks(self.manifest.signature.batch_dim, sizes) if chunks is not None else loader:
            now = {k: part_of(k, v, done, chunk.num_steps) for k, v in (hyper or {}).items()}
            yield self.run(*chunk.inputs, num_steps=chunk.num_steps, hyper=now or None, outputs=outputs)
            done += chunk.num_steps

    def infer(self, *inputs: Any, num_batches: int = 1, signature: str | None = None, **named: Any) -> Any:
        """Run the model in eval mode and return its outputs. Works with any artifact. Changes only the buffers that the model
        itself changes in eval mode. If the model draws random numbers in eval mode, they are new in each call.

        num_batches   run this many batches, concatenated, in one native call. Outputs are concatenated too; scalars come one per
                      batch.
        signature     the signature to run, by name; by default the one with the shapes of the inputs.
        """
        if named:
            inputs = by_name(self.manifest.signature, inputs, named, infer=True)
        several = (num_batches,) if num_batches > 1 else ()
        with self._lock:
            self._need_weights()
            single = self._only and signature is None
            calls = self._first if single else self._calls_for(inputs, num_batches, signature, infer=True)
            s = calls.signature
            outputs = [torch.empty((*several, *a.type.shape), dtype=DTYPES[a.type.dtype]) for a in s.infer_outputs]
            plan, bound, _ = calls.prepare("infer", num_batches)
            try:
                bound.run(self._running.taken(calls, plan, inputs), outputs)
            except NotANumber as e:
                raise_failed(s, self.memory, "infer", e)
                raise
            self._running.forget_forward()
            if several:
                with self.page.during(COPY):
                    outputs = [joined(o, s.batch_dim) for o in outputs]
        return unflatten(s.infer_structure, iter(outputs))

    @property
    def fused(self) -> str | None:
        """The program that runs a whole step: "step", or "accumulate" with micro-batches, or None."""
        return self._first.fused

    @property
    def training_sections(self) -> list[str]:
        """The sections that this artifact can run, in order."""
        return list(self._first.sections)

    def _need_weights(self) -> None:
        if self._closed:
            raise UserError("session-closed", "the session is closed", fix="load the artifact again")
        if not self._has_weights and self._computes:
            raise UserError("session-weights", f"{self.artifact.path}: the session has no weights yet",
                            fix="session.to_device(model), session.load(file), or compile with weights inside")  # fmt: skip

    # ---- reading ----

    @property
    def kept_gradients(self) -> frozenset[str]:
        """Buffers of the gradients that the last call left and that can be read: grad/<parameter>, inputgrad/<name>."""
        return self._running.kept_gradients

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients of the last bwd: parameters by name, inputs as input/<name>."""
        if not self.kept_gradients:
            raise no_gradients()
        with self._lock, self.page.during(COPY):
            kept = [b for b in map(Buffer, self.memory) if b in self.kept_gradients]
            return {b.name if b.kind == Kind.GRAD else f"input/{b.name}": self.memory.read(b) for b in kept}

    @property
    def computes_grad_norm(self) -> bool:
        """Whether the artifact was compiled with grad_norm=True."""
        return Kind.NORM.of("count") in self.memory

    @property
    def grad_norm(self) -> float:
        """The L2 norm of all gradients of the last step: of all replicas and micro-batches together, before clipping. For an
        artifact that was compiled with grad_norm=True."""
        return float(self.grad_norms()[0])

    def grad_norms(self, num_steps: int = 1) -> Tensor:
        """Those of the last `num_steps` steps, oldest first: of each step of a loop. The newest 1024 are kept, since loading."""
        count, history = Kind.NORM.of("count"), Kind.NORM.of("history")
        if not self.computes_grad_norm:
            raise UserError("run-grad-norm", f"{self.artifact.path}: the norm of the gradients is not computed",
                            fix="compile with grad_norm=True (--grad-norm)")  # fmt: skip
        with self._lock, self.page.during(COPY):
            made, norms = int(self.memory.read(count)), self.memory.read(history)
        if not self._computes:  # a device without numbers has no losses either
            return torch.zeros(num_steps)
        known = min(made, NORMS)
        if not 1 <= num_steps <= known:
            raise UserError("run-grad-norm", f"the norms of the last {num_steps} steps", found=f"{made} steps since loading",
                            expected=f"1 to {known} steps" if known else "a step first",
                            fix=f"read them after every {NORMS} steps at most" if num_steps > NORMS else "")  # fmt: skip
        return norms[torch.arange(made - num_steps, made) % NORMS]

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything that training changes: param/..., buffer/..., state/..."""
        with self._lock, self.page.during(COPY):
            return self.memory.read_all(*WEIGHTS)

    @property
    def planned_bytes(self) -> int:
        """What was planned for this artifact at the most: its buffers, and the largest program's temporaries before fusion."""
        temporary = max((p.temporary_bytes for p in self.manifest.programs.values()), default=0)
        return sum(b.type().num_bytes for b in self.manifest.buffers.values()) + temporary

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the model, for model.load_state_dict. Tied ones appear under each name."""
        m = self.manifest
        with self._lock, self.page.during(COPY):
            own = {Buffer(b).name: t for b, t in self.memory.read_all(Kind.PARAM, Kind.BUFFER).items()}
        own |= {alias: own[name] for alias, name in m.aliases.items() if name in own}
        return {k: t for k, t in own.items() if k not in m.transient}

    # ---- sync ----

    def to_device(
        self,
        model: nn.Module | Mapping[str, Tensor],
        optimizer: sync.Optimizers | None = None,
        *,
        loss: nn.Module | None = None,
    ) -> None:
        """Copy the host's parameters and buffers, and optimizer state if given, to the session."""
        with self._lock, self.page.during(COPY):
            tensors = sync.by_buffer(self.manifest, sync.host_tensors(model, loss))
            self.memory.take(tensors, () if isinstance(model, nn.Module) else self.manifest.transient)
            optimizers = None if optimizer is None else sync.several(optimizer)
            if optimizers is not None:
                sync.optimizers_to_device(self.memory, optimizers, tensors)
            hosts.remember(self.artifact.digest, model, optimizers, loss)
            self._has_weights = True
            self._running.forget_forward()
            self._equal_weights()

    def to_host(
        self,
        model: nn.Module | Mapping[str, Tensor],
        optimizer: sync.Optimizers | None = None,
        *,
        loss: nn.Module | None = None,
    ) -> None:
        """Copy the session's parameters and buffers, and optimizer state if asked for, into the host's objects."""
        with self._lock, self.page.during(COPY):
            tensors = sync.by_buffer(self.manifest, sync.host_tensors(model, loss))
            self.memory.give(tensors)
            if optimizer is not None:
                self._need_state()
                sync.optimizers_to_host(self.memory, sync.several(optimizer), tensors)

    # ---- checkpoints ----

    def save(self, path: str | Path) -> None:
        """Save everything that training changes as safetensors, atomically. load() continues from there."""
        with self.page.beside(SAVE):  # only the copy keeps others from running: files are slow
            self._need_state()
            state = self.snapshot()
            notes = {"artifact": self.artifact.digest, "num_steps": state.num_steps, "random": state.random}
            checkpoint.write(path, state.tensors, notes)

    def snapshot(self) -> State:
        """A copy of everything that training changes. restore() continues from there, bit for bit. Optimizer state that another
        rank keeps is left out."""
        with self._lock, self.page.during(COPY):
            shards = self._running.shards
            elsewhere = shards.elsewhere if shards is not None and self._gathered_at != self.num_steps else frozenset()
            tensors = {b: self.memory.read(b) for b in self.memory if is_kind(b, *WEIGHTS) and b not in elsewhere}
            return State(tensors, self.num_steps, self.random_state(), self.hyper)

    def restore(self, state: State) -> None:
        """Continue from a snapshot of this artifact. Unlike load(), each rank takes what it is given."""
        with self._lock, self.page.during(COPY):
            self.memory.check_types(state.tensors, "checkpoint")
            self.memory.take(state.tensors, self.manifest.transient)
            if self._running.shards is not None:
                self._running.shards.release()
            self._set(state.hyper)
            self._has_weights = True
            self._running.forget_forward()
            self.num_steps = state.num_steps
            self.seed(*state.random)

    def load(self, path: str | Path) -> None:
        """Load weights from a file that save() or compile wrote, or from any safetensors file with the model's names (a Hugging
        Face checkpoint: its file or its folder). Optimizer state is loaded if the file has it, and starts fresh otherwise."""
        with self._lock, self.page.during(SAVE):
            tensors, notes = checkpoint.read(path)
            self._load_tensors(tensors)
            self.num_steps = int(notes.get("num_steps", 0))
            if "random" in notes:
                self.seed(*notes["random"])

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        with self._lock, self.page.during(COPY):
            self._load_tensors(tensors)

    def _load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        known = sync.by_group(self.manifest, sync.by_buffer(self.manifest, tensors))
        self.memory.check_types(known, "weights file")
        self.memory.take(known, self.manifest.transient)
        initial = sync.initial_state(self.manifest)
        for name in self.memory:  # moments and counts of other weights say nothing about these
            if is_kind(name, Kind.STATE) and name not in known:
                self.memory.fill(name, initial.get(name, 0))
        self._has_weights = True
        self._running.forget_forward()
        self._equal_weights()

    def barrier(self) -> None:
        """Wait for the other ranks of torch.distributed, if it is initialized. Shown as `wait` in the tile tools."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            with self.page.beside(WAIT):  # other threads may run meanwhile: the ranks may be waiting for what they do
                torch.distributed.barrier()

    def close(self) -> None:
        """Free the device's memory. The session cannot run afterwards, but its tensors can still be read. Tiles are returned when
        the last session of the process is closed."""
        if self._closed:
            return
        self._closed = True
        if self._lock._is_owned():  # type: ignore[attr-defined]  # from a signal handler, in the middle of a call: after that call
            threading.Thread(target=self._free).start()
        else:
            self._free()

    def _free(self) -> None:
        with self._lock:  # a call of another thread ends first
            if self._freed:
                return
            self._freed = True
            self.page.set_bytes(0)
            for calls in self.calls:
                calls.clear()
            self._device.close()
        self._footing.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"session of {self.artifact.path} on {self.device_name}, {self.num_steps} steps"


def load(
    path: str | Path,
    *,
    device: str | None = None,
    weights: str | Path | Literal[False] | None = None,
    num_threads: int | None = None,
    seed: int = 0,
    nan_error: bool = False,
    rank: int = 0,
    trust: bool = False,
    tiles: str | int | None = None,
    group: Group | None = None,
    reduce: Literal["device", "host"] = "device",
    algorithm: Literal["auto", "ring", "hierarchical"] = "auto",
    shard: bool = False,
) -> Session:
    """Open an artifact: verified, no compiler, no tracing, no model source. The device is the artifact's own by default.

    weights    a file to start from instead of the initial weights; False: none yet, they come by to_device() or load().
    rank       of this replica: random numbers differ by rank.
    nan_error  an error where a loss is not a number; the step at fault changes nothing. Costs a copy of the weights a step.
    tiles      tiles of its own: a number, "chips:2", "gpus:1", "0-3,8", a path (docs/tiles.md); it waits until they are free. By
               default none: it shares the machine, and starts at once. TILEWORK_TILES overrides it.
    group      the ranks of tilework.parallel.start(): the session is one of as many replicas, each with its share of the cores.
               `reduce`, `algorithm` and `shard` are those of Session.join.
    """
    if not Path(path).is_file():
        read_artifact(path, trust=trust)  # says what is wrong, before anybody waits for tiles
    if group is not None and tiles is None and not os.environ.get("TILEWORK_TILES"):
        group.take_cores()
    footing = Footing(tiles)
    try:
        with footing.page.during(LOAD):
            artifact = read_artifact(path, trust=trust)
            session = Session(artifact, device=device, weights=weights, num_threads=num_threads, seed=seed,
                              nan_error=nan_error, rank=rank, footing=footing)  # fmt: skip
            if group is not None:
                session.join(group, reduce=reduce, algorithm=algorithm, shard=shard)
    except BaseException:
        footing.close()
        raise
    return session
