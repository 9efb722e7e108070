"""The enums of PopART that PopTorch programs pass to Options._Popart, and nothing else: there is no PopART here. Their values
have no effect."""

from __future__ import annotations

import enum
from typing import Any

import tilework

__version__ = f"3.4.0+tilework.{tilework.__version__}"


class AccumulateOuterFragmentSchedule(enum.IntEnum):
    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class SubgraphCopyingStrategy(enum.IntEnum):
    OnEnterAndExit = 0
    JustInTime = 1


class SyntheticDataMode(enum.IntEnum):
    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class RecomputationType(enum.IntEnum):
    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class TensorStorage(enum.IntEnum):
    OffChip = 0
    OnChip = 1


class VirtualGraphMode(enum.IntEnum):
    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


class ReplicatedTensorSharding(enum.IntEnum):
    Off = 0
    On = 1


class BatchSerializationBatchSchedule(enum.IntEnum):
    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class BatchSerializationTransformContext(enum.IntEnum):
    Fwd = 0
    Bwd = 1


class BatchSerializationMethod(enum.IntEnum):
    UnrollDynamic = 0
    UnrollStatic = 1
    Loop = 2


class Instrumentation(enum.IntEnum):
    Outer = 0
    Inner = 1


class MergeVarUpdateType(enum.IntEnum):
    None_ = 0
    All = 1
    AutoLoose = 2
    AutoTight = 3


class ExecutionPhaseIOSchedule(enum.IntEnum):
    Preload = 0
    OnDemand = 1


class ExecutionPhaseSchedule(enum.IntEnum):
    Interleaving = 0
    Batch = 1
    BatchClusteredIO = 2


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"popart.{name}: only the enums of PopART are here, and PopTorch programs take nothing else from it. "
        "Write a graph that uses PopART itself with torch operators."
    )
