"""A program's optimizer as the engine takes it, and its values and state in PopTorch's words."""

from __future__ import annotations

import collections
import functools
import json
import warnings
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilework
from tilework.frontend.optimizers import parameters_of as parameters_of

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


def _kind(optimizer: Any) -> type | None:
    return next((k for k in _KINDS if isinstance(optimizer, k)), None)


def kind_of(optimizer: Any) -> type:
    """Which of torch's or ours it is, of those that can be compiled."""
    found = _kind(optimizer)
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
    made.state.update(copied(optimizer.state))  # a compile makes steps with it
    return made


def copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    copies = {p: {k: t.clone() if isinstance(t, Tensor) else t for k, t in s.items()} for p, s in state.items()}
    return collections.defaultdict(dict, copies)


def label(optimizer: Any) -> str:
    """How the log names it."""
    group, kind = optimizer.param_groups[0], kind_of(optimizer)
    name = kind.__name__.upper() if kind is not torch.optim.SGD else "SGD1"
    if group.get("bias_correction", True) is False:
        name += "_NO_BIAS"
    return name + ("_CENTERED" if group.get("centered") else "")


@functools.cache
def _fresh(kind: Any) -> dict[str, Any]:
    """The attributes that a group of such an optimizer has by itself."""
    found: dict[str, Any] = kind([{"params": [torch.zeros(1)]}], lr=1e-3).param_groups[0]
    return found


def values_of(optimizer: Any) -> dict[str, float]:
    """Hyperparameters by the engine's names."""
    found: dict[str, float] = {}
    known = {*_fresh(_kind(optimizer))} - {"params", "betas"}
    for i, group in enumerate(optimizer.param_groups):
        values = {k: v for k, v in group.items() if k in known and isinstance(v, (int, float, Tensor))}
        if "betas" in group:
            values["beta1"], values["beta2"] = group["betas"]
        found |= {f"opt0.g{i}.{k}": float(v) for k, v in values.items() if not isinstance(v, bool)}
    norm = getattr(optimizer, "max_grad_norm", None)
    return found if norm is None else {**found, "clip_norm": float(norm)}


# ---- what is compiled of it ----

_EAGER = ("foreach", "capturable", "differentiable", "fused", "wide_state")  # how eager PyTorch computes: nothing to compile


@dataclass(frozen=True)
class Form:
    """An optimizer as a compile sees it. Of all this, only values that the program takes at run time can change afterwards."""

    kind: str
    groups: list[dict[str, Any]]  # parameters (name -> whether it is trained) and switches (nesterov ...) of each
    values: dict[str, float]

    def facts(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)


def names_of(model: nn.Module) -> dict[int, str]:
    """id of a parameter -> its name."""
    return {id(p): name for name, p in parameters_of(model).items()}


def form_of(optimizer: Any, names: Mapping[int, str]) -> Form:
    kind: Any = _kind(optimizer)
    switches = {k: v for k, v in _fresh(kind).items() if isinstance(v, bool) and k not in _EAGER}
    with torch._C.DisableTorchFunctionSubclass():  # requires_grad of a wrapped model's parameter would copy its weights
        groups = [
            {"parameters": {names[id(p)]: p.requires_grad for p in group["params"] if id(p) in names},
             "switches": {k: bool(group.get(k, default)) for k, default in switches.items()}}
            for group in optimizer.param_groups
        ]  # fmt: skip
    return Form(f"{kind.__module__}.{kind.__name__}", groups, values_of(optimizer))


def program_values(program: Path) -> frozenset[str]:
    """The hyperparameters that a compiled program takes at run time."""
    with zipfile.ZipFile(program) as file:
        return frozenset(json.loads(file.read("manifest.json"))["hyperparameters"])


Difference = tuple[str, str, str] | None  # what, found, expected


def another_form(new: Form, old: Form, *, is_whole: bool = False) -> Difference:
    """Where the update that was compiled for `old` is not that of `new`, whatever their values. is_whole: a parameter that both
    have, and that only one of them trains, is a difference too."""
    if new.kind != old.kind:
        return "type of optimizer", new.kind, old.kind
    if len(new.groups) != len(old.groups):
        return "number of parameter groups", str(len(new.groups)), str(len(old.groups))
    for i, (ours, theirs) in enumerate(zip(new.groups, old.groups, strict=True)):
        trained, before = ({k for k, v in group["parameters"].items() if v} for group in (ours, theirs))
        there = trained if is_whole else set(ours["parameters"])
        if before - there or trained - before:
            lacks, more = ", ".join(sorted(before - there)), ", ".join(sorted(trained - before))
            found = [*([f"without {lacks}"] if lacks else []), *([f"with {more}"] if more else [])]
            return f"set of parameters in group {i}", "; ".join(found), ", ".join(sorted(before)) or "none"
        for name, value in ours["switches"].items():
            if value != theirs["switches"].get(name):
                return f"{name} in group {i}", str(value), str(theirs["switches"].get(name))
    return None


def another_value(new: Form, old: Form, variable: Collection[str]) -> Difference:
    """A value that is in the program, and not among those that it takes at run time."""
    for name in sorted({*new.values, *old.values}):
        found_value, expected = new.values.get(name), old.values.get(name)
        if found_value != expected and (name not in variable or found_value is None):
            return _bare(name), str(found_value), str(expected)
    return None


def _bare(name: str) -> str:
    bare = name.rsplit(".", 1)[-1]
    return "betas" if bare.startswith("beta") else "max_grad_norm" if bare == "clip_norm" else bare


def require_variable(attributes: Any, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    """Attributes that poptorch.optim has as constant do not change."""
    for name in sorted({*before, *after}) if attributes is not None else ():
        bare = _bare(name)
        if before.get(name) != after.get(name) and bare in attributes._known and attributes.isConstant(bare):
            raise Error("poptorch-optimizer", f"The optimizer's attribute {bare!r} was constant at compile time and cannot "
                                              f"be changed",
                        found=f"{before.get(name)} -> {after.get(name)}", fix=f"give {bare}= to the optimizer's "
                                                                              f"constructor, or call "
                        f"optimizer.variable_attrs.markAsVariable({bare!r}) before the compile")  # fmt: skip


def warn_of_unknown(optimizer: Any, said: set[Any]) -> None:
    """Attributes that the compiled update knows nothing of: those of schedulers, mostly."""
    kind: Any = _kind(optimizer)
    fresh = kind([{"params": [torch.zeros(1)]}], lr=1e-3)
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
    known_in_group = {*_fresh(kind), *optim.NO_EFFECT}
    lists = [("optimizer", [k for k in vars(optimizer) if k not in known])]
    lists += [(f"group {i}", [k for k in g if k not in known_in_group]) for i, g in enumerate(optimizer.param_groups)]
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


def engine_state(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way: the engine's own state, whole. What `state` does not have starts at zero."""
    found, used, lost = {}, set[str](), []
    for name, t in tensors.items():
        kind, _, path = name.partition("/")
        parameter, _, what = path.rpartition("/")
        if kind != "state":
            continue
        key = _STATE[what] + parameter.removeprefix("model.") if what in _STATE else f"Step___{parameter}"
        used.add(key)
        found[name] = torch.as_tensor(state[key]).clone() if key in state else torch.zeros_like(t)
        lost += [key] if key not in state else []
    if state and lost:
        logger.warning(f"The optimizer's state that was loaded has no {', '.join(lost[:8])}: it starts at zero")
    if more := [key for key in state if key not in used]:
        logger.warning(f"Ignoring parts of the optimizer's state that this program has no use for: {', '.join(more[:8])}")
    return found
