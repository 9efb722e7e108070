"""samba.session.compile: from a model, inputs and optimizers, as an app gives them, to a tilework.Step and a file."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import tilework
from tilework.artifact.structure import flatten

from ..logging import samba_logger
from .conversion import plain
from .distributed import replicas_asked
from .logfiles import log_files
from .sambatensor import SambaTensor, to_torch

METADATA = "sambaflow"  # the key of the artifact's metadata below which all of ours is
_LOSS_WORDS = ("Loss", "CrossEntropy", "KlDiv")  # in the names of autograd's nodes


def as_call(inputs: Any) -> Any:
    """What the model is called with: a tuple, or a dict. Apps give tuples, lists, dicts or a bare tensor."""
    if isinstance(inputs, Mapping):
        return {k: _plain(v) for k, v in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(_plain(v) for v in inputs)
    return (_plain(inputs),)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            to_torch(value).detach().requires_grad_(value.requires_grad)
            if value.is_floating_point()
            else to_torch(value).detach()
        )
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(v) for v in value)
    return value


def leaves(inputs: Any) -> list[Any]:
    """The tensors among the inputs, in order."""
    found: list[Any] = flatten(inputs if isinstance(inputs, (tuple, list, Mapping)) else (inputs,))[0]
    return found


def batch_dim_of(inputs: Any) -> int:
    return next((t.batch_dim for t in leaves(inputs) if isinstance(t, SambaTensor) and t.batch_dim is not None), 0)


def accumulation(model: nn.Module, call: Any, count: int, dim: int, losses: Sequence[int]) -> Literal["mean", "sum"]:
    """How the losses of micro-batches make the loss of the batch: told by trying both on the examples."""
    first = [losses[0]] if losses else []
    whole = _evaluated(model, call, first)
    parts = [_evaluated(model, _part(call, count, dim, i), first) for i in range(count)]
    if not whole or whole[0].dim() > 0:  # a loss for every element: backward adds them all up
        return "sum"
    total = torch.stack([p[0] for p in parts]).double()
    near = [abs(float(whole[0]) - float(total.mean())), abs(float(whole[0]) - float(total.sum()))]
    return "sum" if near[1] < near[0] else "mean"


def _evaluated(model: nn.Module, call: Any, which: Sequence[int]) -> list[Tensor]:
    training = {m: m.training for m in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), plain(model):
            outputs = flatten(model(**call) if isinstance(call, Mapping) else model(*call))[0]
    finally:
        for module, mode in training.items():
            module.training = mode
    return [outputs[i] for i in which]


def losses_of(model: nn.Module, call: Any, loss_indices: Sequence[int] | None) -> list[int]:
    """Which outputs backward starts from: those named; else the scalars and what a loss function returned; else all."""
    if loss_indices is not None:
        asked: list[int] = [loss_indices] if isinstance(loss_indices, int) else list(loss_indices)
        if not all(isinstance(i, int) for i in asked):
            raise tilework.UserError(
                "loss-position", "loss_indices", found=repr(asked), expected="positions of outputs: 0, 1, ..."
            )
        return asked
    state = torch.get_rng_state()
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    with torch.enable_grad(), plain(model):
        outputs = flatten(model(**call) if isinstance(call, Mapping) else model(*call))[0]
    torch.set_rng_state(state)
    with torch.no_grad():
        for k, b in model.named_buffers():
            b.copy_(buffers[k])
    able = [i for i, o in enumerate(outputs) if o.requires_grad and o.is_floating_point()]
    likely = [i for i in able if outputs[i].dim() == 0 or any(w in _source(outputs[i]) for w in _LOSS_WORDS)]
    feeding = _feeding(outputs, likely)
    if feeding:
        samba_logger.warning(f"outputs {feeding} are part of another loss that is returned with them, and count twice: "
                             "detach them in forward, or name the losses with loss_indices=", log_limit=1)  # fmt: skip
    return likely or able


def _feeding(outputs: Sequence[Tensor], losses: Sequence[int]) -> list[int]:
    """Losses from which another loss is computed."""
    nodes = {outputs[i].grad_fn: i for i in losses if outputs[i].grad_fn is not None}
    found: set[int] = set()
    for i in losses:
        stack, seen = [outputs[i].grad_fn], set[Any]()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if nodes.get(node, i) != i:
                found.add(nodes[node])
            stack += [following for following, _ in node.next_functions]
    return sorted(found)


def _source(output: Tensor) -> str:
    return output.grad_fn.name() if output.grad_fn is not None else ""


def make_step(
    model: nn.Module,
    inputs: Any,
    optimizers: Any,
    args: Namespace,
    *,
    loss_indices: Sequence[int] | None = None,
    inference: bool = False,
    metadata: Mapping[str, Any] | None = None,
    run: bool = True,
) -> tilework.Step:
    """The examples' values mean nothing: apps give random numbers for classes, tokens and probabilities. `run`: find such as the
    model runs on, and with them its losses; without, the step is only for comparing it with a PEF."""
    if not isinstance(model, nn.Module):
        raise tilework.UserError(
            "sambaflow-model", "this is not a model", found=type(model).__name__, expected="a torch.nn.Module"
        )
    call, dim = as_call(inputs), batch_dim_of(inputs)
    several = [] if optimizers is None else list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if int(getattr(args, "batch_size", 1) or 0) < 1 or any(t.numel() == 0 for t in leaves(call)):
        raise tilework.UserError("sambaflow-batch", "an empty batch cannot be compiled",
                                 found=f"batch size {getattr(args, 'batch_size', None)}", expected="1 or more")  # fmt: skip
    micro = 1 if inference else num_micro_batches(args, leaves(call), dim)  # nothing accumulates in a forward pass
    precision: Literal["bfloat16", "float32"] = "bfloat16" if _wants_bf16(args) else "float32"
    if run:
        call = runnable(model, call, dim, train=not inference, precision=precision)
    whole = call
    if micro > 1:
        call = _part(call, micro, dim, 0)
    norms = {n for o in several if (n := getattr(o, "max_grad_norm", None))}
    if len(norms) > 1:
        raise tilework.UserError("sambaflow-clipping", "the optimizers have different max_grad_norm", found=str(sorted(norms)),
                                 expected="one global norm for all", fix="give all of them the same max_grad_norm")  # fmt: skip
    notes = {
        "args": _jsonable(vars(args)),
        "modules": {k: type(m).__name__ for k, m in model.named_modules()},
        "frozen": [k for k, p in model.named_parameters() if not p.requires_grad],
        "code": {"python": list(sys.version_info[:2]), "digest": code_digest(model)},
        "inputs": [getattr(t, "sn_name", None) for t in leaves(inputs)],
        "inference": inference,
        **_jsonable(dict(metadata or {})),
    }
    if inference:
        loss: Any = None
        several = []
    else:
        loss = losses_of(model, call, loss_indices)
        if several and not loss:
            raise tilework.UserError("loss-gradient", "there is an optimizer, but nothing to train",
                                     found="no output of the model depends on a parameter that requires a gradient",
                                     fix="check that forward detaches nothing and not all parameters are frozen, or "
                                         "compile with --inference")  # fmt: skip
    return tilework.Step(
        model=model,
        inputs=call,
        loss=loss,
        optimizer=several or None,
        clip_norm=norms.pop() if norms and several else None,
        num_micro_batches=micro,
        accumulate=accumulation(model, whole, micro, dim, loss) if micro > 1 and run else "mean",
        precision=precision,
        batch_dim=dim,
        train=not inference,
        examples="data" if run else "shapes",
        metadata={METADATA: notes},
    )


def runnable(model: nn.Module, call: Any, dim: int, *, train: bool, precision: Literal["bfloat16", "float32"] = "float32") -> Any:
    """Inputs of the same shapes, with values on which the model runs: their own where it does."""
    step = tilework.Step(
        model=model, inputs=call, loss=None, batch_dim=dim, precision=precision, train=train, examples="shapes"
    )  # fmt: skip
    with plain(model):
        return tilework.settled(step).inputs


def num_micro_batches(args: Namespace, tensors: Sequence[Tensor], dim: int) -> int:
    """-mb: the batch is divided into micro-batches of this size, whose gradients add up to one update."""
    size = getattr(args, "microbatch_size", None)
    batch = next((t.shape[dim] for t in tensors if t.dim() > dim), 1)
    if not size or size >= batch:
        return 1
    if batch % size:
        raise tilework.UserError("sambaflow-microbatch", "the batch is not a whole number of micro-batches",
                                 found=f"batch {batch}, micro-batch {size}", fix="choose -mb so that it divides -b")  # fmt: skip
    return batch // int(size)


def _part(value: Any, count: int, dim: int, i: int) -> Any:
    """The i-th of `count` micro-batches."""
    if isinstance(value, Tensor):
        if value.dim() <= dim:
            return value
        size = value.shape[dim] // count
        return value.narrow(dim, i * size, size).detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {k: _part(v, count, dim, i) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_part(v, count, dim, i) for v in value)
    return value


def code_digest(model: nn.Module) -> str:
    """Of what the model's own modules are made of and do: their settings, and the code of their forward. Where it is another one
    than at compile time, the graph is looked at (matching.py)."""
    found = hashlib.sha256()
    for path, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items()
                    if not k.startswith("_") and k not in ("training", "name") and _plain_setting(v)}  # fmt: skip
        code = getattr(type(module).forward, "__code__", None)
        found.update(repr((path, type(module).__name__, sorted(settings.items()), _code(code))).encode())
    return found.hexdigest()


def _plain_setting(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain_setting, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _code(code: Any) -> Any:
    if code is None:
        return None
    constants = [_code(c) if hasattr(c, "co_code") else repr(c) for c in code.co_consts]
    return code.co_code.hex(), code.co_names, constants


def _wants_bf16(args: Namespace) -> bool:
    preset = str(getattr(args, "graphamp_preset", None) or "mp0").lower()
    return preset not in ("mp0", "none", "default", "off", "fp32") or bool(getattr(args, "enable_mixed_precision_ops", None))


def _options(device: str | None = None, num_replicas: int = 1) -> tilework.Options:
    """Room for momentum, because hyperparam_dict may bring some; gradients are kept, because sn_grad may be read."""
    device = device or os.environ.get("TILEWORK_DEVICE", "cpu")
    return tilework.Options(device=device, keep_momentum=True, keep_gradients=True, num_replicas=num_replicas)


def planned(step: tilework.Step, device: str) -> Any:
    with plain(step.model):
        return tilework.plan_step(step, _options(device))


def compile_to(
    step: tilework.Step | Sequence[tilework.Step],
    path: Path,
    report: Any = lambda _: None,
    *,
    device: str | None = None,
    batch_sizes: Sequence[int] = (),
    num_replicas: int = 1,
) -> tilework.Compiled:
    first = step if isinstance(step, tilework.Step) else step[0]
    train, infer = (batch_sizes, ()) if first.train else ((), batch_sizes)
    with plain(first.model):
        return tilework.compile(  # type: ignore[attr-defined]
            step, path, options=_options(device, num_replicas), batch_sizes=train, infer_batch_sizes=infer, weights="none",
            report=report,
        )  # fmt: skip


def batch_sizes_of(args: Namespace, step: tilework.Step) -> list[int]:
    """--batch-sizes, with the size of the examples first; for inference only the others."""
    asked = getattr(args, "batch_sizes", None) or []
    others = [n for n in dict.fromkeys(asked) if n != step.num_rows]
    if not asked or step.num_rows is None or not step.train:
        return others  # without a batch, the engine says what is wrong
    return [step.num_rows, *others]


def write_pef(args: Namespace, name: str, make: Callable[[], tilework.Step | list[tilework.Step]]) -> Path:
    """Everything between a step, which `make` gives, and a file: logs beside it, and the lines that users look for."""
    path, replicas = pef_path(args, name), replicas_asked(args)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".samba.log").touch()
    except OSError as e:
        raise tilework.UserError("sambaflow-folder", f"{path.parent}: this folder cannot be written to", found=str(e),
                                 fix="choose another --output-folder") from e  # fmt: skip
    with log_files(path) as report:
        step = make()
        sizes = batch_sizes_of(args, step) if isinstance(step, tilework.Step) else []
        report(str(compile_to(step, path, report, batch_sizes=sizes, num_replicas=replicas)))
    print(f"[info   ] PEF file {path.resolve()} created", flush=True)
    return path


def pef_path(args: Namespace, name: str) -> Path:
    """-p names the file; else <output-folder>/<pef-name>/<pef-name>.pef; without a name, time and process make one."""
    if getattr(args, "command", None) == "compile" and getattr(args, "pef", None):
        return Path(args.pef)
    folder = Path(getattr(args, "output_folder", None) or "out")
    chosen = getattr(args, "pef_name", None)
    if chosen and ("/" in chosen or chosen in (".", "..")):
        raise tilework.UserError("sambaflow-folder", "--pef-name is a name, not a path", found=chosen,
                                 fix="the folder is --output-folder; -p names a whole path")  # fmt: skip
    chosen = chosen or f"{name}_{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"
    return folder / chosen / f"{chosen}.pef"


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_jsonable(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
