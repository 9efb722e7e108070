"""A session: a loaded artifact with its device copies of parameters, buffers and optimizer state.

session = tilework.load("lenet.pef")
result = session.run(x, y)           # one whole step: fwd, bwd, opt, in one native call
result.loss, result.outputs
session.to_host(model)               # only now does the host's model change
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import hosts
from ..artifact.graph import DTYPES
from ..artifact.names import WEIGHTS, Buffer, Kind, is_kind
from ..artifact.reader import Artifact, read_artifact
from ..artifact.structure import unflatten
from ..errors import TileworkError, UserError, did_you_mean
from ..tiles.page import COPY, LOAD, SAVE, WAIT
from . import checkpoint, sync
from .advice import advise
from .arguments import InputPlan, by_name, joined
from .calls import Calls, Prepared
from .checks import broken_off, raise_failed
from .devices import NotANumber, device_class, rank_base
from .fitting import require
from .hyper import part_of, resolve
from .leasing import Footing
from .loader import Chunk
from .results import Result


class Session:
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
        self.num_steps = 0
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
        self._first = self._newest = self.calls[0]  # newest: the one that ran last
        self._only = len(self.calls) == 1
        self.seed(seed)
        self._has_weights = not self.manifest.parameters
        self._ran_forward = self._beyond_loss = False
        self._kept_gradients: frozenset[str] = frozenset()  # that the last call left
        self._followed: list[torch.optim.Optimizer] = []
        self._sets_hyper = self._advised = False
        # Buffers and the slot of the page are the session's own: one call at a time, whichever thread it comes from.
        self._lock = threading.RLock()
        for name, tensor in artifact.constants.items():
            self.memory.write(name, tensor)
        for name, value in sync.initial_state(self.manifest).items():
            self.memory.fill(name, value)
        self._set(self.manifest.hyperparameters)
        for calls in self.calls:
            self._default_out_grads(calls)
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

    def _default_out_grads(self, calls: Calls) -> None:
        """Backward starts from ones at the losses and zeros elsewhere; without a loss, the host must say."""
        for output in calls.signature.outputs:
            self.memory.fill(calls.buffer(Kind.OUTGRAD, output.name), 1.0 if output.name in calls.signature.losses else 0.0)

    def seed(self, seed: int, counter: int = 0, inferred: int = 0) -> None:
        """Start the random numbers of dropout and its kin again, from this seed; seed(*random_state()) goes on from there.
        infer() draws from a stream of its own, so that it changes nothing about training. Replicas draw different numbers."""
        self._seed = seed
        self._device.seed(rank_base(seed, self.rank), counter, inferred)

    def random_state(self) -> tuple[int, int, int]:
        """(seed, micro-batches drawn since, batches that infer() drew since)."""
        return (self._seed, *self._device.random_state()[1:])

    # ---- hyperparameters ----

    @property
    def hyper(self) -> dict[str, float]:
        """Every run-time hyperparameter and its value on the device."""
        known = self.manifest.hyperparameters
        buffers = {k: Buffer.of(Kind.HYPER, k) for k in known}
        return {k: float(self.memory.read(b)) if b in self.memory else known[k] for k, b in buffers.items()}

    def set(self, values: Mapping[str, float] | None = None, /, **named: float) -> None:
        """Change hyperparameters, from the next step on. A bare name (lr, momentum, p) sets it in every group or site."""
        self._set({**(values or {}), **named})
        self._sets_hyper = True

    def _set(self, values: Mapping[str, float]) -> None:
        for full, value in resolve(self.manifest, values, None).items():
            self.memory.fill(Buffer.of(Kind.HYPER, full), value)

    def follow(self, *optimizers: torch.optim.Optimizer) -> None:
        """Take hyperparameters from these host optimizers before each call: torch's LR schedulers then work as they are."""
        self._followed = list(optimizers)
        for optimizer in optimizers:  # the scheduler's check that optimizer.step() comes first: our steps count
            optimizer._opt_called = True  # type: ignore[attr-defined]

    # ---- running ----

    def run(
        self,
        *inputs: Any,
        sections: Sequence[str] | None = None,
        out_grads: Mapping[str, Tensor] | Sequence[Tensor | None] | None = None,
        hyper: Mapping[str, Any] | None = None,
        keep_gradients: bool = False,
        num_steps: int = 1,
        outputs: str | Mapping[str, str] = "all",
        signature: str | None = None,
        **named: Any,
    ) -> Result:
        """Run sections, by default all of them, fused into one native call where that is possible.

        inputs      model inputs and then targets, nested as at compile time or flat, or by name: run(**batch). bwd and opt
                    alone need none.
        sections    any of fwd, bwd, reduce, opt. ["fwd"] changes no weight; ["bwd", "opt"] go on from the last fwd.
        out_grads   gradients of outputs, by name or position: the loss was computed on the host.
        hyper       hyperparameters to set first. An array gives each step of the call its own value; the last one stays.
        keep_gradients  run section by section, so that gradients() can be read afterwards.
        num_steps   this many optimizer steps in one call; the batch holds the inputs of all of them.
        outputs     what to bring back of a call with several micro-batches: "all", "last", "sum", only the "loss", or
                    {output name: all, last or sum}. Losses always come back, one a micro-batch.
        signature   which one to run, by name; by default the one whose shapes the inputs have.
        """
        if named:
            inputs = by_name(self.manifest.signature, inputs, named)
        with self._lock:
            calls = self._first if self._only and signature is None else self._calls_for(inputs, num_steps, signature)
            if sections is None and out_grads is None and hyper is None and not keep_gradients and not self._followed:
                prepared = calls.ready.get((num_steps, outputs)) if type(outputs) is str else None
                if prepared is not None:  # the same as last time: nothing to work out
                    return self._run_fused(calls, prepared, inputs, num_steps, ())
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
            return self._newest
        for calls in (self._newest, *self.calls):
            role = "infer" if infer else calls.fused or "fwd"
            if role in calls.programs and calls.takes(inputs, role, num_steps):
                return calls
        return self._first

    def _run(
        self,
        calls: Calls,
        inputs: tuple[Any, ...],
        sections: Sequence[str] | None,
        out_grads: Mapping[str, Tensor] | Sequence[Tensor | None] | None,
        hyper: Mapping[str, Any],
        keep_gradients: bool,
        num_steps: int,
        outputs: str | Mapping[str, str],
    ) -> Result:
        self._need_weights()
        if not isinstance(num_steps, int) or num_steps < 1:
            raise UserError("run-loop", "num_steps", found=repr(num_steps), expected="a whole number, 1 or more")
        if self._followed:
            self._set(sync.hyper_of(self.manifest, self._followed))
        single = {k: v for k, v in hyper.items() if isinstance(v, (int, float)) or not hasattr(v, "__len__")}
        many = resolve(self.manifest, {k: v for k, v in hyper.items() if k not in single}, num_steps)
        self._set(single)
        self._sets_hyper = self._sets_hyper or bool(hyper)
        schedule = {b: v for k, v in many.items() if (b := Buffer.of(Kind.HYPER, k)) in self.memory}
        fused = calls.fused is not None and out_grads is None and (not keep_gradients or calls.fused == "accumulate")
        wanted: builtins.set[str] = set()
        if not (sections is None and fused and calls.signature.losses):
            wanted = calls.wanted(sections)
        if fused and (not wanted or wanted == set(calls.sections) - {"reduce"}):
            assert calls.fused is not None
            self._advise()
            prepared = calls.prepare(calls.fused, num_steps, outputs, tuple(schedule))
            if not schedule and isinstance(outputs, str):
                calls.ready[num_steps, outputs] = prepared
            return self._run_fused(calls, prepared, inputs, num_steps, tuple(schedule.values()))
        if num_steps != 1 or schedule:
            raise UserError("run-loop", "several steps in one call need the fused step",
                            fix="run without sections=, out_grads= and keep_gradients=")  # fmt: skip
        if "opt" in wanted:
            self._advise()
        if out_grads is not None:
            with self.page.during(COPY):
                self._set_out_grads(calls, out_grads)
        result = Result(None, [])
        if "fwd" in wanted:
            result = self._run_forward(calls, inputs, outputs)
        elif inputs:
            raise UserError("run-inputs", "inputs were given, but the section fwd, which takes them, is not run",
                            found=f"sections {sorted(wanted)}", fix="add 'fwd' to sections, or give no inputs")  # fmt: skip
        if "bwd" in wanted:
            self._run_backward(calls, out_grads is not None)
        if "opt" in wanted:
            self._run_opt(calls)
        return result

    def _advise(self) -> None:
        """Once, before the first call that trains: what the host has changed since the compile."""
        if not self._advised:
            self._advised = True
            advise(self.artifact, self._followed, self._sets_hyper, stacklevel=4)  # advice for who called run()

    def loop(
        self, loader: Iterable[Chunk], *, hyper: Mapping[str, Any] | None = None, outputs: str | Mapping[str, str] = "all"
    ) -> Iterator[Result]:
        """Train over a tilework.Loader, many steps in one call: yields the result of each call.

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
        """The model in eval mode: its outputs. Changes only buffers that the model itself changes in eval mode. Works from any
        artifact. Random numbers that the model draws in eval mode too are new in each call.

        num_batches   this many batches, side by side, in one native call; so are the outputs, scalars one a batch.
        signature     which one to run, by name; by default the one whose shapes the inputs have.
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
                bound.run(self._taken(calls, plan, inputs), outputs)
            except NotANumber as e:
                raise_failed(s, self.memory, "infer", e)
                raise
            self._ran_forward = False
            if several:
                with self.page.during(COPY):
                    outputs = [joined(o, s.batch_dim) for o in outputs]
        return unflatten(s.infer_structure, iter(outputs))

    def _taken(self, calls: Calls, plan: InputPlan, inputs: tuple[Any, ...]) -> Sequence[Tensor]:
        try:
            return plan.take(inputs)
        except UserError as e:
            if self._only or e.id != "input-mismatch":
                raise
            sizes = ", ".join(c.signature.name for c in self.calls)
            raise UserError(e.id, e.summary, found=f"no signature with these shapes; compared with {calls.signature.name}",
                            expected=f"one of the signatures {sizes}",
                            fix="shapes are fixed: compile with batch_sizes= for these as well") from None  # fmt: skip

    @property
    def fused(self) -> str | None:
        """The program that runs a whole step: step; accumulate, where it has micro-batches; None."""
        return self._first.fused

    @property
    def training_sections(self) -> list[str]:
        """The sections that this artifact can run, in order."""
        return list(self._first.sections)

    def _run_fused(
        self, calls: Calls, prepared: Prepared, inputs: tuple[Any, ...], num_steps: int, schedule: Sequence[Tensor]
    ) -> Result:
        result = self._call(calls, prepared, inputs, schedule)
        self._ran_forward = False
        self._kept_gradients = calls.gradients[calls.fused]  # type: ignore[index]
        self._newest = calls
        self.num_steps += num_steps
        return result

    def _run_forward(self, calls: Calls, inputs: tuple[Any, ...], outputs: str | Mapping[str, str]) -> Result:
        calls.need("fwd")
        result = self._call(calls, calls.prepare("fwd", 1, outputs), inputs, ())
        self._ran_forward, self._newest = True, calls
        return result

    def _call(self, calls: Calls, prepared: Prepared, inputs: tuple[Any, ...], schedule: Sequence[Tensor]) -> Result:
        plan, bound, outputs = prepared
        raw = outputs.make()
        try:
            bound.run(plan.take(inputs) if self._only else self._taken(calls, plan, inputs), raw, schedule)
        except TileworkError as e:
            explained = broken_off(e, calls.signature)
            if explained is e:
                raise
            raise explained from e
        except NotANumber as e:
            self.num_steps += e.step
            self._ran_forward, self._kept_gradients = False, frozenset()
            raise_failed(calls.signature, self.memory, "fwd", e, undone=self.nan_error)
            raise UserError(
                "loss-nan", f"the loss is not a number at step {self.num_steps + 1}, which was undone",
                fix="lower the learning rate, clip the gradients (clip_norm), or look at the inputs of that step",
            ) from e  # fmt: skip
        return Result(outputs, raw)

    def _run_backward(self, calls: Calls, given: bool) -> None:
        calls.need("bwd")
        if not self._ran_forward:
            raise UserError("run-order", "bwd needs what a fwd just before it has kept", found="no fwd before this bwd",
                            fix="run sections=['fwd'] first, or ['fwd', 'bwd', ...] together")  # fmt: skip
        if not given and not calls.signature.losses:
            raise UserError("run-loss", "bwd needs gradients of the outputs: this artifact has no loss of its own",
                            fix="give out_grads={name: gradient, ...}")  # fmt: skip
        self._beyond_loss = self._beyond_loss and given
        calls.section("bwd")
        self._kept_gradients = calls.gradients["bwd"]
        self._default_out_grads(calls)

    def _run_opt(self, calls: Calls) -> None:
        calls.need("opt")
        needed = {b for b in calls.programs["opt"].buffers if is_kind(b, Kind.GRAD)}
        if not needed <= self._kept_gradients:
            raise UserError("run-order", "opt needs gradients, and no bwd has made any", fix="run bwd before opt")
        held = {Buffer.of(Kind.GRAD, p.name) for p in self.manifest.parameters if p.group is not None}
        if self._beyond_loss and (others := (held & self._kept_gradients) - needed):
            raise UserError("run-out-grads", "the optimizer updates only parameters that the step's loss reaches",
                            found=f"gradients for {', '.join(sorted(Buffer(b).name for b in others))} as well",
                            fix="compile with loss=None, so that gradients come from out_grads alone")  # fmt: skip
        calls.section("opt")
        self._ran_forward = False  # what fwd kept belongs to the weights from before
        self.num_steps += 1

    def _set_out_grads(self, calls: Calls, given: Mapping[str, Tensor] | Sequence[Tensor | None]) -> None:
        grads = calls.out_grads(given)
        expected = [b for a in calls.signature.outputs if (b := calls.buffer(Kind.OUTGRAD, a.name)) in self.memory]
        self.memory.check_types(grads, "gradient of an output", expected)
        losses = calls.signature.losses
        self._beyond_loss = bool(losses) and any(Buffer(b).name not in losses for b in grads)
        for buffer in expected:
            if buffer in grads:
                self.memory.write(buffer, grads[buffer])
            else:
                self.memory.fill(buffer, 0.0)

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
        return self._kept_gradients

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients of the last bwd: parameters by name, inputs as input/<name>."""
        if not self._kept_gradients:
            raise UserError("run-gradients", "there are no gradients to read: the fused step does not keep them",
                            fix="run with keep_gradients=True, or run the sections fwd and bwd")  # fmt: skip
        with self._lock, self.page.during(COPY):
            kept = [b for b in map(Buffer, self.memory) if b in self._kept_gradients]
            return {b.name if b.kind == Kind.GRAD else f"input/{b.name}": self.memory.read(b) for b in kept}

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything that training changes: param/..., buffer/..., state/..."""
        with self._lock, self.page.during(COPY):
            return self.memory.read_all(*WEIGHTS)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the model: what model.load_state_dict takes. Tied ones have each name."""
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
            self._has_weights, self._ran_forward = True, False

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
                sync.optimizers_to_host(self.memory, sync.several(optimizer), tensors)

    # ---- checkpoints ----

    def save(self, path: str | Path) -> None:
        """Everything that training changes, as safetensors, whole or not at all. load() goes on from there."""
        with self.page.beside(SAVE):  # only the copy keeps others from running: files are slow
            with self._lock:
                tensors = self.memory.read_all(*WEIGHTS)
                notes = {"artifact": self.artifact.digest, "num_steps": self.num_steps, "random": self.random_state()}
            checkpoint.write(path, tensors, notes)

    def load(self, path: str | Path) -> None:
        """Weights from a file that save() or compile wrote, or of any safetensors file with the model's names (a Hugging Face
        checkpoint: its file, or its folder); optimizer state too where the file has it, or else a fresh one."""
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
        self._has_weights, self._ran_forward = True, False

    def barrier(self) -> None:
        """Wait for the other ranks of torch.distributed, where it is up. The wait is shown as `wait`."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            with self.page.beside(WAIT):  # other threads may run meanwhile: the ranks may be waiting for what they do
                torch.distributed.barrier()

    def close(self) -> None:
        """Free what the device holds. The session cannot run afterwards; its tensors can still be read. The tiles go back when
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
) -> Session:
    """Open an artifact: verified, no compiler, no tracing, no model source. The device is the artifact's own by default.

    weights    a file to start from instead of the initial weights; False: none yet, they come by to_device() or load().
    rank       of this replica: random numbers differ by rank.
    nan_error  an error where a loss is not a number; the step at fault changes nothing. Costs a copy of the weights a step.
    tiles   what to lease: a number, "chips:2", "0-3,8", a path (docs/tiles.md). One chip by default. TILEWORK_TILES overrides it.
    """
    if not Path(path).is_file():
        read_artifact(path, trust=trust)  # says what is wrong, before anybody waits for tiles
    footing = Footing(tiles)
    try:
        with footing.page.during(LOAD):
            artifact = read_artifact(path, trust=trust)
            session = Session(artifact, device=device, weights=weights, num_threads=num_threads, seed=seed,
                              nan_error=nan_error, rank=rank, footing=footing)  # fmt: skip
    except BaseException:
        footing.close()
        raise
    return session
