"""Compiled models as files: a zip with the engine's artifact, facts as JSON and, where the module is asked for, what torch.save
writes. Only poptorch.load reads that last part, which is a pickle, as the interface demands; loadExecutable does not."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import Error
from .executor import PoplarExecutor, version
from .options import Options

PROGRAM, FACTS, MODULE = "model.pef", "poptorch.json", "module.pt"


def path_of(filename: str | Path) -> Path:
    path = Path(filename)
    return path / "model.poptorch" if path.is_dir() else path


def write(executor: PoplarExecutor, filename: str | Path, *, export_model: bool, save_rng_state: bool) -> None:
    program = executor._path
    if program is None:
        raise Error("poptorch-export", "You must run the model or call compile() before it can be saved")
    path = path_of(filename)
    facts = {"version": version(), "training": executor._training, "options": executor.options.toDict(),
             "random": executor._random_state() if save_rng_state else None}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.write(program, PROGRAM)
        file.writestr(FACTS, json.dumps(facts, indent=1))
        if export_model:
            file.writestr(MODULE, _module(executor))


def _module(executor: PoplarExecutor) -> bytes:
    buffer = io.BytesIO()
    with executor._plain():
        try:
            torch.save({"model": executor.model, "options": executor.options, "optimizer": executor._optimizer}, buffer)
        except Exception as e:
            raise Error(
                "poptorch-export",
                "the module cannot be pickled",
                found=str(e)[:200],
                fix="export_model=False saves the program alone; wrap the module again and call loadExecutable()",
            ) from e
    return buffer.getvalue()


def read(filename: str | Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The program, unpacked into `folder`, and the facts."""
    path = path_of(filename)
    try:
        with zipfile.ZipFile(path) as file:
            facts = json.loads(file.read(FACTS))
            (folder / PROGRAM).write_bytes(file.read(PROGRAM))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as e:
        raise Error("poptorch-export", f"{path}: this is not a compiled PopTorch model", found=str(e),
                    expected="a file of compileAndExport() or save()") from e  # fmt: skip
    if facts.get("version") != version():
        raise Error("poptorch-export", f"{path}: this file was made by another version", found=str(facts.get("version")),
                    expected=version(), fix="compile again")  # fmt: skip
    return folder / PROGRAM, facts


def load(filename: str | Path, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """The model, wrapped and compiled, with the weights and the optimizer that it was saved with. Reads a pickle: only for files
    that you trust."""
    path = path_of(filename)
    try:
        with zipfile.ZipFile(path) as file:
            data = file.read(MODULE)
    except KeyError:
        raise Error("poptorch-export", f"{path}: the module is not in this file: it was saved with export_model=False",
                    fix="wrap the module again and call loadExecutable()") from None  # fmt: skip
    except (OSError, zipfile.BadZipFile) as e:
        raise Error("poptorch-export", f"{path}: this is not a compiled PopTorch model", found=str(e)) from e
    saved = torch.load(io.BytesIO(data), weights_only=False)
    model: nn.Module = saved["model"]
    options = saved["options"].clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = PoplarExecutor(model, options, training=saved["optimizer"] is not None, optimizer=saved["optimizer"])
    executor.loadExecutable(filename)
    return executor
