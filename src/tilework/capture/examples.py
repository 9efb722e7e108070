"""Values for examples that are only shapes: a real run needs some, on which the step does not raise.

What is compiled depends on shapes and types alone. The examples' own values come first, since they may have a structure that
nobody could guess (lengths, masks); then ones that are valid nearly everywhere: floats between 0 and 1, which are probabilities,
and the integers 0 and 1, which are classes, tokens and indices of anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..artifact.structure import flatten, unflatten
from ..step import Step
from .probe import evaluate, model_errors, preserved

_TRIED = (("own", "own"), ("unit", "own"), ("own", "few"), ("unit", "few"), ("unit", "one"), ("unit", "zero"), ("own", "zero"))


def settled(step: Step) -> Step:
    """The step with example values on which it runs and, if there are any, with which its outputs are finite."""
    if step.examples == "data":
        return step
    runs: list[Step] = []
    failed: list[Exception] = []
    for trial in _trials(step):
        try:
            finite = _runs(_few(trial))
        except Exception as e:
            failed.append(e)
            continue
        runs.append(trial)
        if finite:
            return trial
    if not runs:  # what most of them raise does not come from their values
        counts = Counter(map(_text, failed))
        with model_errors():
            raise next(e for e in failed if _text(e) == counts.most_common(1)[0][0])
    return runs[0]


FEW_ROWS = 4  # that are run where examples are only shapes


def few_rows(step: Step, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Some rows of each, where there are many more."""
    size, dim = step.batch_size, step.batch_dim
    if step.examples == "data" or size is None or dim is None or size <= 2 * FEW_ROWS:
        return None
    few = [t.detach().narrow(dim, 0, FEW_ROWS).clone() if t.dim() > dim and t.shape[dim] == size else t for t in tensors]
    return [t.detach().requires_grad_(e.requires_grad) for t, e in zip(few, tensors, strict=True)]


def _few(step: Step) -> Step:
    inputs = step.inputs if isinstance(step.inputs, (tuple, list, dict)) else (step.inputs,)
    targets = tuple(step.targets) if isinstance(step.targets, (tuple, list)) else (step.targets,)
    (own, structure), (more, target_structure) = flatten(inputs), flatten(targets)
    made = few_rows(step, [*own, *more])
    if made is None:
        return step
    return replace(step, inputs=unflatten(structure, iter(made[: len(own)])),
                   targets=unflatten(target_structure, iter(made[len(own) :])))  # fmt: skip


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _trials(step: Step) -> Iterator[Step]:
    inputs = step.inputs if isinstance(step.inputs, (tuple, list, dict)) else (step.inputs,)
    targets = tuple(step.targets) if isinstance(step.targets, (tuple, list)) else (step.targets,)
    (own, structure), (more, target_structure) = flatten(inputs), flatten(targets)
    for floats, integers in _TRIED:
        generator = torch.Generator().manual_seed(0)
        made = [_valued(t, floats, integers, generator) for t in (*own, *more)]
        yield replace(step, inputs=unflatten(structure, iter(made[: len(own)])),
                      targets=unflatten(target_structure, iter(made[len(own) :])))  # fmt: skip


def _valued(t: Tensor, floats: str, integers: str, generator: torch.Generator) -> Tensor:
    kind = floats if t.is_floating_point() or t.is_complex() else integers
    if kind == "own" or t.dtype == torch.bool:
        return t
    if kind == "unit":
        return torch.rand(t.shape, generator=generator).clamp(0.01, 0.99).to(t.dtype).requires_grad_(t.requires_grad)
    if kind == "few":
        return torch.randint(0, 2, t.shape, generator=generator).to(t.dtype)
    return torch.full_like(t, 1 if kind == "one" else 0)


def _runs(step: Step) -> bool:
    """Raises what the step raises; otherwise whether everything that it returns is a finite number."""
    with preserved(step), torch.enable_grad():
        if not step.train:
            for _, root in step.modules:
                root.eval()
        inputs, targets = (_copied(v) for v in (step.inputs, step.targets))
        outputs, _ = evaluate(step, inputs, targets)
    return all(bool(torch.isfinite(o).all()) for o in outputs if o.is_floating_point())


def _copied(values: Any) -> Any:
    leaves, structure = flatten(values)
    return unflatten(structure, iter([t.detach().clone().requires_grad_(t.requires_grad) for t in leaves]))
