"""Micro-batches section by section: forward alone now, backward later, or backward from gradients that the host gives.

The fused step runs forward and backward of one micro-batch after the other. Sections ask for all forwards first, but forward
keeps what backward needs of one micro-batch only. So a backward pass repeats the forwards, from the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..artifact.manifest import Argument, Signature
from ..artifact.names import SUMMED, Kind
from ..errors import UserError, did_you_mean
from .arguments import flat_inputs
from .calls import Calls
from .results import OutputPlan, Result
from .sync import Buffers


class Parts:
    """One step's inputs, and where its forward began."""

    def __init__(self, calls: Calls, memory: Buffers, inputs: tuple[Any, ...]) -> None:
        plan = calls.inputs_of("accumulate", 1)
        self.calls, self._memory = calls, memory
        # Copies: the caller may fill his own memory with the next batch before he asks for the backward pass.
        self.inputs = tuple(t.detach().clone() for t in flat_inputs(inputs, plan.expected, plan.structure))
        self._random = calls.device.random_state()
        self._changing = memory.read_all(Kind.BUFFER, Kind.CONST)  # by forward, perhaps
        self._totals: dict[str, Tensor] = {}

    @contextmanager
    def repeated(self, again: bool) -> Iterator[None]:
        """`again`: the forwards inside have run before, and everything is then as they have left it."""
        if not again:
            yield
            return
        after = self.calls.device.random_state()
        self.calls.device.seed(*self._random)
        left = {name: self._memory.read(name) for name in self._changing}
        for name, value in self._changing.items():
            self._memory.write(name, value)
        try:
            yield
        finally:
            for name, value in left.items():
                self._memory.write(name, value)
            self.calls.device.seed(*after)

    def micro_batches(self) -> Iterator[tuple[Tensor, ...]]:
        s = self.calls.signature
        for i in range(s.num_micro_batches):
            yield tuple(chunk(t, i, s, argument) for t, argument in zip(self.inputs, s.inputs, strict=True))

    def add_gradients(self) -> None:
        for name, grad in self._memory.read_all(*SUMMED).items():
            self._totals[name] = grad if name not in self._totals else self._totals[name] + grad

    def put_gradients(self) -> None:
        for name, total in self._totals.items():
            self._memory.write(name, total)
        self._totals = {}

    def joined(self, results: Sequence[Result], wanted: str | Mapping[str, str]) -> Result:
        """What the micro-batches brought back, as one call."""
        plan = OutputPlan(self.calls.signature, wanted, 1, len(results))
        raw = []
        for how, values in zip(plan.how, zip(*(r.raw for r in results), strict=True), strict=True):
            together = torch.stack(values)
            raw.append(together if how == "all" else together[-1] if how == "last" else together.sum(0))
        return Result(plan, raw)


def chunk(value: Tensor, i: int, s: Signature, argument: Argument) -> Tensor:
    """The i-th micro-batch of an input or of an output's gradient; the whole where it has no batch."""
    whole, dim = s.num_micro_batches, s.batch_dim
    if list(value.shape) == argument.type.shape or dim is None:
        return value
    return value.chunk(whole, dim)[i]


def require_grads(grads: Mapping[str, Tensor], s: Signature) -> None:
    """UserError that lists gradients of outputs which are none, or have another shape than those of the whole step."""
    expected = {a.name: list(a.type.shape) for a in s.outputs}
    for shape in expected.values():
        if s.batch_dim is not None and len(shape) > s.batch_dim:
            shape[s.batch_dim] *= s.num_micro_batches
    problems = [f"{k}: not an output; {did_you_mean(k, expected)}" if k not in expected else
                f"{k}: shape is {list(g.shape)}, expected {expected[k]}"
                for k, g in grads.items() if k not in expected or list(g.shape) != expected[k]]  # fmt: skip
    if problems:
        raise UserError("run-out-grads", f"the gradients of outputs do not fit ({s.num_micro_batches} micro-batches):\n    "
                        + "\n    ".join(problems))  # fmt: skip


def grads_of_part(grads: Mapping[str, Tensor], i: int, s: Signature) -> dict[str, Tensor]:
    """Gradients of a step's outputs, by name -> those of its i-th micro-batch's. A scalar is the mean (or the sum) over them."""
    found = {}
    for argument in s.outputs:
        if argument.name in grads:
            g = grads[argument.name]
            mean = not argument.type.shape and s.accumulate == "mean"
            found[argument.name] = g / s.num_micro_batches if mean else chunk(g, i, s, argument)
    return found
