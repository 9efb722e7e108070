"""What apps call around a session: tracing, comparing, seeding."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilework

from ...logging import samba_logger
from ..refusals import say_ignored
from ..sambasession import session
from ..sambatensor import SambaTensor, to_torch


def trace_graph(
    model: Any,
    inputs: Any = None,
    optim: Any = None,
    init_output_grads: bool = True,
    loss_indices: Sequence[int] | None = None,
    pef: str = "",
    mapping: str | None = None,
    data_parallel_mode: str = "normal",
    transfer_device: bool = True,
    *more: Any,
    optimizers: Any = None,
    config_dict: Mapping[str, Any] | None = None,
    squeeze_bs_dim: bool = False,
    **ignored: Any,
) -> tuple[SambaTensor, ...]:
    """Loads the PEF, checks that it fits, moves the weights to the device. Returns the traced outputs, which are also the
    model's `output_tensors`. Without a PEF, what this process compiled for the model is used."""
    if isinstance(model, argparse.Namespace):  # very old: trace_graph(args, model, inputs, optimizer)
        args, model, inputs, optim = model, inputs, optim, init_output_grads if not isinstance(init_output_grads, bool) else None
        pef = getattr(args, "pef", "") or pef
        session.args = argparse.Namespace(**{**vars(session.args), **vars(args)})
    say_ignored("trace_graph", {k: v for k, v in ignored.items() if v not in (None, False)})
    if mapping is not None:
        session.args.mapping = mapping
    return session.trace(model, inputs, optim if optim is not None else optimizers, pef or None, transfer_device, loss_indices)


def trace_multigraph(model: nn.Module, inputs: Any, trace_prefix: str = "", **ignored: Any) -> Any:
    """What the model returns for inputs of these shapes, in its own structure: for FwdGraph(inputs, outputs, name)."""
    say_ignored("trace_multigraph", {k: v for k, v in ignored.items() if v not in (None, False)})
    return session.trace_graph_of(model, inputs, trace_prefix)


def compile(*args: Any, **kwargs: Any) -> str:
    """Old name of samba.session.compile."""
    return session.compile(*args, **kwargs)


def set_seed(seed: int) -> None:
    """Of torch, numpy, random and the device. SAMBA_SEED overrides it."""
    session.set_seed(seed)


def get_file_dir(file: str) -> str:
    return str(Path(file).resolve().parent)


def assert_close(
    a: Any,
    b: Any,
    name: str = "",
    threshold: float | None = None,
    rtol: float | None = None,
    visualize: bool = False,
    **_: Any,
) -> None:
    """AssertionError where the mean absolute difference is above threshold + rtol x the mean size. Says what it found."""
    x, y = (to_torch(t).detach().to(torch.float64) for t in (a, b))
    if x.shape != y.shape:
        raise AssertionError(f"{name}: shapes differ: {list(x.shape)} and {list(y.shape)}")
    args = session.args
    if threshold is None:
        threshold = getattr(args, "absolute_numeric_threshold", None)
    if rtol is None:
        rtol = getattr(args, "relative_numeric_threshold", None)
    if threshold is None and rtol is None:
        threshold, rtol = 1e-4, 1e-3
    same = torch.eq(x, y) | (x.isnan() & y.isnan())
    difference = torch.where(same, 0.0, (x - y).abs())
    found = float(difference.mean()) if difference.numel() else 0.0
    limit = (threshold or 0.0) + (rtol or 0.0) * (float(y.abs().mean()) if y.numel() else 0.0)
    largest = float(difference.max()) if difference.numel() else 0.0
    text = f"{name or 'tensors'}: mean absolute difference {found:.3g} (largest {largest:.3g})"
    if not found <= limit:
        raise AssertionError(f"{text}, more than {limit:.3g}")
    print(f"{text}, within {limit:.3g}")


def init_output_grads(
    output_tensors: Any,
    unspecified_tensor_grad: Sequence[float] = (),
    customized_tensors_dict: Mapping[str, Any] | None = None,
    is_variable_batch_size: bool = False,
) -> None:
    """What backward starts from, for each output: given by name, else ones."""
    custom = customized_tensors_dict or {}
    for i, output in enumerate(output_tensors if isinstance(output_tensors, (list, tuple)) else [output_tensors]):
        given = custom.get(output.sn_name)
        fill = unspecified_tensor_grad[i] if i < len(unspecified_tensor_grad) else 1.0
        output.sn_grad = (
            to_torch(given) if given is not None else torch.full(tuple(output.shape), float(fill), dtype=output.dtype)
        )


def weight_norm_(module: nn.Module, name: str = "weight", dim: int = 0) -> nn.Module:
    """torch's weight normalisation, in place."""
    normed: nn.Module = torch.nn.utils.weight_norm(module, name, dim)
    return normed


class SNType(Enum):
    FLOAT32 = torch.float32
    BFLOAT16 = torch.bfloat16
    INT64 = torch.int64
    INT32 = torch.int32
    INT16 = torch.int16


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    short = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "float": "float32", "int": "int32"}
    found = getattr(torch, short.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise tilework.UserError("sambaflow-dtype", f"no dtype {name!r}", expected="float32, bfloat16, int64, int32, int16, ...")
    return found


def fix_rdu_affinity(*_: Any, **__: Any) -> None:
    samba_logger.info("fix_rdu_affinity has no meaning here and is ignored", log_limit=1)


def create_mac_resource_report(*_: Any, **__: Any) -> None:
    samba_logger.info("create_mac_resource_report has no meaning here and is ignored", log_limit=1)
