"""What can be called of one signature: its programs with their inputs and outputs, each kind of call made ready once."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..artifact.manifest import Manifest, Signature
from ..artifact.names import SUMMED, WEIGHTS, Kind, is_kind
from ..artifact.structure import flatten
from ..errors import UserError
from ..tiles.page import Slot
from .arguments import InputPlan, in_order
from .devices import Bound, Call, Device, Metered, Taken
from .results import OutputPlan

SECTIONS = ("fwd", "bwd", "reduce", "opt")


class Prepared(NamedTuple):
    """A kind of call, made ready."""

    inputs: InputPlan
    bound: Bound
    outputs: OutputPlan


class Calls:
    def __init__(self, manifest: Manifest, signature: Signature, device: Device, page: Slot, *, natively: bool, nan_error: bool):
        self.signature, self.page, self.nan_error = signature, page, nan_error
        self.programs = {role: manifest.programs[name] for role, name in signature.programs.items()}
        self.fused = next((role for role in ("step", "accumulate") if role in self.programs), None)
        have = {s for p in self.programs.values() for s in p.sections}
        self.sections = [s for s in SECTIONS if s in have or (s == "reduce" and "bwd" in have)]
        self.gradients = {  # by role: those that it leaves behind
            role: frozenset(b for b in p.writes if is_kind(b, Kind.GRAD, Kind.INPUT_GRAD)) for role, p in self.programs.items()
        }
        self.ready: dict[Any, Prepared] = {}
        self.device, self._natively = device, natively
        self._inputs: dict[tuple[str, int], InputPlan] = {}
        self._bound: dict[str, Bound] = {}

    def buffer(self, kind: Kind, name: str) -> str:
        return self.signature.buffer(kind, name)

    def writes(self, role: str, kind: Kind, name: str) -> bool:
        return self.buffer(kind, name) in self.programs[role].writes

    def takes(self, inputs: Sequence[Any], role: str, num_steps: int) -> bool:
        """Whether tensors of these shapes are this signature's."""
        plan = self.inputs_of(role, num_steps)
        if len(inputs) != plan.num_inputs or not all(hasattr(v, "shape") for v in inputs):
            inputs = flatten(in_order(tuple(inputs), plan.structure), lambda v: hasattr(v, "shape"))[0]
        return len(inputs) == plan.num_inputs and all(
            tuple(v.shape) == tuple(shape) for v, shape in zip(inputs, plan.shapes, strict=True)
        )

    def inputs_of(self, role: str, num_steps: int, parts: int | None = None) -> InputPlan:
        """`parts`: micro-batches of a step, where they are not as many as the role takes by itself."""
        s = self.signature
        count = num_steps * (parts or (s.num_micro_batches if role == "accumulate" else 1))
        found = self._inputs.get((role, count))
        if found is None:
            expected = s.inputs[: s.num_model_inputs] if role == "infer" else s.inputs
            self._inputs[role, count] = found = InputPlan(
                expected, s.input_structure, count, s.batch_dim, self.page, getattr(self.device, "places", ("cpu",))
            )
        return found

    def outputs_of(self, wanted: str | Mapping[str, str], num_steps: int) -> OutputPlan:
        """What several whole steps bring back."""
        return OutputPlan(self.signature, wanted, num_steps, num_steps * self.signature.num_micro_batches)

    def gradients_of_step(self, wanted: str | Mapping[str, str]) -> Prepared:
        """Forward and backward of a step, all micro-batches of it, without the update."""
        return self.prepare("accumulate", 1, wanted, update=False)

    def prepare(
        self,
        role: str,
        num_steps: int,
        wanted: str | Mapping[str, str] = "all",
        scheduled: tuple[str, ...] = (),
        *,
        parts: int | None = None,
        update: bool = True,
        reduce: bool = False,
    ) -> Prepared:
        """Everything about a kind of call that does not depend on its inputs, worked out once."""
        key = (role, num_steps, wanted if isinstance(wanted, str) else tuple(wanted.items()), scheduled, parts, update, reduce)
        found = self.ready.get(key)
        if found is not None:
            return found
        s, infer, accumulates = self.signature, role == "infer", role == "accumulate"
        plan = self.inputs_of(role, num_steps, parts)
        outputs = OutputPlan(s, wanted, num_steps, plan.count)
        writes = self.programs[role].writes
        then = "opt" if accumulates and update and "opt" in self.programs else None
        losses = [b for n in s.losses if (b := self.buffer(Kind.OUTPUT, n)) in writes]
        watched = list(losses) if self.nan_error and not infer else []
        changed = {*writes, *(self.programs[then].writes if then else ())} if watched else builtins.set[str]()
        watched += [b for b in writes if is_kind(b, Kind.CHECK)]
        names = [a.name for a in plan.expected]
        call = Call(
            micro=s.programs[role],
            update=s.programs[then] if then else None,
            num_steps=num_steps,
            num_micro_batches=plan.count // num_steps,
            inputs=tuple(self.buffer(Kind.INPUT, n) for n in names),
            taken=tuple(_taken(self.buffer(Kind.INPUT, n), shared, writes) for n, shared in zip(names, plan.shared, strict=True)),
            scheduled=scheduled,
            outputs=tuple(
                [self.buffer(Kind.INFER, a.name) for a in s.infer_outputs]
                if infer
                else [self.buffer(Kind.OUTPUT, n) for n in outputs.names]
            ),
            how=() if infer else outputs.how,
            zeroed=tuple(b for b in writes if is_kind(b, *SUMMED)) if accumulates else (),
            seeds="own" if infer else "next",
            counts=role != "fwd" and update,
            reduce=reduce,
            shown_loss=losses[0] if losses else None,
            watched=tuple(watched),
            restored=tuple(sorted(b for b in changed if is_kind(b, *WEIGHTS, Kind.CONST, Kind.NORM))),
        )
        self.ready[key] = found = Prepared(plan, self._bind(call), outputs)
        return found

    def section(self, role: str) -> None:
        """Runs a section that takes nothing from the caller and gives nothing back."""
        if role not in self._bound:
            self._bound[role] = self._bind(
                Call(micro=self.signature.programs[role], seeds="keep", counts=role in ("opt", "opt_0"))
            )
        self._bound[role].run((), ())

    def need(self, role: str) -> None:
        if role not in self.programs:
            raise UserError("run-program", f"this artifact cannot run the section {role} on its own",
                            found="programs: " + ", ".join(self.programs),
                            fix="compile with programs='all'")  # fmt: skip

    def wanted(self, sections: Sequence[str] | None) -> set[str]:
        """The sections to run, by name; all of them where none are given."""
        have = self.sections
        sections = [sections] if isinstance(sections, str) else sections
        if sections is None:
            sections = have
            if not self.signature.losses and "bwd" in have:
                raise UserError("run-loss", "this artifact has no loss of its own: it is computed on the host",
                                fix="run sections=['fwd'], then sections=['bwd', 'opt'] with out_grads=")  # fmt: skip
        unknown = [s for s in sections if s not in have] or ([] if sections else [""])
        if unknown:
            raise UserError("run-section", f"no section {unknown[0]!r} in this artifact",
                            found=", ".join(map(str, sections)), expected=", ".join(have) or "infer() only")  # fmt: skip
        return set(sections)

    def out_grads(self, given: Mapping[str, Tensor] | Sequence[Tensor | None]) -> dict[str, Tensor]:
        """Gradients of outputs, by the buffers they go to."""
        if not isinstance(given, Mapping):
            own = [a.name for a in (self.signature.outputs[1:] if self.signature.separate_loss else self.signature.outputs)]
            given = {n: g for n, g in zip(own, given, strict=False) if g is not None}
        return {self.buffer(Kind.OUTGRAD, k): g for k, g in given.items()}

    def clear(self) -> None:
        self.ready.clear()
        self._bound.clear()

    def _bind(self, call: Call) -> Bound:
        bound = self.device.bind(call)
        return bound if self._natively else Metered(bound, call, self.page)


def _taken(buffer: str, shared: bool, writes: Sequence[str]) -> Taken:
    """An input without a batch is the same for all micro-batches, also where forward changes it in place."""
    return "each" if not shared else "again" if buffer in writes else "once"
