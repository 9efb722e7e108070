"""Does a PEF fit the app's model, inputs and optimizers?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

import tilework

from .compiling import METADATA, as_call, code_digest, leaves, planned
from .running import Runner


def check(
    runner: Runner, model: nn.Module, inputs: Any, optimizers: Sequence[Any], loss_indices: Sequence[int] | int | None = None
) -> None:
    """The PEF fits the app's model, inputs and optimizers; otherwise every difference at once."""
    m, s, problems = runner.manifest, runner.signature, list[str]()
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
    if optimizers and not runner.inference and compiled is not None and "frozen" in compiled:
        frozen = {k for k, p in model.named_parameters() if not p.requires_grad}
        for name in sorted(frozen ^ set(compiled["frozen"])):
            state = ["trained", "frozen"]
            problems.append(f"param/{name}: found {state[name in frozen]}, expected {state[name not in frozen]}")
    if loss_indices is not None and s.outputs:
        asked = [loss_indices] if isinstance(loss_indices, int) else list(loss_indices)
        names = [s.outputs[i].name for i in asked if i < len(s.outputs)]
        if sorted(names) != sorted(s.losses) and not runner.inference:
            problems.append(f"loss_indices: found {', '.join(names)}, expected {', '.join(s.losses) or 'none'}")
    given = leaves(as_call(inputs))
    if len(given) != len(s.inputs):
        problems.append(f"inputs: found {len(given)}, expected {len(s.inputs)}: {', '.join(a.name for a in s.inputs)}")
    for t, a in zip(given, s.inputs, strict=False):
        shape = list(a.type.shape)
        if s.batch_dim is not None and len(shape) > s.batch_dim:
            shape[s.batch_dim] *= s.num_micro_batches
        if list(t.shape) != shape:
            problems.append(f"input {a.name}: found {list(t.shape)}, expected {shape} (batch size {s.num_rows})")
    if optimizers and m.groups and len(optimizers) != len({g.optimizer for g in m.groups}):
        problems.append(f"optimizers: found {len(optimizers)}, expected {len({g.optimizer for g in m.groups})}")
    if problems:
        raise tilework.UserError(
            "sambaflow-mismatch",
            f"{runner.path}: this PEF was compiled for something else:\n    " + "\n    ".join(problems[:20]),
            fix="compile again with this model, batch size and inputs",
        )


def check_graph(runner: Runner, step: tilework.Step) -> None:
    """The model still computes what was compiled. It is captured again only where its code or settings look different."""
    noted = runner.manifest.metadata.get(METADATA, {}).get("code") or {}
    if noted.get("python") != list(sys.version_info[:2]) or noted.get("digest") == code_digest(runner.model):
        return
    again = planned(step, runner.manifest.fingerprint.device)
    here, there = again.programs["infer"], runner.core.artifact.graphs[runner.signature.programs["infer"]]
    if _operators(here) != _operators(there):
        changed = sorted({n for n, _ in _operators(here)} ^ {n for n, _ in _operators(there)})
        raise tilework.UserError(
            "sambaflow-mismatch", f"{runner.path}: the model computes something else than when this PEF was compiled",
            found=f"operators that differ: {', '.join(changed[:8])}" if changed else "the same operators, used in another way",
            fix="compile again",
        )  # fmt: skip


def _operators(graph: Any) -> list[tuple[str, Any]]:
    """A graph without the names of its values: operators, what they use (by position) and constants; then what is written."""
    number: dict[str, Any] = {}
    found: list[tuple[str, Any]] = []
    for node in graph.nodes:
        renamed = node.map_refs(lambda r: str(number.get(r, r)))
        found.append((node.op, repr((renamed.args, sorted(renamed.kwargs.items())))))
        number[node.name] = f"#{len(number)}"
    return [*found, *[("write " + buffer, str(number.get(value, value))) for buffer, value in graph.writes]]
