"""poptorch.Options: every setter of the interface. Those that concern a chip's memory and links are checked, kept and shown, and
say so in their own words; the others work."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from . import groups
from .enums import ConnectionType, OutputMode, SyncPattern
from .errors import ArgumentError, Error, StateError, WrongValue
from .optionfiles import apply_json, apply_lines, environment
from .strategies import PipelinedExecution, Strategy
from .values import Values, positive, recorded, switch


class Options(Values):
    _defaults: ClassVar[dict[str, Any]] = {
        "device_iterations": 1, "replication_factor": 1, "output_mode": OutputMode.Default, "output_return_period": 1,
        "random_seed": None, "executable_cache_dir": "", "available_memory_proportion": {}, "auto_round_num_ipus": False,
        "enable_synthetic_data": False, "ipu_version": 2, "offline_target": False, "use_model": False, "ipu_id": None,
        "connection_type": ConnectionType.Always, "sync_pattern": SyncPattern.Full, "log_dir": ".", "model_name": "",
        "max_repeat_logs": 4, "log_cycle_count": False, "show_compilation_progress_bar": True, "stable_norm": False,
        "profile_dir": "", "relax_optimizer_checks": False, "updatable_named_buffers": [], "broadcast_buffers": True,
        "anchored_tensors": {}, "input_group_size": 1, "module_namescope_enabled": True, "source_location_excludes": [],
        "tiles_per_ipu": 0,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        vars(self).update(
            _execution_strategy=PipelinedExecution(), Precision=groups.Precision(), Training=groups.Training(),
            Distributed=groups.Distributed(), TensorLocations=groups.TensorLocations(), _Popart=groups.Popart(), Jit=groups.Jit(),
        )  # fmt: skip
        self._values["use_model"] = os.environ.get("POPTORCH_IPU_MODEL", "0") not in ("", "0")
        self._values["executable_cache_dir"] = os.environ.get("POPTORCH_CACHE_DIR", "")
        environment(self)

    # ---- batches ----

    def deviceIterations(self, count: int) -> Options:
        """Updates (in training) or batches (in inference) of one call."""
        self._set("device_iterations", positive("deviceIterations", count, "The number of device iterations"))
        return self

    def replicationFactor(self, count: int) -> Options:
        """Copies of the model in this process, whose gradients are reduced in each update."""
        self._set("replication_factor", positive("replicationFactor", count, "The replication factor"))
        return self

    def inputReplicaGrouping(self, input_group_size: int = 1, input_group_type: Any = None) -> Options:
        """Replicas that get the same input: refused, except for groups of 1."""
        if input_group_size != 1:
            raise Error("poptorch-refused", "inputReplicaGrouping: replicas that share their input are not here",
                        found=f"a group of {input_group_size}", expected="1")  # fmt: skip
        return self

    def outputMode(self, mode: OutputMode, output_return_period: int | None = None) -> Options:
        """Which micro-batches' outputs a call returns."""
        if mode == OutputMode.EveryN:
            if not isinstance(output_return_period, int) or output_return_period < 1:
                raise ArgumentError(
                    "poptorch-options",
                    "EveryN requires output_return_period to be set",
                    found=repr(output_return_period),
                    expected="outputMode(OutputMode.EveryN, N), N a whole number above 0",
                )
            self._set("output_return_period", output_return_period)
        self._set("output_mode", mode)
        return self

    def defaultOutputMode(self) -> bool:
        return bool(self.output_mode == OutputMode.Default)

    def broadcastBuffers(self, broadcast: bool = True) -> Options:
        """False: each replica keeps its own buffers, which is how it is done here; a model that has any needs it."""
        self._set("broadcast_buffers", broadcast)
        return self

    # ---- the compile and its files ----

    def randomSeed(self, seed: int) -> Options:
        """Of this process's torch, and of the random numbers that the model draws."""
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise ArgumentError("poptorch-options", "the random seed", found=repr(seed), expected="a whole number")
        self._set("random_seed", seed)
        torch.manual_seed(seed)
        return self

    def enableExecutableCaching(self, path: str | None) -> Options:
        """Compiled code is kept in this folder; None: in the user's own cache."""
        self._set("executable_cache_dir", "" if path is None else str(path))
        return self

    def connectionType(self, kind: ConnectionType) -> Options:
        """Never: compile only."""
        self._set("connection_type", kind)
        return self

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Options:
        """Compile only."""
        self._set("connection_type", ConnectionType.Never)
        self._set("offline_target", True)
        self._set("ipu_version", ipu_version)
        return self

    def setExecutionStrategy(self, strategy: Any) -> Options:
        """How blocks are grouped: checked when the model is compiled; the numbers are those of the plain model."""
        self._check_frozen()
        strategy = strategy() if isinstance(strategy, type) and issubclass(strategy, Strategy) else strategy
        if not isinstance(strategy, Strategy):
            raise ArgumentError("poptorch-options", "setExecutionStrategy", found=type(strategy).__name__,
                                expected="PipelinedExecution, ShardedExecution or a phased execution")  # fmt: skip
        vars(self)["_execution_strategy"] = strategy
        return self

    def enableSyntheticData(self, enabled: bool = True) -> Options:
        """Floating-point inputs are random numbers that are made once; what the program passes only gives shapes."""
        self._set("enable_synthetic_data", enabled)
        return self

    def anchorTensor(self, short_name: str, long_name: str, output_mode: OutputMode | None = None,
                     output_return_period: int | None = 1) -> Options:  # fmt: skip
        """`Gradient___NAME` or `UpdatedVar___NAME` of a parameter; getAnchoredTensor(short_name) reads it after a call."""
        if output_mode not in (None, OutputMode.Final, OutputMode.Default):
            raise Error("poptorch-refused", "anchorTensor: only the last value of a call can be kept", found=repr(output_mode),
                        expected="OutputMode.Final")  # fmt: skip
        self._check_frozen()
        self._values["anchored_tensors"][short_name] = [long_name, OutputMode.Final, 1]
        return self

    def updatableNamedBuffers(self, names: list[str]) -> Options:
        """Buffers that copyNamedBuffersToDevice() copies."""
        self._set("updatable_named_buffers", list(names))
        return self

    showCompilationProgressBar = switch("show_compilation_progress_bar", "The bar `Graph compilation`.", "It works.")
    relaxOptimizerAttributesChecks = switch("relax_optimizer_checks", "Unknown attributes of optimizers without a warning.",
                                            "It works.")  # fmt: skip

    # ---- recorded ----

    def setAvailableMemoryProportion(self, proportions: Mapping[str, float]) -> Options:
        """Recorded; it has no effect here."""
        wrong = [k for k in proportions if not (isinstance(k, str) and k.startswith("IPU"))]
        if wrong:
            raise ArgumentError("poptorch-options", "Memory proportions are set for IPUs by name", found=repr(wrong[0]),
                                expected="IPU0, IPU1 ...")  # fmt: skip
        self._set("available_memory_proportion", {k: float(v) for k, v in proportions.items()})
        return self

    def useIpuId(self, ipu_id: int) -> Options:
        """Recorded; it has no effect here. TILEWORK_TILES chooses tiles."""
        self._set("ipu_id", ipu_id)
        return self

    def useIpuModel(self, use_model: bool) -> Options:
        """Recorded; it has no effect here: nothing is a model of a chip."""
        self._set("use_model", use_model)
        return self

    def enableProfiling(self, profile_dir: str | None = None) -> Options:
        """Recorded; it has no effect here."""
        self._set("profile_dir", profile_dir or "")
        return self

    def disableModuleNamescope(self) -> Options:
        """Recorded; it has no effect here."""
        self._set("module_namescope_enabled", False)
        return self

    def sourceLocationExcludes(self, excludes: list[str]) -> Options:
        """Recorded; it has no effect here."""
        self._set("source_location_excludes", list(excludes))
        return self

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        """Recorded; it has no effect here."""
        return self.sourceLocationExcludes([*self._values["source_location_excludes"], *excludes])

    autoRoundNumIPUs = switch("auto_round_num_ipus", "Numbers of devices that are not powers of 2 are rounded up.",
                              "Without it such a number is an error, as in the original.")  # fmt: skip
    logCycleCount = switch("log_cycle_count", "Cycles of a chip.")
    enableStableNorm = switch("stable_norm", "Normalization is stable here.")
    syncPattern = recorded("sync_pattern", "How chips wait for each other.")
    logDir = recorded("log_dir", "Where logs go.")
    modelName = recorded("model_name", "The model's name in profiles.")
    maxRepeatLogs = recorded("max_repeat_logs", "How often one message is repeated.")
    setTilesPerIpu = recorded("tiles_per_ipu", "The size of a modelled chip.")

    # ---- other forms ----

    def clone(self) -> Options:
        """A deep copy that can be changed."""
        return copy.deepcopy(self)

    def from_json(self, text: str) -> Options:
        """`{"dotted.setter": value, or list of arguments}`."""
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as e:
            raise WrongValue("poptorch-config", "these options are not JSON", found=str(e)) from e
        apply_json(self, settings)
        return self

    def loadFromFile(self, path: str | Path) -> Options:
        """One setter call a line: `deviceIterations(4)`, `Training.gradientAccumulation(2)`, `# comment`."""
        apply_lines(self, Path(path))
        return self

    def _groups(self) -> dict[str, Values]:
        return {k: v for k, v in vars(self).items() if isinstance(v, Values)}

    def toDict(self) -> dict[str, Any]:
        found = super().toDict()
        found["execution_strategy"] = repr(self._execution_strategy)
        return found | {k: g.toDict() for k, g in self._groups().items()}

    def _freeze(self) -> None:
        super()._freeze()
        for group in self._groups().values():
            group._freeze()

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(vars(self).get(name), Values):
            raise StateError("poptorch-options", f"{name} is a group of options", fix=f"call its setters: options.{name}...")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        inside = "".join(f",\n  {k}={v!r}" for k, v in sorted(self._groups().items()))
        own = super().__repr__().removeprefix("Options(").removesuffix(")")
        return f"Options({own},\n  execution_strategy={self._execution_strategy!r}{inside})"


def options_or_error(options: Any) -> Options:
    """What a program gave as options, or new ones."""
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise Error("poptorch-options", "Invalid type for options", found=type(options).__name__, expected="poptorch.Options")
    return options
