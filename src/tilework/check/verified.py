"""tilework.compile: the compiler, with a judge who runs one step of what was built beside eager PyTorch before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..artifact.manifest import Manifest
from ..artifact.reader import Artifact
from ..artifact.structure import flatten
from ..compiler.build import Compiled, Report, compile_step
from ..compiler.cache import Cache
from ..compiler.settle import Verdict
from ..errors import TileworkError
from ..plan.options import Options
from ..step import Step
from .check import beside_module, random_inputs, repeated
from .sides import run_module


def compile(
    step: Step,
    path: str | Path,
    *,
    options: Options | None = None,
    weights: Literal["separate", "inside", "none"] = "separate",
    cache: Cache | None = None,
    report: Report = lambda _: None,
    verify: bool = True,
) -> Compiled:
    """Compile a training step into the artifact `path`. Weights go beside it, inside it, or nowhere.

    verify   run a step beside eager PyTorch first. Where the native code is wrong, the compiler does with less of it, and says
             so; an artifact that is wrong is never written. It costs a few eager steps: leave it out for very large models.
    """
    options = options or Options()
    judge = (lambda trial: _judge(trial, step)) if verify and options.device != "null" else None
    return compile_step(step, path, options=options, weights=weights, cache=cache, report=report, judge=judge)


def _judge(trial: Artifact, step: Step) -> Verdict:
    try:
        inputs, note = _inputs(trial.manifest, step)
        expected = run_module(trial.manifest, step, inputs)
    except TileworkError:
        raise
    except Exception as e:
        return Verdict({}, f"not verified: eager PyTorch raises {type(e).__name__} on the inputs: {str(e)[:200]}", compared=False)
    report = beside_module(trial, step, inputs, expected)
    return Verdict({program: str(row) for program, row in report.wrong().items()}, note)


def _inputs(manifest: Manifest, step: Step) -> tuple[list[Tensor], str]:
    """The example inputs; generated ones where they are only shapes, or all the same number, which would hide mistakes."""
    examples = [t.detach() for t in (*flatten(step.inputs)[0], *flatten(step.targets)[0])]
    if step.examples == "shapes":
        return random_inputs(manifest), "on generated inputs, since the examples are only shapes"
    generator = torch.Generator().manual_seed(7)
    same = [t.is_floating_point() and t.numel() > 1 and bool((t == t.reshape(-1)[0]).all()) for t in examples]
    used = [torch.randn(t.shape, generator=generator).to(t.dtype) if s else t for t, s in zip(examples, same, strict=True)]
    note = "on the example inputs" + (", with random numbers where they are all the same" if any(same) else "")
    return repeated(used, manifest), note
