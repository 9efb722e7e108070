"""From what the user passes to a call to the flat, dense tensors that the driver copies: every mismatch is listed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artifact.graph import DTYPES, dtype_name
from ..artifact.manifest import Argument, Signature
from ..artifact.structure import Structure, flatten
from ..errors import TileworkWarning, UserError, did_you_mean
from ..tiles.page import COPY, Slot


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _reorder(value: Any, structure: Structure) -> Any:
    """Dicts in the order of keys that they were compiled with."""
    kind, *rest = structure
    if kind == "dict" and isinstance(value, dict) and set(value) <= set(rest[0]):
        return {k: _reorder(value[k], item) for k, item in rest[0].items() if k in value}
    if kind in ("tuple", "list") and isinstance(value, (tuple, list)) and len(value) == len(rest):
        return tuple(_reorder(v, item) for v, item in zip(value, rest, strict=True))
    return value


def _constants(structure: Structure) -> list[Any]:
    """The plain values among nested inputs, in order."""
    kind, *rest = structure
    if kind == "value":
        return [rest[0]]
    if kind == "leaf":
        return []
    return [v for item in (rest[0].values() if kind == "dict" else rest) for v in _constants(item)]


def _check_names(value: dict[str, Any], structure: Structure) -> None:
    """UserError that lists every wrong, missing and superfluous key where inputs are given as a dict."""
    kind, *rest = structure
    if kind != "dict":
        return
    known = rest[0]
    needed = {k for k, item in known.items() if item[0] != "value"}
    problems = [f"{k}: not an input; {did_you_mean(k, known)}" for k in value if k not in known]
    problems += [f"{k}: missing" for k in sorted(needed - set(value))]
    if problems:
        raise UserError("input-names", "the inputs have different names than at compile time:\n    " + "\n    ".join(problems))


def in_order(args: tuple[Any, ...], structure: Structure) -> tuple[Any, ...]:
    """The arguments of a call, with all dicts in the order of keys that they were compiled with."""
    if len(args) == 1 and isinstance(args[0], dict):
        return (_reorder(args[0], structure[1]),)
    if len(args) == 2 and isinstance(args[0], (dict, tuple, list)):
        return (_reorder(args[0], structure[1]), _reorder(args[1], structure[2]))
    return tuple(_reorder(a, s) for a, s in zip(args, structure[1][1:], strict=False)) + args[len(structure[1]) - 1 :]


def flat_inputs(args: tuple[Any, ...], expected: list[Argument], structure: Structure) -> list[Tensor]:
    """The input tensors in order. `args` may be nested as at compile time, or flat."""
    if args and isinstance(args[0], dict):
        _check_names(args[0], structure[1])
    if args:
        args = in_order(args, structure)
    leaves, given = flatten(args, _is_leaf)
    fixed, values = _constants(["tuple", *structure[1:]]), _constants(given)
    if len(values) == len(fixed) and values != fixed:
        raise UserError("input-mismatch", "a number, string or None among the inputs differs from what was compiled in",
                        found=str(values), expected=str(fixed), fix="compile again with the other value")  # fmt: skip
    if len(leaves) != len(expected):
        wanted = ", ".join(f"{a.name} {a.type.dtype}{a.type.shape}" for a in expected)
        raise UserError(
            "input-count", "wrong number of input tensors",
            found=f"{len(leaves)}: " + ", ".join(f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for v in leaves),
            expected=f"{len(expected)}: {wanted}",
        )  # fmt: skip
    return [torch.as_tensor(leaf) for leaf in leaves]


def by_name(signature: Signature, args: tuple[Any, ...], named: dict[str, Any], *, infer: bool = False) -> tuple[Any, ...]:
    """The inputs of run(**batch): the model's keywords as they were compiled, or the arguments by their names."""
    kind, *rest = signature.input_structure[1]
    if kind == "dict" and not args:
        model, others = {k: v for k, v in named.items() if k in rest[0]}, {k: v for k, v in named.items() if k not in rest[0]}
        _check_names(model, signature.input_structure[1])
        targets = _in_order(signature.inputs[signature.num_model_inputs :], others) if others else ()
        return (model, targets) if targets else (model,)
    expected = signature.inputs[: signature.num_model_inputs] if infer else signature.inputs
    return (*args, *_in_order(expected[len(flatten(args, _is_leaf)[0]) :], named))


def _in_order(expected: Sequence[Argument], named: dict[str, Any]) -> tuple[Any, ...]:
    names = [a.name for a in expected]
    problems = [f"{k}: not an input; {did_you_mean(k, names)}" for k in named if k not in names]
    problems += [f"{k}: missing" for k in names if k not in named]
    if problems:
        raise UserError("input-names", "the inputs have different names than at compile time:\n    " + "\n    ".join(problems))
    return tuple(named[k] for k in names)


def _cast(name: str, value: Tensor, dtype: torch.dtype, told: set[tuple[str, torch.dtype]]) -> Tensor | None:
    """The value in the dtype that was compiled, where that is the same kind of number; or else None. A warning, once, where
    digits are lost."""
    whole = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    if value.is_floating_point() and dtype.is_floating_point:
        narrower = dtype.itemsize < value.dtype.itemsize
    elif whole and not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool:
        limits, narrower = torch.iinfo(dtype), dtype.itemsize < value.dtype.itemsize
        if value.numel() and (int(value.min()) < limits.min or int(value.max()) > limits.max):
            return None
    else:
        return None
    if narrower and (name, value.dtype) not in told:
        told.add((name, value.dtype))
        warnings.warn(
            f"input {name} is {dtype_name(value.dtype)} and is cast to {dtype_name(dtype)} in each call",
            TileworkWarning,
            stacklevel=6,
        )
    return value.to(dtype)


class InputPlan:
    """What the inputs of one kind of call must be; turns the caller's tensors into dense ones with `count` slices."""

    def __init__(
        self,
        expected: list[Argument],
        structure: Structure,
        count: int,
        batch_dim: int | None,
        page: Slot,
        places: tuple[str, ...] = ("cpu",),
    ) -> None:
        """`places`: where the device can read a caller's tensor."""
        self._page, self._places = page, places
        self._told: set[tuple[str, torch.dtype]] = set()  # inputs of another width that were warned of
        self.expected, self.structure, self.count, self.batch_dim = expected, structure, count, batch_dim
        self.types = [(DTYPES[a.type.dtype], torch.Size(_whole_shape(tuple(a.type.shape), count, batch_dim))) for a in expected]
        self.num_inputs, self.dtypes, self.shapes = len(expected), [d for d, _ in self.types], [s for _, s in self.types]
        # An input without a batch is the same for every micro-batch of a call.
        self.shared = [
            count > 1 and shape == torch.Size(a.type.shape) for a, (_, shape) in zip(expected, self.types, strict=True)
        ]
        # Slices follow each other in the caller's own memory: it can be used as it is.
        self.in_order = count == 1 or batch_dim == 0

    def take(self, args: tuple[Any, ...]) -> Sequence[Tensor]:
        """Tensors of the right type that lie dense in memory are taken as they are; anything else goes the long way."""
        if self.in_order and len(args) == self.num_inputs:
            for value, dtype, shape in zip(args, self.dtypes, self.shapes):  # noqa: B905  (lengths are equal, and time counts)
                if not (
                    isinstance(value, Tensor)
                    and value.dtype is dtype
                    and value.shape == shape
                    and value.is_contiguous()
                    and (value.is_cpu or value.device.type in self._places)
                    and not value.is_neg()
                ):
                    break
            else:
                return args
        with self._page.during(COPY):
            return self._long_way(flat_inputs(args, self.expected, self.structure))

    def of_step(self, taken: Sequence[Tensor], step: int, steps: int) -> Sequence[Tensor]:
        """What `take` gave for `steps` steps, for one of them."""
        if steps == 1:
            return taken
        return [t if shared else t.chunk(steps)[step] for t, shared in zip(taken, self.shared, strict=True)]

    def _long_way(self, leaves: list[Tensor]) -> list[Tensor]:
        """Lists every wrong shape and dtype; makes what is right dense, one slice a micro-batch."""
        problems, found = [], []
        count, batch_dim = self.count, self.batch_dim
        for value, argument, (dtype, whole), shared in zip(leaves, self.expected, self.types, self.shared, strict=True):
            if value.device.type not in self._places or value.layout != torch.strided:
                places = " or ".join(self._places)
                problems.append(
                    f"{argument.name}: is on {value.device} ({value.layout}), expected a dense tensor on the {places}"
                )
                continue
            if value.dtype != dtype and (converted := _cast(argument.name, value.detach(), dtype, self._told)) is not None:
                value = converted
            elif value.dtype != dtype:
                problems.append(f"{argument.name}: dtype is {dtype_name(value.dtype)}, expected {argument.type.dtype}")
            value = value.detach().resolve_neg().resolve_conj()
            if value.shape != whole:
                problems.append(f"{argument.name}: shape is {list(value.shape)}, expected {list(whole)}")
            elif shared or count == 1 or batch_dim == 0:
                found.append(value.contiguous())
            else:
                found.append(torch.stack(value.chunk(count, dim=batch_dim or 0)).contiguous())
        if problems:
            more = f" ({count} micro-batches in this call)" if count > 1 else ""
            raise UserError("input-mismatch", f"the inputs do not fit the artifact{more}:\n    " + "\n    ".join(problems),
                            fix="shapes and dtypes are fixed at compile time: convert the input, or compile again")  # fmt: skip
        return found


def _whole_shape(shape: tuple[int, ...], count: int, batch_dim: int | None) -> tuple[int, ...]:
    if count == 1 or not shape or batch_dim is None or batch_dim >= len(shape):
        return shape
    return (*shape[:batch_dim], shape[batch_dim] * count, *shape[batch_dim + 1 :])


def joined(outputs: Tensor, batch_dim: int | None) -> Tensor:
    """[count, ...] slices in the user's form: side by side along the batch."""
    if outputs.dim() == 1 or batch_dim is None or batch_dim >= outputs.dim() - 1:
        return outputs  # scalars: one a micro-batch
    return torch.cat(list(outputs), dim=batch_dim)
