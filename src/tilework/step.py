"""Step: what the user gives us. A model, its loss, its optimizer(s) and example inputs; nothing is copied or changed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from .artifact.structure import flatten, unflatten
from .errors import UserError

Loss = Callable[..., torch.Tensor] | int | str | Sequence[int | str] | Literal["auto"] | None


@dataclass(kw_only=True)
class Step:
    """One training step, as the user wrote it.

    inputs   what `model` is called with: a tuple or list gives positional arguments, a dict keyword arguments, anything
             else is the single argument. Shapes are fixed from these examples. An input with requires_grad gets a
             gradient that can be read.
    targets  what `loss` gets after the model's output, if it is a separate function.
    loss     a function or module `loss(output, *targets)`; or the position(s) or name(s) of the loss among the outputs of
             `forward`; or None, if the loss is computed on the host; or "auto": the only scalar that forward returns, or
             the one called loss, or, if there is none, the host.
    optimizer  None (no updates), a torch optimizer, one of tilework.optim, or a list of several.
    """

    model: nn.Module
    inputs: Any
    targets: Any = ()
    loss: Loss = "auto"
    optimizer: Any = None
    clip_norm: float | None = None  # gradient clipping by global norm; after clip_value, where there are both
    clip_value: float | None = None  # gradient clipping by value
    num_micro_batches: int = 1  # gradient accumulation: forward runs this many times per update
    accumulate: Literal["mean", "sum"] = "mean"
    precision: Literal["float32", "bfloat16"] = "float32"
    batch_dim: int | None = 0
    train: bool = True  # False: build inference only, without a backward pass
    name: str = ""  # name of its signature in the artifact; the batch size by default
    examples: Literal["data", "shapes"] = "data"  # shapes: the values of the examples do not matter; valid ones are found
    metadata: Mapping[str, Any] = field(default_factory=dict)  # your own notes, kept in the artifact

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.model, nn.Module):
            problems.append(f"model: found {type(self.model).__name__}, expected a torch.nn.Module")
        elif isinstance(self.model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            problems.append(f"model: found {type(self.model).__name__}, expected the module inside it (model.module)")
        elif isinstance(self.model, torch.jit.ScriptModule) or hasattr(self.model, "_orig_mod"):
            problems.append("model: found a scripted or compiled module, expected the original nn.Module")
        else:
            problems += [f"model: parameter {k} {why}" for k, p in self.model.named_parameters() if (why := _unusable(p))]
        if not isinstance(self.num_micro_batches, int) or self.num_micro_batches < 1:
            problems.append(f"num_micro_batches: found {self.num_micro_batches!r}, expected a whole number, 1 or more")
        if not callable(self.loss) and not (isinstance(self.targets, (tuple, list)) and not self.targets):
            problems.append(
                "targets: given, but loss is not a function that could take them; expected loss=function, or no targets"
            )
        if self.batch_dim is not None and (not isinstance(self.batch_dim, int) or self.batch_dim < 0):
            problems.append(
                f"batch_dim: found {self.batch_dim!r}, expected 0 or more (inputs differ in their number of dimensions), or None"
            )
        if self.accumulate not in ("mean", "sum"):
            problems.append(f"accumulate: found {self.accumulate!r}, expected 'mean' or 'sum'")
        if self.precision not in ("float32", "bfloat16"):
            problems.append(f"precision: found {self.precision!r}, expected 'float32' or 'bfloat16'")
        if isinstance(self.loss, nn.Module) and isinstance(self.model, nn.Module):
            own = {f"loss.{k}" for k, _ in [*self.loss.named_parameters(), *self.loss.named_buffers()]}
            twice = own & {k for k, _ in [*self.model.named_parameters(), *self.model.named_buffers()]}
            problems += [
                f"model: {k} is also a tensor of the loss module; rename the model's attribute 'loss'" for k in sorted(twice)
            ]
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                problems.append(f"{name}: found {value!r}, expected a number above 0, or None")
        for opt in self.optimizers:
            if not isinstance(opt, torch.optim.Optimizer):
                problems.append(f"optimizer: found {type(opt).__name__}, expected a torch.optim.Optimizer")
        if problems:
            raise UserError("step-argument", "the step has wrong fields:\n    " + "\n    ".join(problems))

    @property
    def batch_size(self) -> int | None:
        """Rows of the example inputs: of one micro-batch. None where no input has a batch."""
        tensors = [*flatten(self.inputs)[0], *flatten(self.targets)[0]]
        dim = self.batch_dim
        return next((t.shape[dim] for t in tensors if t.dim() > dim), None) if dim is not None else None

    @property
    def num_rows(self) -> int | None:
        """Rows of one whole step."""
        size = self.batch_size
        return None if size is None else size * self.num_micro_batches

    @property
    def signature_name(self) -> str:
        return self.name or str(self.num_rows or "step")

    def with_rows(self, rows: int, *, train: bool = True) -> Step:
        """The same step for another number of rows: the examples are repeated or cut along the batch. Where accumulation leaves
        no whole number of micro-batches, there is one."""
        size, dim = self.batch_size, self.batch_dim
        if size is None or dim is None:
            raise UserError("step-batch", "other batch sizes need a batch dimension, and the step has none",
                            found="no input with a batch dimension", expected="batch_dim=, and inputs that have it")  # fmt: skip
        micro = rows // size if self.num_micro_batches > 1 and train and rows % size == 0 else 1
        each = rows // micro

        def sized(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() > dim and value.shape[dim] == size:
                picked = value.detach().index_select(dim, torch.arange(each) % size)
                return picked.requires_grad_(value.requires_grad)
            return value

        def all_sized(values: Any) -> Any:
            leaves, structure = flatten(values)
            return unflatten(structure, iter([sized(leaf) for leaf in leaves]))

        inputs = self.inputs if isinstance(self.inputs, (tuple, list, dict)) else (self.inputs,)
        targets = self.targets if isinstance(self.targets, (tuple, list)) else (self.targets,)
        return replace(self, inputs=all_sized(inputs), targets=all_sized(tuple(targets)), num_micro_batches=micro, train=train,
                       name="" if train else f"infer_{rows}")  # fmt: skip

    def autocast(self, *, cache: bool = True) -> torch.autocast:
        """Forward runs under this. It is traced on the host, whatever device it is compiled for."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bfloat16", cache_enabled=cache)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        if self.optimizer is None:
            return []
        return list(self.optimizer) if isinstance(self.optimizer, (list, tuple)) else [self.optimizer]

    @property
    def loss_function(self) -> Callable[..., torch.Tensor] | None:
        return self.loss if callable(self.loss) else None  # type: ignore[return-value]

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """Where parameters have names: the model, and the loss where it is a module of its own."""
        found = [("", self.model)]
        if isinstance(self.loss, nn.Module):
            found.append(("loss.", self.loss))
        return found

    def call_model(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        if isinstance(inputs, (tuple, list)):
            return self.model(*inputs)
        return self.model(inputs)

    def call_loss(self, output: Any, targets: Any) -> torch.Tensor:
        loss = self.loss_function
        assert loss is not None
        if isinstance(targets, (tuple, list)):
            return loss(output, *targets)
        return loss(output, targets)


def _unusable(parameter: torch.Tensor) -> str:
    if isinstance(parameter, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        return "has no shape yet: call the model once before"
    if parameter.device.type not in ("cpu", "meta"):
        return f"is on {parameter.device}: bring the model to the cpu (model.cpu()) before compiling"
    return ""


def as_step(value: Any) -> Step:
    """A Step from what a user's build function returned: a Step, a dict of its fields, or (model, loss, optimizer, inputs).

    In the tuple form the last input is the target where the loss is a separate function.
    """
    if isinstance(value, Step):
        return value
    if isinstance(value, Mapping):
        known = set(inspect.signature(Step).parameters)
        unknown = sorted(set(value) - known)
        missing = sorted({"model", "inputs"} - set(value))
        if unknown or missing:
            raise UserError(
                "step-build",
                "the build function returned a dict that does not describe a step",
                found=f"unknown keys {unknown}, missing keys {missing}",
                expected=f"keys among {sorted(known)}; model and inputs are required",
            )
        return Step(**value)
    if isinstance(value, tuple) and len(value) == 4:
        model, loss, optimizer, inputs = value
        targets: Any = ()
        if callable(loss):
            if not isinstance(inputs, (tuple, list)) or len(inputs) < 2:
                raise UserError(
                    "step-build",
                    "with a separate loss function the example inputs must end with the target",
                    found=f"inputs of type {type(inputs).__name__}",
                    expected="a tuple (input, ..., target)",
                    fix="return tilework.Step(model=..., loss=..., inputs=..., targets=...) to be explicit",
                )
            inputs, targets = tuple(inputs[:-1]), (inputs[-1],)
        return Step(model=model, loss=loss, optimizer=optimizer, inputs=inputs, targets=targets)
    raise UserError(
        "step-build",
        "the build function must return the training step",
        found=type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple) else ""),
        expected="a tilework.Step, a dict of its fields, or a tuple (model, loss, optimizer, inputs)",
    )
