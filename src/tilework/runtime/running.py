"""How a call is carried out: the fused step in one native call, or its sections one by one, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..artifact.manifest import Manifest
from ..artifact.names import Buffer, Kind, is_kind
from ..errors import TileworkError, UserError
from ..tiles.page import COPY, REDUCE, Slot
from .arguments import InputPlan
from .calls import Calls, Prepared
from .checks import broken_off, raise_failed
from .devices import NotANumber
from .parts import Parts, grads_of_part, require_grads
from .reducing import Reducer
from .results import Result
from .sync import Buffers

if TYPE_CHECKING:
    from ..parallel.shards import Shards

OutGrads = Mapping[str, Tensor] | Sequence[Tensor | None]


class Running:
    """What a session remembers from call to call: what forward kept, which gradients there are, how many steps were made."""

    def __init__(self, manifest: Manifest, calls: Sequence[Calls], memory: Buffers, page: Slot, *, nan_error: bool) -> None:
        self.manifest, self.calls, self.memory, self.page, self.nan_error = manifest, calls, memory, page, nan_error
        self.reducer: Reducer | None = None
        self.natively = False  # whether the device itself reduces, within the call
        self.num_ranks = 1  # that train together (join)
        self._is_reduced = False  # whether the gradients of the last backward are those of all of them by now
        self.shards: Shards | None = None  # the parts of the update that are this replica's
        self.newest = calls[0]  # the signature that ran last
        self._only = len(calls) == 1
        self.num_steps = 0
        self.kept_gradients: frozenset[str] = frozenset()  # that the last call left
        self._forward_of: Calls | None = None  # whose forward ran last, with what backward needs still there
        self._beyond_loss = False
        self._parts: Parts | None = None  # the last forward alone, where it had several micro-batches
        for each in calls:
            self._default_out_grads(each)

    def forget_forward(self) -> None:
        """What it kept belongs to other weights by now."""
        self._forward_of, self._parts = None, None

    # ---- the fused step ----

    def fused(self, calls: Calls, prepared: Prepared, inputs: tuple[Any, ...], steps: int, schedule: Sequence[Tensor]) -> Result:
        result = self._call(calls, prepared, inputs, schedule)
        self.forget_forward()
        self.kept_gradients = calls.gradients[calls.fused]  # type: ignore[index]
        self.newest = calls
        self.num_steps += steps
        return result

    def _call(self, calls: Calls, prepared: Prepared, inputs: tuple[Any, ...], schedule: Sequence[Tensor] = ()) -> Result:
        plan, bound, outputs = prepared
        raw = outputs.make()
        try:
            bound.run(plan.take(inputs) if self._only else self.taken(calls, plan, inputs), raw, schedule)
        except (TileworkError, NotANumber) as e:
            raise self._explained(calls, e) from e
        return Result(outputs, raw)

    def taken(self, calls: Calls, plan: InputPlan, inputs: tuple[Any, ...]) -> Sequence[Tensor]:
        """The inputs as the device takes them. Where several signatures might have been meant, the error names them."""
        try:
            return plan.take(inputs)
        except UserError as e:
            if len(self.calls) == 1 or e.id != "input-mismatch":
                raise
            sizes = ", ".join(c.signature.name for c in self.calls)
            raise UserError(e.id, e.summary, found=f"no signature with these shapes; compared with {calls.signature.name}",
                            expected=f"one of the signatures {sizes}",
                            fix="shapes are fixed: compile with batch_sizes= for these as well") from None  # fmt: skip

    def _explained(self, calls: Calls, error: TileworkError | NotANumber) -> Exception:
        if isinstance(error, TileworkError):
            return broken_off(error, calls.signature)
        self.num_steps += error.step
        self.forget_forward()
        self.kept_gradients = frozenset()
        raise_failed(calls.signature, self.memory, "fwd", error, undone=self.nan_error)
        return UserError(
            "loss-nan", f"the loss is not a number at step {self.num_steps + 1}, which was undone",
            fix="lower the learning rate, clip the gradients (clip_norm), or check the inputs of that step",
        )  # fmt: skip

    # ---- replicas ----

    def reduced(
        self,
        calls: Calls,
        inputs: tuple[Any, ...],
        steps: int,
        wanted: str | Mapping[str, str],
        schedule: Mapping[str, Tensor],
    ) -> Result:
        """Whole steps of one replica among several: gradients, their reduction, the update; again for each step."""
        update = "opt" in calls.programs
        self.require_replicas(calls)
        plan, outputs, one = (
            calls.inputs_of("accumulate", steps),
            calls.outputs_of(wanted, steps),
            calls.gradients_of_step(wanted),
        )
        raw, given = outputs.make(), self.taken(calls, plan, inputs)
        for step in range(steps):
            for buffer, values in schedule.items():
                self.memory.fill(buffer, float(values[step]))
            try:
                one.bound.run(plan.of_step(given, step, steps), outputs.of_step(raw, step))
            except (TileworkError, NotANumber) as e:
                raise self._explained(calls, e) from e
            self.kept_gradients = calls.gradients["accumulate"]
            self._reduce()
            if self.shards is not None:
                self._update_own(calls, self.shards)
            elif update:
                calls.section("opt")
            self.num_steps += 1
        self.forget_forward()
        self.newest = calls
        return Result(outputs, raw)

    def _update_own(self, calls: Calls, shards: Shards) -> None:
        for role in (*shards.own, *shards.rest):
            calls.section(role)
        with self.page.beside(REDUCE):
            shards.exchange()

    def require_replicas(self, calls: Calls) -> None:
        if "accumulate" not in calls.programs or (self.manifest.groups and "opt" not in calls.programs):
            raise UserError("run-reduce", "this artifact's step cannot wait for the gradients of other replicas",
                            found="programs: " + ", ".join(calls.programs),
                            fix="compile with num_replicas=2 (--replicas 2); it then runs with any number")  # fmt: skip

    def _reduce(self) -> None:
        """Gradients become the mean, or the sum, over all replicas. With one there is nothing to do."""
        if self.reducer is not None:
            self.memory.synchronize()
            with self.page.beside(REDUCE):
                self.reducer.reduce(self.memory.buckets)
            self._is_reduced = True

    # ---- section by section ----

    def sections(
        self,
        calls: Calls,
        wanted: set[str],
        inputs: tuple[Any, ...],
        out_grads: OutGrads | None,
        outputs: str | Mapping[str, str],
        *,
        one_part: bool = False,
    ) -> Result:
        """`one_part`: the inputs are those of a single micro-batch."""
        if inputs and "fwd" not in wanted:
            raise UserError("run-inputs", "inputs were given, but the section fwd, which takes them, is not run",
                            found=f"sections {sorted(wanted)}", fix="add 'fwd' to sections, or give no inputs")  # fmt: skip
        parts = self._parts if "fwd" not in wanted else None
        if "fwd" in wanted and not one_part and calls.signature.num_micro_batches > 1 and calls.takes(inputs, "accumulate", 1):
            parts = Parts(calls, self.memory, inputs)
        if parts is not None and "bwd" in wanted:
            result = self._parts_backward(parts, wanted, out_grads, outputs)
        else:
            result = Result(None, [])
            if "fwd" in wanted:
                result = self._forward(calls, inputs, outputs, parts)
            if out_grads is not None:  # after a forward that may fail: they are for this backward alone
                with self.page.during(COPY):
                    self._set_out_grads(calls, out_grads)
            if "bwd" in wanted:
                self._backward(calls, out_grads is not None)
        if "reduce" in wanted:
            self._reduce()
        if "opt" in wanted:
            self._update(calls)
        return result

    def _forward(self, calls: Calls, inputs: tuple[Any, ...], outputs: str | Mapping[str, str], parts: Parts | None) -> Result:
        calls.need("fwd")
        several = calls.signature.num_micro_batches if parts is not None else 1
        result = self._call(calls, calls.prepare("fwd", 1, outputs, parts=several), inputs)
        self._forward_of, self._parts, self.newest = calls if parts is None else None, parts, calls
        return result

    def _backward(self, calls: Calls, given: bool) -> None:
        calls.need("bwd")
        if self._forward_of is not calls:
            raise UserError("run-order", "bwd needs what a fwd just before it has kept", found="no fwd before this bwd",
                            fix="run sections=['fwd'] first, or ['fwd', 'bwd', ...] together")  # fmt: skip
        if not given and not calls.signature.losses:
            raise UserError("run-loss", "bwd needs gradients of the outputs: this artifact has no loss of its own",
                            fix="give out_grads={name: gradient, ...}")  # fmt: skip
        self._beyond_loss = self._beyond_loss and given
        calls.section("bwd")
        self._is_reduced = False
        self.kept_gradients = calls.gradients["bwd"]
        self._default_out_grads(calls)

    def _parts_backward(
        self, parts: Parts, wanted: set[str], out_grads: OutGrads | None, outputs: str | Mapping[str, str]
    ) -> Result:
        """Forward and backward of each micro-batch, gradients added up as in the fused step."""
        calls, again = parts.calls, "fwd" not in wanted
        if out_grads is None:
            with parts.repeated(again):
                result = self._call(calls, calls.gradients_of_step(outputs), parts.inputs)
        else:
            grads = {Buffer(b).name: g for b, g in calls.out_grads(out_grads).items()}
            require_grads(grads, calls.signature)
            results = []
            with parts.repeated(again):
                for i, inputs in enumerate(parts.micro_batches()):
                    own = grads_of_part(grads, i, calls.signature)
                    results.append(self.sections(calls, {"fwd", "bwd"}, inputs, own, outputs, one_part=True))
                    parts.add_gradients()
                parts.put_gradients()
            result = parts.joined(results, outputs)
        # Those of inputs are the last micro-batch's alone, and so are not kept.
        kept = calls.gradients["accumulate" if out_grads is None else "bwd"]
        self.kept_gradients = frozenset(b for b in kept if is_kind(b, Kind.GRAD))
        self._is_reduced = False
        self._forward_of, self._parts, self.newest = None, parts, calls
        return Result(None, []) if again else result

    def _update(self, calls: Calls) -> None:
        calls.need("opt")
        needed = {b for b in calls.programs["opt"].buffers if is_kind(b, Kind.GRAD)}
        if self.num_ranks > 1 and not self._is_reduced:
            raise UserError("run-reduce", "opt would use this rank's own gradients, and the ranks would drift apart",
                            fix="run the section reduce between bwd and opt, or leave out sections=")  # fmt: skip
        if not needed <= self.kept_gradients:
            raise UserError("run-order", "opt needs gradients, and no bwd has made any", fix="run bwd before opt")
        held = {Kind.GRAD.of(p.name) for p in self.manifest.parameters if p.group is not None}
        if self._beyond_loss and (others := (held & self.kept_gradients) - needed):
            raise UserError("run-out-grads", "the optimizer updates only parameters that the step's loss reaches",
                            found=f"gradients for {', '.join(sorted(Buffer(b).name for b in others))} as well",
                            fix="compile with loss=None, so that gradients come from out_grads alone")  # fmt: skip
        if self.shards is not None:
            self._update_own(calls, self.shards)
        else:
            calls.section("opt")
        self.forget_forward()
        self.num_steps += 1

    # ---- gradients of outputs ----

    def _default_out_grads(self, calls: Calls) -> None:
        """Backward starts from ones at the losses and zeros elsewhere; without a loss, the host must say."""
        for output in calls.signature.outputs:
            self.memory.fill(calls.buffer(Kind.OUTGRAD, output.name), 1.0 if output.name in calls.signature.losses else 0.0)

    def _set_out_grads(self, calls: Calls, given: OutGrads) -> None:
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


def no_gradients() -> UserError:
    return UserError("run-gradients", "there are no gradients to read: the fused step does not keep them",
                     fix="run with keep_gradients=True, or run the sections fwd and bwd")  # fmt: skip
