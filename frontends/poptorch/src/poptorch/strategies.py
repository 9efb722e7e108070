"""Execution strategies: which blocks make a stage, and on which device a stage would be. Numerically they change nothing; what
they ask for is checked when the model is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .enums import AutoStage, Liveness
from .errors import ArgumentError, Error


class Stage:
    """Blocks that run together. `ipu(n)` says where."""

    def __init__(self, *block_ids: str) -> None:
        if not block_ids or not all(isinstance(b, str) for b in block_ids):
            raise ArgumentError("poptorch-strategy", "Stage takes names of blocks", found=repr(block_ids))
        self.blocks = tuple(block_ids)
        self._ipu: int | None = None
        self._stage_id: int | None = None

    def ipu(self, index: int) -> Stage:
        self._ipu = index
        return self

    def __repr__(self) -> str:
        where = "" if self._ipu is None else f".ipu({self._ipu})"
        return f"Stage({', '.join(map(repr, self.blocks))}){where}"


class Phase:
    """Stages of a phased execution that run at the same time."""

    def __init__(self, *stages: Any) -> None:
        self.stages = [_stage(s) for s in stages]

    def stage(self, index: int) -> Stage:
        return self.stages[index]

    def ipus(self, *indices: int) -> Phase:
        if len(indices) != len(self.stages):
            raise ArgumentError("poptorch-strategy", "one device for each stage of the phase",
                                found=f"{len(indices)} devices, {len(self.stages)} stages")  # fmt: skip
        for stage, index in zip(self.stages, indices, strict=True):
            stage.ipu(index)
        return self


def _stage(given: Any) -> Stage:
    if isinstance(given, Stage):
        return given
    if isinstance(given, str):
        return Stage(given)
    if isinstance(given, (list, tuple)):
        return Stage(*given)
    raise ArgumentError("poptorch-strategy", "a stage", found=repr(given), expected="a Stage, a block's name, or a list of names")


class Strategy:
    """What all strategies have: stages that were named, or a rule that numbers blocks."""

    def __init__(self, *args: Any) -> None:
        self.auto = args[0] if len(args) == 1 and isinstance(args[0], AutoStage) else None
        self.stages = [] if self.auto is not None else [_stage(a) for a in args]
        if self.auto is None and not self.stages:
            self.auto = AutoStage.SameAsIpu
        names = [b for s in self.stages for b in s.blocks]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ArgumentError("poptorch-strategy", f"Block {twice[0]} is in two stages")

    def stage(self, name: str | int) -> Stage:
        """The stage of a block, or by its number."""
        if isinstance(name, int):
            return self.stages[name]
        found = next((s for s in self.stages if name in s.blocks), None)
        if found is None:
            raise ArgumentError("poptorch-strategy", f"Unknown Block {name}")
        return found

    def placed(self, blocks: Sequence[tuple[str, int | None]]) -> list[tuple[str, int, int]]:
        """(block, stage, device) of the blocks that the model has begun, in that order."""
        if self.stages:
            known = {name for name, _ in blocks}
            unknown = [b for s in self.stages for b in s.blocks if b not in known]
            if unknown:
                raise ArgumentError(
                    "poptorch-strategy", f"Unknown Block {unknown[0]}", expected=", ".join(sorted(known)) or "no blocks"
                )
            left = [name for name, _ in blocks if all(name not in s.blocks for s in self.stages)]
            if left:
                raise ArgumentError("poptorch-strategy", f"Block {left[0]} belongs to no stage")
            number = {b: i for i, s in enumerate(self.stages) for b in s.blocks}
            return [(n, number[n], i if (i := self.stages[number[n]]._ipu) is not None else number[n]) for n, _ in blocks]
        found, device = list[tuple[str, int, int]](), 0
        for i, (name, ipu) in enumerate(blocks):
            device = device if ipu is None else ipu
            found.append((name, device if self.auto == AutoStage.SameAsIpu else i, device))
        return found

    def check(self, placed: Iterable[tuple[str, int, int]], *, training: bool, accumulation: int, iterations: int) -> None:
        """What only a pipeline needs."""

    def __repr__(self) -> str:
        inside = ", ".join(map(repr, self.stages)) if self.stages else str(self.auto)
        return f"{type(self).__name__}({inside})"


class PipelinedExecution(Strategy):
    def check(self, placed: Iterable[tuple[str, int, int]], *, training: bool, accumulation: int, iterations: int) -> None:
        stages = len({stage for _, stage, _ in placed})
        if stages < 2:
            return
        if training and accumulation < 2 * stages - 1:  # the last stage's forward and backward are one
            raise Error("poptorch-pipeline", "poptorch.Options().Training.gradientAccumulation must be greater than or "
                                             "equal to the "
                        f"number of pipeline stages ({2 * stages - 1}) when using poptorch.PipelinedExecution",
                        found=f"gradientAccumulation({accumulation}), {stages} stages forward",
                        fix="accumulate more, or use ShardedExecution")  # fmt: skip
        if not training and iterations < stages:
            raise Error(
                "poptorch-pipeline",
                "poptorch.Options().deviceIterations must be greater than or equal to the number of "
                f"pipeline stages ({stages}) when using poptorch.PipelinedExecution in inference",
                found=f"deviceIterations({iterations})",
                fix="ask for more iterations, or use ShardedExecution",
            )


class ShardedExecution(Strategy):
    """Stages one after the other."""


class SerialPhasedExecution(Strategy):
    """Phases one after the other. Recorded; it has no effect here."""

    def __init__(self, *phases: Any) -> None:
        super().__init__(*_of_phases(phases))

    def setTensorsLiveness(self, liveness: Liveness) -> SerialPhasedExecution:
        """Recorded; it has no effect here."""
        self.liveness = liveness
        return self

    def useSeparateBackwardPhase(self, use: bool = True) -> SerialPhasedExecution:
        """Recorded; it has no effect here."""
        self.separate = use
        return self

    phases = property(lambda self: self.stages)

    def phase(self, index: int) -> Stage:
        return self.stages[index]


class ParallelPhasedExecution(SerialPhasedExecution):
    """Phases whose stages would run at the same time. Recorded; it has no effect here."""


def _of_phases(phases: Sequence[Any]) -> list[Any]:
    return [s for p in phases for s in (p.stages if isinstance(p, Phase) else [p])]


def num_devices(placed: Sequence[tuple[str, int, int]], rounded: bool) -> int:
    """How many devices one replica would take: a power of two."""
    most = max((device for _, _, device in placed), default=0) + 1
    power = 1 << (most - 1).bit_length()
    if power != most and not rounded:
        raise Error("poptorch-devices", f"PopTorch must attach to a power of 2 number of IPUs: the model uses {most}",
                    fix="options.autoRoundNumIPUs(True), or other blocks")  # fmt: skip
    if power > 64:
        raise Error("poptorch-devices", "one process has at most 64 devices", found=str(power))
    return power
