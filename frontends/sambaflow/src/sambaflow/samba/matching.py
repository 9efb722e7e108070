"""Does a PEF fit the app's model, inputs and optimizers?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

import tilework
from tilework.frontend.fitting import differing_operators, misfits

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
    problems += misfits(m, s, model, leaves(as_call(inputs)), optimizers)
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
    changed = differing_operators(here, there)
    if changed is not None:
        raise tilework.UserError(
            "sambaflow-mismatch", f"{runner.path}: the model computes something else than when this PEF was compiled",
            found=f"operators that differ: {', '.join(changed[:8])}" if changed else "the same operators, used in another way",
            fix="compile again",
        )  # fmt: skip
