"""A program's optimizer as the engine takes it, and its values and state in PopTorch's words."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import tilework

from . import optim
from .errors import Error
from .logs import logger

_KINDS: tuple[type, ...] = (tilework.optim.AdamW, tilework.optim.RMSprop, tilework.optim.LAMB, torch.optim.SGD, torch.optim.AdamW,
                            torch.optim.Adam, torch.optim.RMSprop)  # fmt: skip
# Moments of parameters of 16 bits are float32, as on the device.
_WIDE: dict[type, Any] = {kind: kind for kind in (tilework.optim.AdamW, tilework.optim.RMSprop, tilework.optim.LAMB)}
_WIDE |= {getattr(torch.optim, name): getattr(tilework.optim, name) for name in ("Adam", "AdamW", "RMSprop")}
_OURS = (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB)
_FIRST, _SECOND, _THIRD = "Accl1___", "Accl2___", "Accl3___"
_STATE = {"exp_avg": _FIRST, "exp_avg_sq": _SECOND, "momentum_buffer": "Accl___", "square_avg": _FIRST, "grad_avg": _THIRD}
_VALUES = {"lr": "learningRate", "weight_decay": "weightDecay", "momentum": "momentum1", "dampening": "dampening1", "eps":
           "eps", "alpha": "alpha", "beta1": "beta1", "beta2": "beta2"}  # fmt: skip
_RATE = {"sgd": "scaledLearningRate0"}


def kind_of(optimizer: Any) -> type:
    found = next((k for k in _KINDS if isinstance(optimizer, k)), None)
    if found is None:
        names = "torch.optim.SGD, Adam, AdamW and RMSprop, and those of poptorch.optim"
        raise Error("poptorch-optimizer", "Unsupported optimizer type. Types supported " + names,
                    found=f"{type(optimizer).__module__}.{type(optimizer).__name__}")  # fmt: skip
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) and any(g.get("amsgrad") for g in optimizer.param_groups):
        raise Error("poptorch-optimizer", "Only non-amsgrad Adam/AdamW optimizers are supported.")
    if type(optimizer) not in (*_KINDS, *_OURS):
        warnings.warn(
            "Poptorch does not run Python optimizer code directly. Instead, compiled optimizer code runs on the "
            "device: "
            f"{type(optimizer).__name__} is used as the {found.__name__} that it is made from.",
            stacklevel=4,
        )
    return found


def twin(optimizer: Any) -> torch.optim.Optimizer:
    """The same parameters and values in a plain optimizer: what the program has put around its own is not run."""
    kind = kind_of(optimizer)
    groups = [{**g, "params": list(g["params"])} for g in optimizer.param_groups]
    wide = _WIDE.get(kind)
    if wide is not None and any(p.dtype in (torch.float16, torch.bfloat16) for g in groups for p in g["params"]):
        made: torch.optim.Optimizer = wide([{**g, "wide_state": True} for g in groups], lr=1e-3)
    else:
        made = kind(groups, lr=1e-3)
    made.state.update(optimizer.state)
    return made


def label(optimizer: Any) -> str:
    """How the log names it."""
    group, kind = optimizer.param_groups[0], kind_of(optimizer)
    name = kind.__name__.upper() if kind is not torch.optim.SGD else "SGD1"
    if group.get("bias_correction", True) is False:
        name += "_NO_BIAS"
    return name + ("_CENTERED" if group.get("centered") else "")


def values_of(optimizer: Any) -> dict[str, float]:
    """Hyperparameters by the engine's names."""
    found: dict[str, float] = {}
    for i, group in enumerate(optimizer.param_groups):
        values = {k: v for k, v in group.items() if k not in ("params", "betas") and isinstance(v, (int, float, Tensor))}
        if "betas" in group:
            values["beta1"], values["beta2"] = group["betas"]
        found |= {f"opt0.g{i}.{k}": float(v) for k, v in values.items() if not isinstance(v, bool)}
    norm = getattr(optimizer, "max_grad_norm", None)
    return found if norm is None else {**found, "clip_norm": float(norm)}


def require_alike(optimizer: Any, compiled: Any, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Errors where setOptimizer was given what the compiled update cannot take."""
    if kind_of(optimizer) is not kind_of(compiled):
        raise Error(
            "poptorch-optimizer",
            "setOptimizer: another type of optimizer than was compiled",
            found=type(optimizer).__name__,
            expected=type(compiled).__name__,
            fix="call destroy() and wrap the model again",
        )
    if len(optimizer.param_groups) != len(compiled.param_groups):
        raise Error("poptorch-optimizer", "setOptimizer: another number of parameter groups than was compiled",
                    found=str(len(optimizer.param_groups)), expected=str(len(compiled.param_groups)))  # fmt: skip
    attributes = getattr(compiled, "variable_attrs", None)
    if attributes is None:
        return
    for name in sorted({*before, *after}):
        bare = name.rsplit(".", 1)[-1]
        bare = "betas" if bare.startswith("beta") else "max_grad_norm" if bare == "clip_norm" else bare
        if before.get(name) != after.get(name) and bare in attributes._known and attributes.isConstant(bare):
            raise Error("poptorch-optimizer", f"The optimizer's attribute {bare!r} was constant at compile time and cannot "
                                              f"be changed",
                        found=f"{before.get(name)} -> {after.get(name)}", fix=f"give {bare}= to the optimizer's "
                                                                              f"constructor, or call "
                        f"optimizer.variable_attrs.markAsVariable({bare!r}) before the compile")  # fmt: skip


def warn_of_unknown(optimizer: Any, said: set[Any]) -> None:
    """Attributes that the compiled update knows nothing of: those of schedulers, mostly."""
    fresh = kind_of(optimizer)([{"params": [torch.zeros(1)]}], lr=1e-3)
    known = {
        *vars(fresh),
        "variable_attrs",
        "loss_scaling",
        "velocity_scaling",
        "max_grad_norm",
        "use_combined_accum",
        "_state_of",
        "_loaded",
        "_opt_called",
        "velocity_accum_type",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
    }
    lists = [("optimizer", [k for k in vars(optimizer) if k not in known])]
    lists += [(f"group {i}", [k for k in g if k not in fresh.param_groups[0]]) for i, g in enumerate(optimizer.param_groups)]
    for where, unknown in lists:
        if unknown and (where, tuple(unknown)) not in said:
            said.add((where, tuple(unknown)))
            logger.warning(f"Ignoring unexpected {where} attribute in {label(optimizer)} optimizer: {unknown}")


def ipu_state(tensors: Mapping[str, Tensor], manifest: Any, hyper: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, values) under PopTorch's keys. `tensors`: state/PARAMETER/NAME, with model. before each parameter."""
    state: dict[str, Any] = {}
    for name, t in tensors.items():
        _, _, path = name.partition("/")
        parameter, _, what = path.rpartition("/")
        if what in _STATE:
            state[_STATE[what] + parameter.removeprefix("model.")] = t
        elif what == "step":
            state[f"Step___{parameter}"] = t
    values: dict[str, Any] = {"lossScaling_FLOAT": torch.tensor(1.0)}
    for group in manifest.groups:
        for name, value in hyper.items():
            prefix, _, bare = name.rpartition(".")
            if prefix == group.prefix and bare in _VALUES:
                word = _RATE.get(group.rule, _VALUES[bare]) if bare == "lr" else _VALUES[bare]
                for p in group.params:
                    values[f"{word}___specific___{p.removeprefix('model.')}"] = torch.tensor(value)
    return state, values


def engine_state(state: Mapping[str, Any], names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way: for the engine's own names of state."""
    found = {}
    for name in names:
        _, _, path = name.partition("/")
        parameter, _, what = path.rpartition("/")
        key = _STATE.get(what, "") + parameter.removeprefix("model.") if what in _STATE else f"Step___{parameter}"
        if key in state:
            found[name] = torch.as_tensor(state[key])
    return found
