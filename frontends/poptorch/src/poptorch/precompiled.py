"""Compiled models as files: a zip with the engine's artifact, facts as JSON and, where the module is asked for, what torch.save
writes. Only poptorch.load reads that last part, which is a pickle, as the interface demands; loadExecutable does not."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from . import optimizers
from .device import recomputes
from .enums import ConnectionType, OutputMode
from .errors import Error
from .executor import PoplarExecutor, version
from .options import Options

PROGRAM, FACTS, OPERATORS, MODULE = "model.pef", "poptorch.json", "operators.txt", "module.pt"


def path_of(filename: str | Path) -> Path:
    path = Path(filename)
    return path / "model.poptorch" if path.is_dir() else path


def write(executor: PoplarExecutor, filename: str | Path, *, export_model: bool, save_rng_state: bool) -> None:
    program = executor._path
    if program is None:
        raise Error("poptorch-export", "You must run the model or call compile() before it can be saved")
    path = path_of(filename)
    facts = {**executor._facts, "random": executor._random_state() if save_rng_state else None}
    operators = "\n".join(facts.pop("operators"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.write(program, PROGRAM)
        file.writestr(FACTS, json.dumps(facts, indent=1))
        file.writestr(OPERATORS, operators, zipfile.ZIP_DEFLATED)
        if export_model:
            file.writestr(MODULE, _module(executor))


def _module(executor: PoplarExecutor) -> bytes:
    buffer = io.BytesIO()
    with executor._plain():
        try:
            optimizer = executor._held.for_a_file(executor._device, executor._traced)
            torch.save({"model": executor.model, "options": executor.options, "optimizer": optimizer}, buffer)
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
            facts["operators"] = file.read(OPERATORS).decode().split("\n")
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
    if options.connection_type == ConnectionType.Never:  # compiled without a device, to be run where there is one: here
        options.connectionType(ConnectionType.Always)
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    executor = PoplarExecutor(model, options, training=saved["optimizer"] is not None, optimizer=saved["optimizer"])
    executor.loadExecutable(filename)
    return executor


# ---- was a file compiled from the same? ----


def described(executor: PoplarExecutor, micro: Sequence[Tensor] | None = None, operators: Sequence[str] = ()) -> dict[str, Any]:
    """What a program depends on. The inputs and what forward computes are known at the first call."""
    options, batches = executor.options, executor._batches
    form: dict[str, Any] = {
        "deviceIterations": batches.iterations,
        "replicationFactor": batches.replicas,
        "outputMode": batches.mode.name + (f", {batches.period}" if batches.mode == OutputMode.EveryN else ""),
        "anchorTensor": sorted(long_name for long_name, *_ in options.anchored_tensors.values()),
    }
    optimizer = None
    if executor._training:
        form |= {
            "Training.gradientAccumulation": batches.accumulation,
            "Training.accumulationAndReplicationReductionType": options.Training.accumulation_and_replication_reduction_type.name,
            "_Popart autoRecomputation": recomputes(options),
        }
        optimizer = optimizers.form_of(executor._optimizer, optimizers.names_of(executor.model)).facts()
    found = {
        "version": version(),
        "training": executor._training,
        "options": options.toDict(),
        "form": form,
        "optimizer": optimizer,
    }
    if micro is not None:
        found |= {"inputs": [f"{t.dtype} {list(t.shape)}" for t in micro], "operators": list(operators)}
    return found


def require_same(own: dict[str, Any], facts: dict[str, Any], program: Path) -> None:
    """Error where a file is not of this model, these options and this optimizer."""
    if facts["training"] != own["training"]:
        kinds = {True: "training", False: "inference"}
        raise _another("for another kind of executor", kinds[own["training"]], kinds[facts["training"]])
    for name, value in own["form"].items():
        if facts["form"].get(name) != value:
            raise _another(f"with another option {name}", value, facts["form"].get(name))
    if own["optimizer"] is not None:
        new, old = optimizers.Form(**own["optimizer"]), optimizers.Form(**facts["optimizer"])
        found = optimizers.another_form(new, old, is_whole=True)
        found = found or optimizers.another_value(new, old, optimizers.program_values(program))
        if found is not None:
            raise _another(f"with another optimizer: another {found[0]}", found[1], found[2])
    if "inputs" not in own:
        return
    if own["inputs"] != facts["inputs"]:
        raise _another("for other inputs", ", ".join(own["inputs"]), ", ".join(facts["inputs"]))
    for i, (ours, theirs) in enumerate(itertools.zip_longest(own["operators"], facts["operators"], fillvalue="no more"), 1):
        if ours != theirs:
            raise _another("from another model: forward computes something else", f"operator {i}: {ours}", theirs)


def _another(what: str, found: Any, expected: Any) -> Error:
    return Error("poptorch-export", f"the file was compiled {what}", found=str(found), expected=f"{expected}, as in the file",
                 fix="use what the file was made with; or compile anew: call destroy() and then the model")  # fmt: skip


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Operators(TorchDispatchMode):
    """Around a run of forward: a line for each operator, with its operands by name. Two models whose lines are the same compute
    the same, but for the values of parameters and buffers. Random numbers are the same in every such run."""

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._names: Any = WeakIdKeyDictionary()
        self._count = 0
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if not name.startswith("_"):  # tensors that are no buffers are compiled in, with their values
                    self._names |= {t: f"{path}.{name} {_digest(t)}" for t in tree_leaves(value) if isinstance(t, Tensor)}
        for name, t in optimizers.parameters_of(model).items():
            self._names[t] = name
        for name, t in model.named_buffers():
            self._names[t] = f"buffer {name}"
        for i, t in enumerate(inputs):
            self._names[t] = f"input {i}"

    def __enter__(self) -> Any:
        self._random = torch.get_rng_state()
        torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_rng_state(self._random)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [self._word(a) for a in args] + [f"{k}={self._word(v)}" for k, v in (kwargs or {}).items()]
        if str(func).startswith("aten.lift_fresh"):
            operands = [f"constant {_digest(args[0])}"]
        self.lines.append(f"{func}({', '.join(operands)})")
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t not in self._names:
                self._count += 1
                self._names[t] = f"%{self._count}"
        return result

    def _word(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return str(self._names.get(value) or f"{value.dtype} {list(value.shape)}")
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._word, value))}]"
        return repr(value) if value is None or isinstance(value, _PLAIN) else type(value).__name__


def _digest(t: Tensor) -> str:
    """Of a dense tensor: its type, its shape and its values."""
    found = hashlib.sha256(f"{t.dtype} {list(t.shape)}".encode())
    if t.layout == torch.strided and t.device.type != "meta":
        found.update(t.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
