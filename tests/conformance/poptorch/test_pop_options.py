"""Options: what can be read back, what is refused, and the forms that they come in."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import popart
import poptorch
from poptorch.optionfiles import ConfigFileError
from poptorch.options import Options

SETTERS = [
    ("deviceIterations", (4,), "device_iterations", 4),
    ("replicationFactor", (2,), "replication_factor", 2),
    ("randomSeed", (42,), "random_seed", 42),
    ("outputMode", (poptorch.OutputMode.All,), "output_mode", poptorch.OutputMode.All),
    ("autoRoundNumIPUs", (), "auto_round_num_ipus", True),
    ("autoRoundNumIPUs", (False,), "auto_round_num_ipus", False),
    ("enableSyntheticData", (True,), "enable_synthetic_data", True),
    ("connectionType", (poptorch.ConnectionType.OnDemand,), "connection_type", poptorch.ConnectionType.OnDemand),
    ("useOfflineIpuTarget", (), "connection_type", poptorch.ConnectionType.Never),
    ("useIpuModel", (True,), "use_model", True),
    ("useIpuId", (3,), "ipu_id", 3),
    ("logDir", ("logs",), "log_dir", "logs"),
    ("modelName", ("net",), "model_name", "net"),
    ("maxRepeatLogs", (9,), "max_repeat_logs", 9),
    ("logCycleCount", (True,), "log_cycle_count", True),
    ("enableStableNorm", (True,), "stable_norm", True),
    ("enableProfiling", ("p",), "profile_dir", "p"),
    ("enableExecutableCaching", ("cache",), "executable_cache_dir", "cache"),
    ("enableExecutableCaching", (None,), "executable_cache_dir", ""),
    ("showCompilationProgressBar", (False,), "show_compilation_progress_bar", False),
    ("relaxOptimizerAttributesChecks", (), "relax_optimizer_checks", True),
    ("updatableNamedBuffers", (["a"],), "updatable_named_buffers", ["a"]),
    ("broadcastBuffers", (False,), "broadcast_buffers", False),
    ("disableModuleNamescope", (), "module_namescope_enabled", False),
    ("sourceLocationExcludes", (["x"],), "source_location_excludes", ["x"]),
    ("appendToLocationExcludes", ("x", "y"), "source_location_excludes", ["x", "y"]),
    ("setAvailableMemoryProportion", ({"IPU0": 0.2},), "available_memory_proportion", {"IPU0": 0.2}),
    ("syncPattern", (poptorch.SyncPattern.SinglePipeline,), "sync_pattern", poptorch.SyncPattern.SinglePipeline),
]  # fmt: skip


@pytest.mark.parametrize(("setter", "arguments", "name", "value"), SETTERS, ids=lambda v: str(v)[:24])
def test_a_setter_returns_the_options_and_can_be_read(setter, arguments, name, value) -> None:
    opts = poptorch.Options()
    assert getattr(opts, setter)(*arguments) is opts
    assert getattr(opts, name) == value and opts.exists(name)


GROUPED = [
    ("Training", "gradientAccumulation", (8,), "gradient_accumulation", 8),
    ("Training", "accumulationAndReplicationReductionType", (poptorch.ReductionType.Sum,),
     "accumulation_and_replication_reduction_type", poptorch.ReductionType.Sum),
    ("Training", "setAutomaticLossScaling", (True,), "auto_loss_scaling", True),
    ("Training", "setConvolutionDithering", (True,), "convolution_dithering", True),
    ("Training", "setMeanAccumulationAndReplicationReductionStrategy", (poptorch.MeanReductionStrategy.Running,),
     "mean_reduction_strategy", poptorch.MeanReductionStrategy.Running),
    ("Precision", "setPartialsType", (torch.half,), "partials_type", torch.half),
    ("Precision", "enableStochasticRounding", (True,), "enable_stochastic_rounding", True),
    ("Precision", "enableFloatingPointExceptions", (True,), "enable_floating_point_exceptions", True),
    ("TensorLocations", "numIOTiles", (32,), "num_io_tiles", 32),
    ("_Popart", "set", ("outlineThreshold", 10.0), "outlineThreshold", 10.0),
    ("_Popart", "set", ("s", int(popart.SubgraphCopyingStrategy.JustInTime)), "s", 1),
    ("_Popart", "setPatterns", ({"A": False},), "patterns", {"A": False}),
    ("Jit", "traceModel", (True,), "trace_model", True),
]  # fmt: skip


@pytest.mark.parametrize(("group", "setter", "arguments", "name", "value"), GROUPED, ids=lambda v: str(v)[:24])
def test_a_setter_of_a_group(group, setter, arguments, name, value) -> None:
    target = getattr(poptorch.Options(), group)
    assert getattr(target, setter)(*arguments) is target
    assert getattr(target, name) == value


@pytest.mark.parametrize("kind", ["Activation", "Weight", "Optimizer", "Accumulator"])
def test_locations_of_tensors(kind: str) -> None:
    opts = poptorch.Options()
    settings = poptorch.TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    getattr(opts.TensorLocations, f"set{kind}Location")(settings)
    assert getattr(opts.TensorLocations, f"location_{kind.lower()}").replicated_tensor_sharding is True
    with pytest.raises(AssertionError):
        getattr(opts.TensorLocations, f"set{kind}Location")("off chip")


WRONG = [
    (lambda o: o.deviceIterations(0), AssertionError),
    (lambda o: o.deviceIterations("4"), AssertionError),
    (lambda o: o.deviceIterations(2.0), AssertionError),
    (lambda o: o.replicationFactor(-1), AssertionError),
    (lambda o: o.Training.gradientAccumulation(0), AssertionError),
    (lambda o: o.randomSeed("7"), AssertionError),
    (lambda o: o.outputMode("All"), AssertionError),
    (lambda o: o.outputMode(poptorch.OutputMode.EveryN), AssertionError),
    (lambda o: o.outputMode(poptorch.OutputMode.EveryN, 0), AssertionError),
    (lambda o: o.logDir(3), AssertionError),
    (lambda o: o.useIpuModel("yes"), AssertionError),
    (lambda o: o.setAvailableMemoryProportion({"GPU0": 0.1}), AssertionError),
    (lambda o: o.setAvailableMemoryProportion({0: 0.1}), AssertionError),
    (lambda o: o.Precision.setPartialsType(torch.int32), ValueError),
    (lambda o: o.Precision.enableStochasticRounding(1), AssertionError),
    (lambda o: o.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.NoReduction), ValueError),
    (lambda o: o.TensorLocations.numIOTiles(33), AssertionError),
    (lambda o: o.TensorLocations.numIOTiles(400), AssertionError),
    (lambda o: o.Distributed.configureProcessId(2, 2), AssertionError),
    (lambda o: o.setExecutionStrategy("pipelined"), AssertionError),
    (lambda o: o._Popart.set(3, 4), AssertionError),
    (lambda o: o._Popart.setPatterns({}, 9), AssertionError),
    (lambda o: o.inputReplicaGrouping(2), poptorch.Error),
    (lambda o: setattr(o, "unheard_of", 1), AssertionError),
    (lambda o: setattr(o, "unheard_of", 1), AttributeError),
    (lambda o: o.unheard_of, AttributeError),
    (lambda o: o.Training.unheard_of, AttributeError),
    (lambda o: setattr(o, "Training", 3), RuntimeError),
    (lambda o: setattr(o, "device_iterations", "many"), AssertionError),
]


@pytest.mark.parametrize(("act", "kind"), WRONG, ids=range(len(WRONG)))
def test_what_is_refused(act, kind) -> None:
    """As Python's own kind of error, and as poptorch.Error, with what to do."""
    opts = poptorch.Options()
    before = repr(opts)
    with pytest.raises(kind) as caught:
        act(opts)
    assert isinstance(caught.value, poptorch.Error) and "tilework explain poptorch-" in str(caught.value)
    assert repr(opts) == before


def test_the_output_mode_by_default() -> None:
    opts = poptorch.Options()
    assert opts.defaultOutputMode()
    assert not opts.outputMode(poptorch.OutputMode.Sum).defaultOutputMode()


def test_the_random_seed_is_torchs_as_well() -> None:
    poptorch.Options().randomSeed(99)
    a = torch.rand(3)
    torch.manual_seed(99)
    assert torch.equal(a, torch.rand(3))


@pytest.mark.parametrize("change", [
    lambda o: o.deviceIterations(2), lambda o: o.Training.gradientAccumulation(2), lambda o: o._Popart.set("a", 1),
    lambda o: o.Precision.setPartialsType(torch.half), lambda o: o.Distributed.disable(), lambda o: setattr(o, "log_dir", "x"),
    lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()), lambda o: o.TensorLocations.numIOTiles(32),
    lambda o: o.anchorTensor("a", "b"), lambda o: o.deleteIfExists("log_dir"),
])  # fmt: skip
def test_frozen_once_used(change) -> None:
    opts = poptorch.Options()
    poptorch.inferenceModel(torch.nn.Linear(2, 2), opts)
    with pytest.raises(AttributeError, match=r"^Can't modify frozen Options"):
        change(opts)
    for free in (opts.clone(), copy.deepcopy(opts)):
        change(free)


def test_an_executor_keeps_options_of_its_own() -> None:
    opts = poptorch.Options().deviceIterations(3)
    executor = poptorch.inferenceModel(torch.nn.Linear(2, 2), opts)
    assert executor.options.device_iterations == 3 and executor.options is not opts
    with pytest.raises(AttributeError, match="frozen"):
        executor.options.deviceIterations(1)


def test_clones_are_deep() -> None:
    opts = poptorch.Options().setAvailableMemoryProportion({"IPU0": 0.1})
    other = opts.clone()
    other.Training.gradientAccumulation(5)
    other.available_memory_proportion["IPU1"] = 0.5
    assert opts.Training.gradient_accumulation == 1 and "IPU1" not in opts.available_memory_proportion


def test_equal_settings_have_equal_texts() -> None:
    def made() -> Options:
        opts = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.All)
        opts.Training.gradientAccumulation(3)
        opts._Popart.set("b", 1).set("a", 2)
        return opts

    assert repr(made()) == repr(made()) != repr(made().deviceIterations(4))
    other = made()
    other.Precision.enableStochasticRounding(True)
    assert repr(other) != repr(made())
    for word in ("device_iterations=2", "gradient_accumulation=3", "Precision(", "TensorLocations(", "PipelinedExecution("):
        assert word in repr(made())


def test_as_a_dict() -> None:
    opts = poptorch.Options().deviceIterations(2)
    found = json.loads(json.dumps(opts.toDict()))
    assert found["device_iterations"] == 2 and found["Training"]["gradient_accumulation"] == 1
    assert found["output_mode"] == "OutputMode.Default"


def test_from_json() -> None:
    text = json.dumps(
        {
            "deviceIterations": 4,
            "Training.gradientAccumulation": 2,
            "connectionType": "ConnectionType.OnDemand",
            "outputMode": ["OutputMode.EveryN", 2],
            "_Popart.set": ["key", 3],
            "Precision.setPartialsType": "torch.half",
        }
    )
    opts = poptorch.Options().from_json(text)
    assert (opts.device_iterations, opts.Training.gradient_accumulation, opts.output_return_period) == (4, 2, 2)
    assert opts.connection_type == poptorch.ConnectionType.OnDemand and opts._Popart.key == 3
    assert opts.Precision.partials_type == torch.half


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"noSuchSetter": 1}', '{"Nothing.here": 1}', '{"deviceIterations": "x"}', '{"_freeze": 1}']
)
def test_wrong_json(text: str) -> None:
    with pytest.raises((ValueError, AssertionError)):
        poptorch.Options().from_json(text)


def test_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 7, "Training.gradientAccumulation": 3}')
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/tmp/somewhere")
    opts = poptorch.Options()
    assert (opts.device_iterations, opts.Training.gradient_accumulation) == (7, 3)
    assert opts.executable_cache_dir == "/tmp/somewhere"


def test_processes_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    opts = poptorch.Options()
    assert (opts.Distributed.numProcesses, opts.Distributed.processId) == (4, 2)
    opts.Distributed.disable()
    assert (opts.Distributed.numProcesses, opts.Distributed.processId) == (1, 0)


def test_from_a_file(tmp_path) -> None:
    path = tmp_path / "options.conf"
    path.write_text(
        "# a comment\ndeviceIterations(4)\n\nTraining.gradientAccumulation(2)  # and another\n"
        "outputMode(poptorch.OutputMode.All)\n_Popart.set('key', [1, 2])\nsetAvailableMemoryProportion({'IPU0': 0.3})\n"
    )
    opts = poptorch.Options()
    assert opts.loadFromFile(path) is opts
    assert (opts.device_iterations, opts.Training.gradient_accumulation, opts._Popart.key) == (4, 2, [1, 2])
    assert opts.output_mode == poptorch.OutputMode.All


def test_strategies_and_settings_in_a_file(tmp_path) -> None:
    path = tmp_path / "options.conf"
    path.write_text(
        "setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage('a').ipu(1), poptorch.Stage('b')))\n"
        "TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))\n"
    )
    opts = poptorch.Options().loadFromFile(path)
    expected = poptorch.Options().setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.Stage("a").ipu(1), poptorch.Stage("b"))
    )
    expected.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    assert repr(opts) == repr(expected)
    path.write_text("setExecutionStrategy(poptorch.ShardedExecution())")
    assert isinstance(poptorch.Options().loadFromFile(path)._execution_strategy, poptorch.ShardedExecution)


@pytest.mark.parametrize(
    "line",
    [
        "setExecutionStrategy(poptorch.load('x'))",
        "setExecutionStrategy(poptorch.Stage('a').__class__())",
        "deviceIterations(0)",
        "noSuch(1)",
        "deviceIterations",
        "import os",
        "deviceIterations(__import__('os'))",
        "Training.nothing()",
        "deviceIterations(1",
        "_set('device_iterations', 3)",
    ],
)
def test_a_wrong_line(tmp_path, line: str) -> None:
    path = tmp_path / "options.conf"
    path.write_text("deviceIterations(2)\n" + line + "\n")
    with pytest.raises(ConfigFileError, match=r"options\.conf:2") as caught:
        poptorch.Options().loadFromFile(path)
    assert isinstance(caught.value, poptorch.Error)


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(ConfigFileError, match="cannot be read"):
        poptorch.Options().loadFromFile(tmp_path / "nothing")


@pytest.mark.parametrize("make", [poptorch.trainingModel, poptorch.inferenceModel])
@pytest.mark.parametrize("wrong", [{}, 3, "options", poptorch.TensorLocationSettings()], ids=str)
def test_something_else_as_options(make, wrong) -> None:
    with pytest.raises(poptorch.Error, match="Invalid type for options"):
        make(torch.nn.Linear(2, 2), wrong)


def test_the_errors_of_the_native_part_are_the_same() -> None:
    import poptorch_core

    assert poptorch_core.Error is poptorch.Error
    with pytest.raises(poptorch_core.Error, match=r"^mine$"):
        raise poptorch.Error("mine")


@pytest.mark.parametrize(
    "name",
    [
        "AccumulateOuterFragmentSchedule.OverlapMemoryOptimized",
        "SubgraphCopyingStrategy.JustInTime",
        "SyntheticDataMode.RandomNormal",
        "RecomputationType.Pipeline",
        "TensorStorage.OffChip",
        "VirtualGraphMode.Manual",
        "ReplicatedTensorSharding.On",
        "BatchSerializationBatchSchedule.Isomorphic",
    ],
)
def test_popart_has_the_enums_that_programs_pass(name: str) -> None:
    kind, member = name.split(".")
    opts = poptorch.Options()
    opts._Popart.set("key", int(getattr(getattr(popart, kind), member)))
    assert isinstance(opts._Popart.key, int)


def test_popart_itself_is_not_here() -> None:
    with pytest.raises(AttributeError, match="only the enums"):
        _ = popart.Builder


def test_a_misspelt_setter() -> None:
    with pytest.raises(poptorch.Error, match="did you mean 'deviceIterations'"):
        poptorch.Options().deviceIteration(2)
    with pytest.raises(AttributeError, match="did you mean 'gradientAccumulation'"):
        poptorch.Options().Training.gradientAcumulation(2)
