"""What a call brings back: which outputs, of every micro-batch or the last or their sum, in the user's own structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..artifact.graph import DTYPES
from ..artifact.manifest import Signature
from ..artifact.structure import unflatten
from ..errors import UserError, did_you_mean
from .arguments import joined

MODES = ("all", "last", "sum", "loss")
_SUMMABLE = ("float32", "float64", "int64")
_SMALL, _STOCK = 1024, 64  # bytes of a call's outputs; calls to a stock. A kept result keeps its stock's memory: 64 KB.


class Result:
    """What a call returns. Values are computed when they are asked for: a loop that only reads the loss pays for nothing else."""

    __slots__ = ("_loss", "_losses", "_outputs", "_plan", "_raw")

    def __init__(self, plan: OutputPlan | None, raw: Sequence[Tensor]) -> None:
        self._plan, self._raw = plan, raw
        self._loss: Tensor | None = None
        self._losses: Tensor | None = None
        self._outputs: Any = None

    @property
    def losses(self) -> Tensor | None:
        """One loss per micro-batch, in order."""
        if self._losses is None and self._plan is not None:
            self._losses = self._plan.losses(self._raw)
        return self._losses

    @property
    def loss(self) -> Tensor | None:
        """The mean over the micro-batches of a step (the sum if they accumulate by sum), and the mean over several steps."""
        if self._loss is None and self._plan is not None:
            self._loss = self._plan.loss(self._raw)
        return self._loss

    @property
    def outputs(self) -> Any:
        """In the structure that the model returns. Several micro-batches are concatenated along the batch dimension."""
        if self._outputs is None and self._plan is not None:
            self._outputs = self._plan.outputs(self._raw)
        return self._outputs

    @property
    def raw(self) -> Sequence[Tensor]:
        """As the device returned them. With several micro-batches, whole outputs have one more dimension in front."""
        return self._raw

    @property
    def flat(self) -> list[Tensor]:
        """Every output in the manifest's order. With several micro-batches: one scalar per step, the rest concatenated."""
        return self._plan.flat(self._raw) if self._plan is not None else []

    def __repr__(self) -> str:
        return f"Result(loss={self.loss})"


class OutputPlan:
    """What one kind of call gives back, worked out once."""

    def __init__(self, s: Signature, wanted: str | Mapping[str, str], num_steps: int, count: int) -> None:
        self.signature, self.num_steps, self.count = s, num_steps, count
        how = _modes(s, wanted)
        self.names = [a.name for a in s.outputs if a.name in how]
        self.how = tuple(how[n] for n in self.names)
        self._types = []
        for argument in s.outputs:
            if argument.name in how:
                whole = count > 1 and how[argument.name] == "all"
                shape = (count, *argument.type.shape) if whole else tuple(argument.type.shape)
                self._types.append((torch.Size(shape), DTYPES[argument.type.dtype], how[argument.name] == "sum"))
        size = sum(shape.numel() * dtype.itemsize for shape, dtype, _ in self._types)
        self._is_small = 0 < size <= _SMALL and not any(zeroed for _, _, zeroed in self._types)
        self._stock: list[tuple[Tensor, ...]] = []
        self._loss_positions = [self.names.index(n) for n in s.losses if n in self.names]
        own = s.outputs[1:] if s.separate_loss else s.outputs
        self._own = [self.names.index(a.name) if a.name in self.names else None for a in own]
        self._only_losses = all(self.names[i] in s.losses for i in self._own if i is not None)

    def make(self) -> Sequence[Tensor]:
        """Memory for one call. Small outputs are made for many calls at once: making a tensor costs as much as a small step."""
        if self._stock:
            return self._stock.pop()
        if self._is_small:
            blocks = [torch.empty((_STOCK, *shape), dtype=dtype).unbind(0) for shape, dtype, _ in self._types]
            self._stock = list(zip(*blocks, strict=True))
            return self._stock.pop()
        return [torch.zeros(s, dtype=d) if zeroed else torch.empty(s, dtype=d) for s, d, zeroed in self._types]

    def of_step(self, raw: Sequence[Tensor], step: int) -> Sequence[Tensor]:
        """Where one step of the call puts its outputs. Sums, and outputs of which the last one counts, have one place."""
        if self.num_steps == 1:
            return raw
        return [t.chunk(self.num_steps)[step] if how == "all" else t for t, how in zip(raw, self.how, strict=True)]

    def losses(self, raw: Sequence[Tensor]) -> Tensor | None:
        found = None
        for i in self._loss_positions:
            found = raw[i] if found is None else found + raw[i]
        return found.unsqueeze(0) if found is not None and self.count == 1 else found

    def loss(self, raw: Sequence[Tensor]) -> Tensor | None:
        if self.count == 1 and len(self._loss_positions) == 1:
            return raw[self._loss_positions[0]]
        losses = self.losses(raw)
        if losses is None or self.count == 1:
            return None if losses is None else losses[0]
        return self._a_step(losses).mean(0)

    def _a_step(self, values: Tensor) -> Tensor:
        """[micro-batches of all steps, ...] -> [steps, ...], as gradients accumulate."""
        steps = values.reshape(self.num_steps, -1, *values.shape[1:])
        return steps.mean(1) if self.signature.accumulate == "mean" else steps.sum(1)

    def flat(self, raw: Sequence[Tensor]) -> list[Tensor]:
        if self.count == 1:
            return list(raw)
        found = []
        for tensor, how in zip(raw, self.how, strict=True):
            if how == "all" and tensor.dim() == 1 and tensor.is_floating_point():
                steps = self._a_step(tensor)
                tensor = steps if self.num_steps > 1 else steps[0]
            elif how == "all":
                tensor = joined(tensor, self.signature.batch_dim)
            found.append(tensor)
        return found

    def outputs(self, raw: Sequence[Tensor]) -> Any:
        if self._only_losses and any(i is None for i in self._own):
            return None  # outputs="loss"
        leaves: list[Tensor | None] = []
        for i in self._own:
            if i is None:
                leaves.append(None)
            elif self.count == 1 or self.how[i] != "all":
                leaves.append(raw[i])
            else:
                leaves.append(joined(raw[i], self.signature.batch_dim))
        return unflatten(self.signature.output_structure, iter(leaves))


def _modes(s: Signature, wanted: str | Mapping[str, str]) -> dict[str, str]:
    """Output name -> mode. Losses are scalars: they always come back whole."""
    names = [a.name for a in s.outputs]
    if isinstance(wanted, str):
        modes = dict.fromkeys([] if wanted == "loss" else names, wanted)
        unknown = {} if wanted in MODES else {"outputs": wanted}
    else:
        wrong = [n for n in wanted if n not in names]
        if wrong:
            raise UserError("run-outputs", f"no output {wrong[0]!r}", expected=did_you_mean(str(wrong[0]), names))
        modes = dict(wanted)
        unknown = {n: mode for n, mode in modes.items() if mode not in MODES[:3]}
    if unknown:
        name, mode = next(iter(unknown.items()))
        raise UserError("run-outputs", f"{name}: no output mode {mode!r}", expected="all, last, sum or loss; or a dict of "
                        "output names and modes")  # fmt: skip
    for argument in s.outputs:
        if modes.get(argument.name) == "sum" and argument.type.dtype not in _SUMMABLE:
            raise UserError("run-outputs", f"output {argument.name} cannot be summed", found=argument.type.dtype,
                            expected=", ".join(_SUMMABLE), fix="bring it back with 'all' or 'last'")  # fmt: skip
    return {n: "all" if n in s.losses else modes[n] for n in names if n in modes or n in s.losses}
