"""Does a PEF fit the app's model, inputs and optimizers?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import tilework

from .compiling import METADATA, as_call, leaves
from .running import Runner


def check(runner: Runner, model: nn.Module, inputs: Any, optimizers: Sequence[Any]) -> None:
    """The PEF fits the app's model, inputs and optimizers; otherwise every difference at once."""
    m, problems = runner.manifest, []
    compiled = m.metadata.get(METADATA)
    if compiled is not None:
        here = {k: type(x).__name__ for k, x in model.named_modules()}
        there = compiled.get("modules", here)
        for k in dict.fromkeys([*there, *here]):
            if here.get(k) != there.get(k):
                problems.append(f"module {k or '(the model)'}: found {here.get(k, 'none')}, expected {there.get(k, 'none')}")
    own = {f"param/{k}": p for k, p in model.named_parameters()} | {f"buffer/{k}": b for k, b in model.named_buffers()}
    for name, t in own.items():
        entry = m.buffers.get(name)
        if entry is not None and list(entry.shape) != list(t.shape):
            problems.append(f"{name}: found {list(t.shape)}, expected {list(entry.shape)}")
    for parameter in m.parameters:
        if f"param/{parameter.name}" not in own:
            problems.append(f"param/{parameter.name}: the model has no such parameter")
    given = leaves(as_call(inputs))
    if len(given) != len(m.inputs):
        problems.append(f"inputs: found {len(given)}, expected {len(m.inputs)}: {', '.join(a.name for a in m.inputs)}")
    for t, a in zip(given, m.inputs, strict=False):
        shape = list(a.type.shape)
        if m.batch_dim is not None and len(shape) > m.batch_dim:
            shape[m.batch_dim] *= m.num_micro_batches
        if list(t.shape) != shape:
            problems.append(f"input {a.name}: found {list(t.shape)}, expected {shape} (batch size {_batch(m)})")
    if optimizers and m.groups and len(optimizers) != len({g.optimizer for g in m.groups}):
        problems.append(f"optimizers: found {len(optimizers)}, expected {len({g.optimizer for g in m.groups})}")
    if problems:
        raise tilework.UserError(
            "sambaflow-mismatch",
            f"{runner.path}: this PEF was compiled for something else:\n    " + "\n    ".join(problems[:20]),
            fix="compile again with this model, batch size and inputs",
        )


def _batch(m: Any) -> int:
    sizes = [a.type.shape[m.batch_dim or 0] for a in m.inputs if len(a.type.shape) > (m.batch_dim or 0)]
    return int(sizes[0] * m.num_micro_batches) if sizes else 1
