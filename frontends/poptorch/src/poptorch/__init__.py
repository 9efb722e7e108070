"""PopTorch's names on Tilework: programs that were written for an IPU run on the cores that this machine has.

This package translates: names, arguments and conventions go to tilework's Step, compile and Session. It has no engine of its own.
docs/poptorch.md says what there is and what differs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from tilework.errors import not_the_users

from . import optim, profiling
from .accessor import AsynchronousDataAccessor
from .blocks import BeginBlock, Block, BlockFunction, removeBlocks
from .dataloader import DataLoader
from .enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from .errors import Error, RecoverableError, UnrecoverableError
from .executor import PoplarExecutor, version
from .groups import TensorLocationSettings
from .logs import setLogLevel
from .losses import identity_loss
from .ops import (
    CPU,
    Attribute,
    CTCBeamSearchDecoder,
    MultiConv,
    NameScope,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    ipu_print_tensor,
    ipuHardwareIsAvailable,
    ipuHardwareVersion,
    isRunningOnIpu,
    nearest,
    nop,
    recomputationCheckpoint,
    register_custom_op,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
    setAvailableMemory,
)
from .options import Options, options_or_error
from .precompiled import load
from .strategies import ParallelPhasedExecution, Phase, PipelinedExecution, SerialPhasedExecution, ShardedExecution, Stage

not_the_users.append(str(Path(__file__).parent) + os.sep)
__version__ = version()

__all__ = [
    "CPU",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CTCBeamSearchDecoder",
    "CommGroupType",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "nearest",
    "nop",
    "optim",
    "profiling",
    "recomputationCheckpoint",
    "register_custom_op",
    "removeBlocks",
    "serializedMatMul",
    "setAvailableMemory",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "trainingModel",
]


def trainingModel(model: nn.Module, options: Options | None = None, optimizer: Any = None) -> PoplarExecutor:
    """The model with its optimizer (SGD with lr 0.01 by default), to be called with batches. One call makes
    options.deviceIterations updates."""
    options = options_or_error(options)
    if optimizer is None and isinstance(model, nn.Module):
        optimizer = optim.SGD(model.parameters(), lr=0.01)
    return PoplarExecutor(model, options, training=True, optimizer=optimizer)


def inferenceModel(model: nn.Module | PoplarExecutor, options: Options | None = None) -> PoplarExecutor:
    """The model without a loss and an optimizer."""
    options = options_or_error(options)
    model = model.model if isinstance(model, PoplarExecutor) else model
    return PoplarExecutor(model, options, training=False)
