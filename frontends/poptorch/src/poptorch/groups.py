"""The groups below Options: Precision, Training, Distributed, TensorLocations, _Popart, Jit."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch

from .enums import MeanReductionStrategy, ReductionType
from .errors import ArgumentError, WrongValue
from .values import Values, positive, recorded, switch


class Precision(Values):
    _title = "Precision"
    _defaults: ClassVar[dict[str, Any]] = {
        "partials_type": torch.float32,
        "enable_stochastic_rounding": False,
        "enable_floating_point_exceptions": False,
        "half_float_casting": None,
        "running_statistics_always_float": True,
        "autocast_enabled": True,
    }

    def setPartialsType(self, dtype: Any) -> Precision:
        """Sums inside matrix products and convolutions are made in float32 here. Recorded; it has no effect here."""
        if dtype not in (torch.half, torch.float):
            raise WrongValue("poptorch-options", "setPartialsType takes torch.half or torch.float", found=repr(dtype))
        self._set("partials_type", dtype)
        return self

    enableStochasticRounding = switch("enable_stochastic_rounding", "Round at random.")
    enableFloatingPointExceptions = switch("enable_floating_point_exceptions", "Stop at numbers that are not numbers.",
                                           "A loss that is not a number ends the call with poptorch.Error.")  # fmt: skip
    runningStatisticsAlwaysFloat = switch("running_statistics_always_float", "Deprecated.")
    runningVarianceAlwaysFloat = runningStatisticsAlwaysFloat
    autocastEnabled = switch("autocast_enabled", "Deprecated.")

    def halfFloatCasting(self, behaviour: Any) -> Precision:
        """Deprecated. Recorded; it has no effect here."""
        self._set("half_float_casting", behaviour)
        return self


class Training(Values):
    _title = "Training"
    _defaults: ClassVar[dict[str, Any]] = {
        "gradient_accumulation": 1,
        "accumulation_and_replication_reduction_type": ReductionType.Mean,
        "auto_loss_scaling": False,
        "convolution_dithering": False,
        "mean_reduction_strategy": MeanReductionStrategy.Post,
    }

    def gradientAccumulation(self, count: int) -> Training:
        """Micro-batches whose gradients make one update."""
        self._set("gradient_accumulation", positive("gradientAccumulation", count, "The gradient accumulation"))
        return self

    def accumulationAndReplicationReductionType(self, reduction: ReductionType) -> Training:
        """Mean or Sum of the gradients of all micro-batches and replicas."""
        if reduction not in (ReductionType.Mean, ReductionType.Sum):
            raise WrongValue("poptorch-options", "the reduction of gradients is ReductionType.Mean or ReductionType.Sum",
                             found=repr(reduction))  # fmt: skip
        self._set("accumulation_and_replication_reduction_type", ReductionType(reduction))
        return self

    setAutomaticLossScaling = switch("auto_loss_scaling", "Gradients are float32 here and need no scaling.")
    setConvolutionDithering = switch("convolution_dithering", "Places convolutions.")
    setMeanAccumulationAndReplicationReductionStrategy = recorded(
        "mean_reduction_strategy", "When the division by the number of micro-batches takes place."
    )


class Distributed(Values):
    _title = "Distributed"
    _defaults: ClassVar[dict[str, Any]] = {"num_distributed_processes": 1, "distributed_process_id": 0, "ipuof_configs": ""}

    def __init__(self) -> None:
        super().__init__()
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> Distributed:
        """One process, whatever the environment says."""
        return self.configureProcessId(0, 1)

    def configureProcessId(self, process_id: int, num_processes: int) -> Distributed:
        if not (0 <= process_id < num_processes):
            raise ArgumentError("poptorch-options", "the process id must be below the number of processes",
                                found=f"configureProcessId({process_id!r}, {num_processes!r})")  # fmt: skip
        self._set("distributed_process_id", process_id)
        self._set("num_distributed_processes", num_processes)
        return self

    def setEnvVarNames(self, num_processes: str, process_id: str) -> Distributed:
        if num_processes in os.environ and process_id in os.environ:
            self.configureProcessId(int(os.environ[process_id]), int(os.environ[num_processes]))
        return self

    def IPUoFConfigFiles(self, files: str) -> Distributed:
        """Recorded; it has no effect here."""
        self._set("ipuof_configs", files)
        return self

    @property
    def processId(self) -> int:
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        return int(self.num_distributed_processes)


class TensorLocationSettings(Values):
    """Where a kind of tensor lies. Recorded; memory here is the machine's."""

    _title = "TensorLocationSettings"
    _defaults: ClassVar[dict[str, Any]] = {
        "storage": "",
        "replicated_tensor_sharding": False,
        "load_tile_set": "",
        "storage_tile_set": "",
        "min_elements_for_off_chip": 2,
        "min_elements_for_replicated_tensor_sharding": 8192,
    }

    def useOnChipStorage(self, on: bool = True) -> TensorLocationSettings:
        self._set("storage", "on chip" if on else "off chip")
        return self

    def useIOTilesToLoad(self, on: bool = True) -> TensorLocationSettings:
        self._set("load_tile_set", "io" if on else "compute")
        return self

    def useIOTilesToStore(self, on: bool = True) -> TensorLocationSettings:
        self._set("storage_tile_set", "io" if on else "compute")
        return self

    useReplicatedTensorSharding = switch("replicated_tensor_sharding", "Optimizer state in parts.")
    minElementsForOffChip = recorded("min_elements_for_off_chip", "Smallest tensor outside.")
    minElementsForReplicatedTensorSharding = recorded("min_elements_for_replicated_tensor_sharding", "Smallest one in parts.")


class TensorLocations(Values):
    _title = "TensorLocations"
    _defaults: ClassVar[dict[str, Any]] = {
        "location_activation": None,
        "location_weight": None,
        "location_optimizer": None,
        "location_accumulator": None,
        "num_io_tiles": 0,
    }

    def _place(self, kind: str, settings: Any) -> TensorLocations:
        if not isinstance(settings, TensorLocationSettings):
            raise ArgumentError("poptorch-options", f"the location of {kind}s", found=type(settings).__name__,
                                expected="poptorch.TensorLocationSettings")  # fmt: skip
        self._set(f"location_{kind}", settings)
        return self

    def setActivationLocation(self, settings: TensorLocationSettings) -> TensorLocations:
        return self._place("activation", settings)

    def setWeightLocation(self, settings: TensorLocationSettings) -> TensorLocations:
        return self._place("weight", settings)

    def setOptimizerLocation(self, settings: TensorLocationSettings) -> TensorLocations:
        return self._place("optimizer", settings)

    def setAccumulatorLocation(self, settings: TensorLocationSettings) -> TensorLocations:
        return self._place("accumulator", settings)

    def numIOTiles(self, count: int) -> TensorLocations:
        """Recorded; it has no effect here."""
        if not isinstance(count, int) or count % 2 or not 32 <= count <= 192:
            raise ArgumentError("poptorch-options", "numIOTiles", found=repr(count), expected="an even number from 32 to 192")
        self._set("num_io_tiles", count)
        return self


class Popart(Values):
    """Settings of the original's back end: any key. Recorded; they have no effect here, but for `autoRecomputation`."""

    _title = "_Popart"
    _defaults: ClassVar[dict[str, Any]] = {"patterns": {}, "patterns_level": 2}

    def set(self, key: str, value: Any) -> Popart:
        """Recorded; it has no effect here, but for `autoRecomputation`: with NoRecompute (0) checkpoints are left aside."""
        self._check_frozen()
        if not isinstance(key, str):
            raise ArgumentError("poptorch-options", "_Popart.set takes a name and a value", found=repr(key))
        self._values[key] = value
        return self

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Popart:
        if not isinstance(level, int) or not 0 <= level <= 3:
            raise ArgumentError("poptorch-options", "the level of patterns", found=repr(level), expected="0 to 3")
        self._set("patterns", dict(patterns))
        self._set("patterns_level", level)
        return self


class Jit(Values):
    _title = "Jit"
    _defaults: ClassVar[dict[str, Any]] = {"trace_model": False}

    traceModel = switch("trace_model", "Deprecated.")
