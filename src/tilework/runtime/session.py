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
from ..artifact.fingerprint import require
from ..artifact.graph import DTYPES
from ..artifact.reader import Artifact, read_artifact
from ..artifact.structure import unflatten
from ..errors import MachineError, TileworkError, UserError, did_you_mean
from ..tiles.page import ALOAD, CHKPT, PLOAD, QUIESCE
from . import checkpoint, sync
from .advice import advise
from .arguments import InputPlan, by_name, joined
from .checks import broken_off, raise_failed
from .devices import Bound, Call, Metered, NotANumber, Taken, open_device
from .hyper import part_of, resolve
from .leasing import Footing
from .loader import Chunk
from .memory import free_memory
from .results import OutputPlan, Result

SECTIONS = ("fwd", "bwd", "reduce", "opt")
DEVICES = ("cpu", "reference", "null")
_WEIGHTS = ("param/", "buffer/", "state/")


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
        footing: Footing | None = None,
    ) -> None:
        self._footing = footing or Footing(leased=False)
        self.page = self._footing.page
        self.artifact = artifact
        self.manifest = artifact.manifest
        self.device_name = device or self.manifest.fingerprint.device
        if self.device_name not in DEVICES and self.device_name != self.manifest.fingerprint.device:
            raise UserError("options", f"no device {device!r}", expected=did_you_mean(str(device), DEVICES))
        require(self.manifest.fingerprint, self.device_name, artifact.path)
        self.nan_error = nan_error
        self.num_steps = 0
        self._closed = self._freed = False
        self.buffers = self._allocate()
        self._device = open_device(self.device_name, artifact, self.buffers, num_threads or self._footing.num_threads)
        meter = getattr(self._device, "meter", None)
        self._metered_natively = bool(meter is not None and meter(self.page))
        self.seed(seed)
        self._sections_in_order = self._find_sections()
        self.fused = next((p for p in ("step", "accumulate") if p in self.manifest.programs), None)
        self._has_weights = not self.manifest.parameters
        self._ran_forward = self._beyond_loss = False
        self._kept_gradients: frozenset[str] = frozenset()  # that the last call left
        self._followed: list[torch.optim.Optimizer] = []
        self._sets_hyper = self._advised = False
        self._prepared: dict[Any, tuple[InputPlan, Bound, OutputPlan]] = {}
        self._sections_bound: dict[str, Bound] = {}
        self._keeps_gradients: dict[str, frozenset[str]] = {}  # by program
        # Buffers and the slot of the page are the session's own: one call at a time, whichever thread it comes from.
        self._lock = threading.RLock()
        self._set_defaults()
        self._first_weights(weights)

    # ---- set-up ----

    def _allocate(self) -> dict[str, Tensor]:
        entries = {name: entry.type() for name, entry in self.manifest.buffers.items()}
        total = sum(kind.extent * DTYPES[kind.dtype].itemsize for kind in entries.values())
        free = free_memory()
        if free is not None and total > free:
            raise MachineError("memory", f"{self.artifact.path}: the session's buffers do not fit into memory",
                            found=f"{total / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free",
                            fix="use a smaller batch, or a machine with more memory")  # fmt: skip
        buffers = {name: kind.empty() for name, kind in entries.items()}
        self.page.set_bytes(total)
        for name, tensor in self.artifact.constants.items():
            buffers[name].copy_(tensor)
        for name, value in sync.initial_state(self.manifest).items():
            if name in buffers:
                buffers[name].fill_(value)
        return buffers

    def _set_defaults(self) -> None:
        for name, value in self.manifest.hyperparameters.items():
            if f"hyper/{name}" in self.buffers:
                self.buffers[f"hyper/{name}"].fill_(value)
        self._default_out_grads()

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

    def _default_out_grads(self) -> None:
        """Backward starts from ones at the losses and zeros elsewhere; without a loss, the host must say."""
        for output in self.manifest.outputs:
            buffer = self.buffers.get(f"outgrad/{output.name}")
            if buffer is not None:
                buffer.fill_(1.0 if output.name in self.manifest.losses else 0.0)

    def seed(self, seed: int, counter: int = 0, inferred: int = 0) -> None:
        """Start the random numbers of dropout and its kin again, from this seed; seed(*random_state()) goes on from there.
        infer() draws from a stream of its own, so that it changes nothing about training."""
        self._device.seed(seed, counter, inferred)

    def random_state(self) -> tuple[int, int, int]:
        """(seed, micro-batches drawn since, batches that infer() drew since)."""
        return self._device.random_state()

    # ---- hyperparameters ----

    @property
    def hyper(self) -> dict[str, float]:
        """Every run-time hyperparameter and its value on the device."""
        known = self.manifest.hyperparameters
        return {k: float(self.buffers[f"hyper/{k}"]) if f"hyper/{k}" in self.buffers else v for k, v in known.items()}

    def set(self, values: Mapping[str, float] | None = None, /, **named: float) -> None:
        """Change hyperparameters, from the next step on. A bare name (lr, momentum, p) sets it in every group or site."""
        self._set({**(values or {}), **named})
        self._sets_hyper = True

    def _set(self, values: Mapping[str, float]) -> None:
        for full, value in resolve(self.manifest, values, None).items():
            if f"hyper/{full}" in self.buffers:
                self.buffers[f"hyper/{full}"].fill_(value)

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
        """
        if named:
            inputs = by_name(self.manifest, inputs, named)
        with self._lock:
            if sections is None and out_grads is None and hyper is None and not keep_gradients and not self._followed:
                prepared = self._prepared.get((num_steps, outputs)) if type(outputs) is str else None
                if prepared is not None:  # the same as last time: nothing to work out
                    return self._run_fused(prepared, inputs, num_steps, ())
            return self._run(inputs, sections, out_grads, hyper or {}, keep_gradients, num_steps, outputs)

    def _run(
        self,
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
        schedule = {f"hyper/{k}": v for k, v in many.items() if f"hyper/{k}" in self.buffers}
        fused = self.fused is not None and out_grads is None and (not keep_gradients or self.fused == "accumulate")
        wanted: builtins.set[str] = set()
        if not (sections is None and fused and self.manifest.losses):
            wanted = self._sections(sections)
        if fused and (not wanted or wanted == set(self.training_sections) - {"reduce"}):
            assert self.fused is not None
            self._advise()
            prepared = self._prepare(self.fused, num_steps, outputs, tuple(schedule))
            if not schedule and isinstance(outputs, str):
                self._prepared[num_steps, outputs] = prepared
            return self._run_fused(prepared, inputs, num_steps, tuple(schedule.values()))
        if num_steps != 1 or schedule:
            raise UserError("run-loop", "several steps in one call need the fused step",
                            fix="run without sections=, out_grads= and keep_gradients=")  # fmt: skip
        if "opt" in wanted:
            self._advise()
        if out_grads is not None:
            with self.page.during(ALOAD):
                self._set_out_grads(out_grads)
        result = Result(None, [])
        if "fwd" in wanted:
            result = self._run_forward(inputs, outputs)
        elif inputs:
            raise UserError("run-inputs", "inputs were given, but the section fwd, which takes them, is not run",
                            found=f"sections {sorted(wanted)}", fix="add 'fwd' to sections, or give no inputs")  # fmt: skip
        if "bwd" in wanted:
            self._run_backward(out_grads is not None)
        if "opt" in wanted:
            self._run_opt()
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
        for chunk in chunks(self.manifest.batch_dim) if chunks is not None else loader:
            now = {k: part_of(k, v, done, chunk.num_steps) for k, v in (hyper or {}).items()}
            yield self.run(*chunk.inputs, num_steps=chunk.num_steps, hyper=now or None, outputs=outputs)
            done += chunk.num_steps

    def infer(self, *inputs: Any, num_batches: int = 1, **named: Any) -> Any:
        """The model in eval mode: its outputs. Changes only buffers that the model itself changes in eval mode. Works from any
        artifact. Random numbers that the model draws in eval mode too are new in each call.

        num_batches   this many batches, side by side, in one native call; so are the outputs, scalars one a batch.
        """
        m = self.manifest
        if named:
            inputs = by_name(m, inputs, named, infer=True)
        several = (num_batches,) if num_batches > 1 else ()
        outputs = [torch.empty((*several, *a.type.shape), dtype=DTYPES[a.type.dtype]) for a in m.infer_outputs]
        with self._lock:
            self._need_weights()
            plan, bound, _ = self._prepare("infer", num_batches)
            try:
                bound.run(plan.take(inputs), outputs)
            except NotANumber as e:
                raise_failed(m, self.buffers, "infer", e)
                raise
            self._ran_forward = False
            if several:
                with self.page.during(ALOAD):
                    outputs = [joined(o, m.batch_dim) for o in outputs]
        return unflatten(m.infer_structure, iter(outputs))

    @property
    def training_sections(self) -> list[str]:
        """The sections that this artifact can run, in order."""
        return list(self._sections_in_order)

    def _find_sections(self) -> list[str]:
        have = {s for p in self.manifest.programs.values() for s in p.sections}
        return [s for s in SECTIONS if s in have or (s == "reduce" and "bwd" in have)]

    def _sections(self, sections: Sequence[str] | None) -> builtins.set[str]:
        have = self.training_sections
        sections = [sections] if isinstance(sections, str) else sections
        if sections is None:
            sections = have
            if not self.manifest.losses and "bwd" in have:
                raise UserError("run-loss", "this artifact has no loss of its own: it is computed on the host",
                                fix="run sections=['fwd'], then sections=['bwd', 'opt'] with out_grads=")  # fmt: skip
        unknown = [s for s in sections if s not in have]
        if unknown:
            raise UserError("run-section", f"no section {unknown[0]!r} in this artifact",
                            found=", ".join(map(str, sections)), expected=", ".join(have) or "infer() only")  # fmt: skip
        return set(sections) - {"reduce"}  # one replica: there is nothing to reduce over

    def _prepare(
        self, program: str, num_steps: int, wanted: str | Mapping[str, str] = "all", scheduled: tuple[str, ...] = ()
    ) -> tuple[InputPlan, Bound, OutputPlan]:
        """Everything about a kind of call that does not depend on its inputs, worked out once."""
        key = (program, num_steps, wanted if isinstance(wanted, str) else tuple(wanted.items()), scheduled)
        found = self._prepared.get(key)
        if found is not None:
            return found
        m = self.manifest
        infer, accumulates = program == "infer", program == "accumulate"
        expected = m.inputs[: m.num_model_inputs] if infer else m.inputs
        count = num_steps * (m.num_micro_batches if accumulates else 1)
        plan = InputPlan(expected, m.input_structure, count, m.batch_dim, self.page)
        outputs = OutputPlan(m, wanted, num_steps, count)
        writes = m.programs[program].writes
        update = "opt" if accumulates and "opt" in m.programs else None
        watched = [f"output/{n}" for n in m.losses if f"output/{n}" in writes] if self.nan_error and not infer else []
        changed = {*writes, *(m.programs[update].writes if update else ())} if watched else set()
        watched += [b for b in writes if b.startswith("check/")]
        call = Call(
            micro=program,
            update=update,
            num_steps=num_steps,
            num_micro_batches=m.num_micro_batches if accumulates else 1,
            inputs=tuple(f"input/{a.name}" for a in expected),
            taken=tuple(_taken(f"input/{a.name}", shared, writes) for a, shared in zip(expected, plan.shared, strict=True)),
            scheduled=scheduled,
            outputs=tuple([f"infer/{a.name}" for a in m.infer_outputs] if infer else [f"output/{n}" for n in outputs.names]),
            how=() if infer else outputs.how,
            zeroed=tuple(b for b in writes if b.startswith("grad/") and not b.startswith("grad/input/")) if accumulates else (),
            seeds="own" if infer else "next",
            counts=program != "fwd",
            shown_loss=next((b for name in m.losses if (b := f"output/{name}") in writes), None),
            watched=tuple(watched),
            restored=tuple(sorted(b for b in changed if b.startswith((*_WEIGHTS, "const/")))),
        )
        self._keeps_gradients[program] = frozenset(b for b in writes if b.startswith("grad/"))
        self._prepared[key] = found = (plan, self._bind(call), outputs)
        return found

    def _bind(self, call: Call) -> Bound:
        bound = self._device.bind(call)
        return bound if self._metered_natively else Metered(bound, call, self.page)

    def _run_fused(
        self, prepared: tuple[InputPlan, Bound, OutputPlan], inputs: tuple[Any, ...], num_steps: int, schedule: Sequence[Tensor]
    ) -> Result:
        result = self._call(prepared, inputs, schedule)
        self._ran_forward = False
        self._kept_gradients = self._keeps_gradients[self.fused or ""]
        self.num_steps += num_steps
        return result

    def _run_forward(self, inputs: tuple[Any, ...], outputs: str | Mapping[str, str]) -> Result:
        self._need_program("fwd")
        result = self._call(self._prepare("fwd", 1, outputs), inputs, ())
        self._ran_forward = True
        return result

    def _call(self, prepared: tuple[InputPlan, Bound, OutputPlan], inputs: tuple[Any, ...], schedule: Sequence[Tensor]) -> Result:
        plan, bound, outputs = prepared
        raw = outputs.make()
        try:
            bound.run(plan.take(inputs), raw, schedule)
        except TileworkError as e:
            explained = broken_off(e, self.manifest)
            if explained is e:
                raise
            raise explained from e
        except NotANumber as e:
            self.num_steps += e.step
            self._ran_forward, self._kept_gradients = False, frozenset()
            raise_failed(self.manifest, self.buffers, "fwd", e, undone=self.nan_error)
            raise UserError(
                "loss-nan", f"the loss is not a number at step {self.num_steps + 1}, which was undone",
                fix="lower the learning rate, clip the gradients (clip_norm), or look at the inputs of that step",
            ) from e  # fmt: skip
        return Result(outputs, raw)

    def _run_backward(self, given: bool) -> None:
        self._need_program("bwd")
        if not self._ran_forward:
            raise UserError("run-order", "bwd needs what a fwd just before it has kept", found="no fwd before this bwd",
                            fix="run sections=['fwd'] first, or ['fwd', 'bwd', ...] together")  # fmt: skip
        if not given and not self.manifest.losses:
            raise UserError("run-loss", "bwd needs gradients of the outputs: this artifact has no loss of its own",
                            fix="give out_grads={name: gradient, ...}")  # fmt: skip
        self._beyond_loss = self._beyond_loss and given
        self._section("bwd")
        self._kept_gradients = frozenset(b for b in self.manifest.programs["bwd"].writes if b.startswith("grad/"))
        self._default_out_grads()

    def _run_opt(self) -> None:
        self._need_program("opt")
        needed = {b for b in self.manifest.programs["opt"].buffers if b.startswith("grad/")}
        if not needed <= self._kept_gradients:
            raise UserError("run-order", "opt needs gradients, and no bwd has made any", fix="run bwd before opt")
        held = {f"grad/{p.name}" for p in self.manifest.parameters if p.group is not None}
        if self._beyond_loss and (others := (held & self._kept_gradients) - needed):
            raise UserError("run-out-grads", "the optimizer updates only parameters that the step's loss reaches",
                            found=f"gradients for {', '.join(sorted(b.removeprefix('grad/') for b in others))} as well",
                            fix="compile with loss=None, so that gradients come from out_grads alone")  # fmt: skip
        self._section("opt")
        self._ran_forward = False  # what fwd kept belongs to the weights from before
        self.num_steps += 1

    def _section(self, program: str) -> None:
        """A section that takes nothing from the caller and gives nothing back."""
        if program not in self._sections_bound:
            self._sections_bound[program] = self._bind(Call(micro=program, seeds="keep", counts=program == "opt"))
        self._sections_bound[program].run((), ())

    def _set_out_grads(self, given: Mapping[str, Tensor] | Sequence[Tensor | None]) -> None:
        names = [a.name for a in self.manifest.outputs if f"outgrad/{a.name}" in self.buffers]
        if not isinstance(given, Mapping):
            own = [a.name for a in (self.manifest.outputs[1:] if self.manifest.separate_loss else self.manifest.outputs)]
            given = {n: g for n, g in zip(own, given, strict=False) if g is not None}
        grads = {f"outgrad/{k}": g for k, g in given.items()}
        expected = {f"outgrad/{n}": self.buffers[f"outgrad/{n}"] for n in names}
        sync.check_types(grads, expected, "gradient of an output")
        self._beyond_loss = bool(self.manifest.losses) and any(k not in self.manifest.losses for k in given)
        for name, buffer in expected.items():
            buffer.copy_(grads[name].detach()) if name in grads else buffer.zero_()

    def _need_program(self, name: str) -> None:
        if name not in self.manifest.programs:
            raise UserError("run-program", f"this artifact cannot run the section {name} on its own",
                            found="programs: " + ", ".join(self.manifest.programs),
                            fix="compile with programs='all'")  # fmt: skip

    def _need_weights(self) -> None:
        if self._closed:
            raise UserError("session-closed", "the session is closed", fix="load the artifact again")
        if not self._has_weights and self.device_name != "null":
            raise UserError("session-weights", f"{self.artifact.path}: the session has no weights yet",
                            fix="session.to_device(model), session.load(file), or compile with weights inside")  # fmt: skip

    # ---- reading ----

    @property
    def kept_gradients(self) -> frozenset[str]:
        """Buffers of the gradients that the last call left and that can be read: grad/<parameter>, grad/input/<name>."""
        return self._kept_gradients

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients of the last bwd: parameters by name, inputs as input/<name>."""
        if not self._kept_gradients:
            raise UserError("run-gradients", "there are no gradients to read: the fused step does not keep them",
                            fix="run with keep_gradients=True, or run the sections fwd and bwd")  # fmt: skip
        with self._lock, self.page.during(ALOAD):
            return {k.removeprefix("grad/"): t.clone() for k, t in self.buffers.items() if k in self._kept_gradients}

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything that training changes: param/..., buffer/..., state/..."""
        with self._lock, self.page.during(ALOAD):
            return self._tensors()

    def _tensors(self) -> dict[str, Tensor]:
        return {k: t.clone() for k, t in self.buffers.items() if k.startswith(_WEIGHTS)}

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by their names in the model: what model.load_state_dict takes. Tied ones have each name."""
        m = self.manifest
        with self._lock, self.page.during(ALOAD):
            own = {k.split("/", 1)[1]: t.clone() for k, t in self.buffers.items() if k.startswith(("param/", "buffer/"))}
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
        with self._lock, self.page.during(ALOAD):
            tensors = sync.by_buffer(self.manifest, sync.host_tensors(model, loss))
            sync.to_device(tensors, self.buffers, () if isinstance(model, nn.Module) else self.manifest.transient)
            optimizers = None if optimizer is None else sync.several(optimizer)
            if optimizers is not None:
                sync.optimizers_to_device(self.manifest, optimizers, tensors, self.buffers)
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
        with self._lock, self.page.during(ALOAD):
            tensors = sync.by_buffer(self.manifest, sync.host_tensors(model, loss))
            sync.to_host(tensors, self.buffers)
            if optimizer is not None:
                sync.optimizers_to_host(self.manifest, sync.several(optimizer), tensors, self.buffers)

    # ---- checkpoints ----

    def save(self, path: str | Path) -> None:
        """Everything that training changes, as safetensors, whole or not at all. load() goes on from there."""
        with self.page.beside(CHKPT):  # only the copy keeps others from running: files are slow
            with self._lock:
                tensors = self._tensors()
                notes = {"artifact": self.artifact.digest, "num_steps": self.num_steps, "random": self._device.random_state()}
            checkpoint.write(path, tensors, notes)

    def load(self, path: str | Path) -> None:
        """Weights from a file that save() or compile wrote, or of any safetensors file with the model's names (a Hugging Face
        checkpoint: its file, or its folder); optimizer state too where the file has it, or else a fresh one."""
        with self._lock, self.page.during(CHKPT):
            tensors, notes = checkpoint.read(path)
            self._load_tensors(tensors)
            self.num_steps = int(notes.get("num_steps", 0))
            if "random" in notes:
                self._device.seed(*notes["random"])

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        with self._lock, self.page.during(ALOAD):
            self._load_tensors(tensors)

    def _load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        prefixed = sync.by_group(self.manifest, sync.by_buffer(self.manifest, tensors), self.buffers)
        sync.check_types(prefixed, self.buffers, "weights file")
        sync.to_device(prefixed, self.buffers, self.manifest.transient)
        initial = sync.initial_state(self.manifest)
        for name, buffer in self.buffers.items():  # moments and counts of other weights say nothing about these
            if name.startswith("state/") and name not in prefixed:
                buffer.fill_(initial.get(name, 0))
        self._has_weights, self._ran_forward = True, False

    def barrier(self) -> None:
        """Wait for the other ranks of torch.distributed, where it is up. The wait is shown as `quiesce`."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            with self.page.beside(QUIESCE):  # other threads may run meanwhile: the ranks may be waiting for what they do
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
            self._prepared.clear()
            self._sections_bound.clear()
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
    trust: bool = False,
    tiles: str | int | None = None,
) -> Session:
    """Open an artifact: verified, no compiler, no tracing, no model source. The device is the artifact's own by default.

    weights    a file to start from instead of the initial weights; False: none yet, they come by to_device() or load().
    nan_error  an error where a loss is not a number; the step at fault changes nothing. Costs a copy of the weights a step.
    tiles   what to lease: a number, "chips:2", "0-3,8", a path (docs/tiles.md). One chip by default. TILEWORK_TILES overrides it.
    """
    if not Path(path).is_file():
        read_artifact(path, trust=trust)  # says what is wrong, before anybody waits for tiles
    footing = Footing(tiles)
    try:
        with footing.page.during(PLOAD):
            artifact = read_artifact(path, trust=trust)
            session = Session(artifact, device=device, weights=weights, num_threads=num_threads, seed=seed,
                              nan_error=nan_error, footing=footing)  # fmt: skip
    except BaseException:
        footing.close()
        raise
    return session


def _taken(buffer: str, shared: bool, writes: Sequence[str]) -> Taken:
    """An input without a batch is the same for all micro-batches, also where forward changes it in place."""
    return "each" if not shared else "again" if buffer in writes else "once"
