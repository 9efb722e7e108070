"""The interface, row by row: what is here, what is accepted without effect, what is refused. docs/poptorch.md has it as a table
(scripts/write_poptorch_table.py), and a test holds every row against the code. Setters of options say themselves what they do."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from tilework.frontend.surface import HERE, IGNORED, REFUSED, names_table, variables_table
from tilework.frontend.surface import table as markdown

_P = "poptorch"
_E = "poptorch.PoplarExecutor"
# (where, names, status, what to know)
ROWS: list[tuple[str, str, str, str]] = [
    (
        _P,
        "trainingModel inferenceModel PoplarExecutor",
        HERE,
        "compiled at the first call; one native loop makes all updates of a call",
    ),
    (_P, "identity_loss", HERE, "the final loss is found in forward, returned or not"),
    (_P, "Options TensorLocationSettings", HERE, "the setters are below"),
    (_P, "OutputMode ReductionType ConnectionType DataLoaderMode SharingStrategy", HERE, ""),
    (
        _P,
        "BeginBlock Block BlockFunction removeBlocks Stage Phase AutoStage",
        HERE,
        "checked and kept in the artifact; the numbers are those of the plain model",
    ),
    (
        _P,
        "PipelinedExecution ShardedExecution SerialPhasedExecution ParallelPhasedExecution",
        HERE,
        "checked; stages run one after the other",
    ),
    (_P, "DataLoader AsynchronousDataAccessor", HERE, "all three modes; what is asynchronous is loaded ahead by a thread"),
    (_P, "load", HERE, "reads a pickle of the module, as in the original: only for files that you trust"),
    (
        _P,
        "isRunningOnIpu ipuHardwareIsAvailable ipuHardwareVersion",
        HERE,
        "there is no hardware; isRunningOnIpu() is True while forward is traced",
    ),
    (_P, "Error RecoverableError UnrecoverableError", HERE, "also reachable as poptorch_core.Error"),
    (_P, "for_loop cond", HERE, "inference only; loops are written out, both sides of cond are computed"),
    (_P, "serializedMatMul nop dynamic_slice dynamic_update CPU fps nearest", HERE, ""),
    (
        _P,
        "custom_op register_custom_op",
        HERE,
        "operators in C++ for the chip are refused by name; register_custom_op gives them a function of torch operators",
    ),
    (_P, "recomputationCheckpoint", HERE, "what lies between two of them is computed again in the backward pass"),
    (_P, "set_available_memory setAvailableMemory set_overlap_for_input set_overlap_for_output OverlapMode", IGNORED, ""),
    (_P, "MultiConv Attribute NameScope ipu_print_tensor", IGNORED, "arguments are checked"),
    (
        _P,
        "MatMulSerializationMode MeanReductionStrategy SyncPattern Liveness CommGroupType VariableRetrievalMode "
        "HalfFloatCastingBehavior",
        IGNORED,
        "",
    ),
    (_P, "ctc_beam_search_decoder CTCBeamSearchDecoder", REFUSED, "decode on the host"),
    (_P, "setLogLevel", HERE, ""),
    (f"{_P}.profiling", "Channel", HERE, "spans are kept in a list and logged"),
    (
        f"{_P}.optim",
        "SGD Adam AdamW RMSprop LAMB",
        HERE,
        "torch's rules; loss scaling and types of accumulators change nothing in float32",
    ),
    (_E, "compile setOptimizer isCompiled isAttachedToDevice attachToDevice detachFromDevice destroy", HERE, ""),
    (
        _E,
        "copyWeightsToHost copyWeightsToHostIfNeeded copyWeightsToDevice copyNamedBuffersToDevice load_state_dict",
        HERE,
        "implicit copies when weights are read",
    ),
    (
        _E,
        "model options rng_state compilationTime getAnchoredTensor getTensorNames",
        HERE,
        "gradients and updated values of parameters can be anchored",
    ),
    (
        _E,
        "getLatency getComputeLatency getPerfCounters resetPerfCounters getHostIpuLatency getIpuHostLatency",
        HERE,
        "of whole calls; transfers are 0",
    ),
    (_E, "compileAndExport save loadExecutable", HERE, "a zip with the engine's artifact; loadExecutable reads no pickle"),
    (_E, "cycleCount", REFUSED, "use getLatency"),
    (
        "popdist",
        "isPopdistEnvSet getInstanceIndex getNumInstances getNumLocalReplicas getNumTotalReplicas getNumIpusPerReplica "
        "getReplicaIndexOffset init execute_on_instances synchronize finalizeDistributed",
        HERE,
        "",
    ),
    ("popdist.poptorch", "Options", HERE, "replicas and processes are poprun's"),
    (
        "horovod.torch",
        "init rank size local_rank local_size allreduce allreduce_ allgather broadcast broadcast_parameters "
        "broadcast_object Average Sum is_initialized shutdown",
        HERE,
        "a stand-in with the calls that PopTorch programs make; it is not Horovod",
    ),
    ("poptorch_core", "Error RecoverableError UnrecoverableError", HERE, ""),
    (
        "popart",
        "AccumulateOuterFragmentSchedule SubgraphCopyingStrategy SyntheticDataMode RecomputationType TensorStorage "
        "VirtualGraphMode "
        "ReplicatedTensorSharding BatchSerializationBatchSchedule",
        IGNORED,
        "enums for Options._Popart",
    ),
]

# Environment variables (name, status, what to know)
VARIABLES: list[tuple[str, str, str]] = [
    ("POPTORCH_CACHE_DIR", HERE, "compiled code is kept there"),
    ("POPTORCH_LOG_LEVEL", HERE, "TRACE, DEBUG, INFO, WARN, ERR, OFF"),
    ("POPTORCH_DEFAULT_OPTIONS", HERE, "JSON: setters and their values"),
    ("OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK", HERE, "options.Distributed, when Options are made"),
    ("POPTORCH_IPU_MODEL, POPTORCH_WAIT_FOR_IPU, POPLAR_ENGINE_OPTIONS, PVTI_OPTIONS", IGNORED, ""),
]

GROUPS = ("Options", "Training", "Precision", "Distributed", "TensorLocations", "TensorLocationSettings", "Popart", "Jit")


def find(where: str, name: str) -> Any:
    """The object behind a row: of a module, or of a class."""
    module, _, owner = where.rpartition(".")
    if owner[:1].isupper():
        return getattr(getattr(importlib.import_module(module), owner), name)
    return getattr(importlib.import_module(where), name)


def setters() -> list[tuple[str, str, str]]:
    """(setter, status, what it says of itself) of Options and its groups."""
    from . import groups, options

    found = []
    for group in GROUPS:
        kind = options.Options if group == "Options" else getattr(groups, group)
        spelt = {"Options": "", "Popart": "_Popart."}.get(group, f"{group}.")
        for name, value in vars(kind).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                text = " ".join((inspect.getdoc(value) or "").split())
                status = REFUSED if "refused" in text else IGNORED if "no effect here" in text else HERE
                if group in ("TensorLocations", "TensorLocationSettings", "Popart"):
                    status = IGNORED
                found.append((f"{spelt}{name}", status, text.replace("Recorded; it has no effect here.", "").strip()))
    return found


def table() -> str:
    """All tables: names, setters of options, environment variables."""
    rows = [(f"`{name}`", status, note) for name, status, note in setters()]
    options = markdown(("setter", "supported", "note"), rows)
    return f"{names_table(ROWS)}\n\n### Options\n{options}\n\n### Environment variables\n{variables_table(VARIABLES)}"
