"""Options as JSON, as a file of setter calls, and from the environment. Nothing of them is run as code: values are literals and
enums of the interface by name."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import torch

from tilework.errors import did_you_mean

from . import enums
from .errors import Error, WrongValue
from .values import Values


class ConfigFileError(Error):
    """A line of an options file that cannot be used."""


def _setter(options: Any, dotted: str) -> Any:
    """The bound method that a dotted name means."""
    *path, name = dotted.split(".")
    target = options
    for part in path:
        target = vars(target).get(part)
        if not isinstance(target, Values):
            raise WrongValue("poptorch-config", f"no group of options {part!r}", found=dotted,
                             expected=did_you_mean(part, options._groups()))  # fmt: skip
    found = None if name.startswith("_") else getattr(type(target), name, None)
    if not callable(found):
        known = [n for n in dir(type(target)) if not n.startswith("_")]
        raise WrongValue("poptorch-config", f"no setter {dotted!r}", expected=did_you_mean(name, known))
    return getattr(target, name)


def _value(value: Any) -> Any:
    """Enums may be written as text: ConnectionType.OnDemand."""
    if isinstance(value, str) and value.count(".") == 1:
        kind, member = value.split(".")
        if kind == "torch" and member in ("half", "float16", "float", "float32"):
            return getattr(torch, member)
        found = getattr(enums, kind, None)
        if isinstance(found, type) and member in getattr(found, "__members__", {}):
            return found[member]  # type: ignore[index]
    return value


def apply_json(options: Any, settings: Any) -> None:
    if not isinstance(settings, dict):
        raise WrongValue("poptorch-config", "options as JSON", found=type(settings).__name__, expected="an object")
    for name, value in settings.items():
        arguments = value if isinstance(value, list) else [value]
        _setter(options, name)(*map(_value, arguments))


def environment(options: Any) -> None:
    """POPTORCH_DEFAULT_OPTIONS."""
    text = os.environ.get("POPTORCH_DEFAULT_OPTIONS", "")
    if text:
        try:
            settings = json.loads(text)
        except json.JSONDecodeError as e:
            raise WrongValue("poptorch-config", "POPTORCH_DEFAULT_OPTIONS is not JSON", found=str(e)) from e
        apply_json(options, settings)


def apply_lines(options: Any, path: Path) -> None:
    try:
        lines = path.read_text().splitlines()
    except OSError as e:
        raise ConfigFileError("poptorch-config", f"{path}: this file cannot be read", found=str(e)) from e
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        try:
            _call(options, text)
        except Exception as e:
            raise ConfigFileError("poptorch-config", f"{path}:{number}: this line cannot be used", found=f"{text}: {e}",
                                  expected="a setter with its arguments: deviceIterations(4)") from e  # fmt: skip


def _call(options: Any, text: str) -> None:
    text = text.removeprefix("options.").removeprefix("opts.").removeprefix(".")
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call):
        raise WrongValue("poptorch-config", "not a call")
    _setter(options, ast.unparse(call.func))(
        *map(_argument, call.args), **{str(k.arg): _argument(k.value) for k in call.keywords}
    )


# What a value may be made with: poptorch.Stage("a", "b").ipu(1), poptorch.TensorLocationSettings().useOnChipStorage(False).
_MADE = ("PipelinedExecution", "ShardedExecution", "SerialPhasedExecution", "ParallelPhasedExecution", "Stage", "Phase",
         "TensorLocationSettings")  # fmt: skip


def _argument(node: ast.expr) -> Any:
    if isinstance(node, ast.Attribute):
        return _value(ast.unparse(node).removeprefix("poptorch."))
    if isinstance(node, ast.Call):
        return _maker(node.func)(*map(_argument, node.args), **{str(k.arg): _argument(k.value) for k in node.keywords})
    if isinstance(node, ast.List):
        return [_argument(item) for item in node.elts]
    return ast.literal_eval(node)


def _maker(node: ast.expr) -> Any:
    import poptorch

    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and not node.attr.startswith("_"):
        return getattr(_argument(node.value), node.attr)
    name = ast.unparse(node).removeprefix("poptorch.")
    if name not in _MADE:
        raise WrongValue("poptorch-config", f"{name} cannot be called here", expected=did_you_mean(name, _MADE))
    return getattr(poptorch, name)
