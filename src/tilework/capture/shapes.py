"""A look at a step without computing anything: its tensors have shapes and types, and no values.

Where the examples are only shapes, this shows what a real run shows, for any size of model and batch, in seconds. A step that
needs values on the way (it reads a number, chooses rows, draws lots) or does what shapes cannot follow is looked at by a real run
instead, which also decides what is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..step import Step
from .probe import Probe, run_probe


def with_memory(step: Step) -> Step:
    """The step itself; or, for a model on PyTorch's meta device, to which nobody has given weights, a copy whose tensors lie in
    memory of the host that nobody writes or reads, which costs nothing."""
    tensors = {id(t): t for _, root in step.modules for t in (*root.parameters(), *root.buffers()) if t.is_meta}
    if not tensors:
        return step
    memo: dict[int, Any] = {}
    for key, t in tensors.items():
        made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        memo[key] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
    model, loss, optimizer = copy.deepcopy((step.model, step.loss, step.optimizer), memo)
    return replace(step, model=model, loss=loss, optimizer=optimizer)


class NeedsValues(Exception):
    """Shapes are not enough: why."""


class Shapes:
    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.mode.from_tensor(t.detach()).requires_grad_(t.requires_grad) for t in tensors]

    @contextmanager
    def watching(self) -> Iterator[None]:
        try:
            with self.mode:
                yield
        except Exception as e:
            raise _needs_values(e) from e

    def probe(self, step: Step, example: Callable[[], tuple[Any, Any]]) -> Probe:
        try:
            found = run_probe(step, example, self.mode)
        except Exception as e:
            raise _needs_values(e) from e
        if found.reads or found.chances or any(s.device.type == "meta" for s in found.changing):
            raise NeedsValues("it reads values, or changes what it is given")
        outputs = [torch.zeros((), dtype=o.dtype).expand(o.shape) for o in found.outputs]
        return replace(found, outputs=outputs)


def _needs_values(error: Exception) -> NeedsValues:
    if isinstance(error, NeedsValues):
        return error
    cause = error.__cause__ or error  # of what is said of the user's line
    return NeedsValues(f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0][:120]}")
