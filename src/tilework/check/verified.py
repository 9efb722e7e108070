"""tilework.compile: the compiler, with a judge who runs one step of what was built beside eager PyTorch before it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..artifact.manifest import Signature
from ..artifact.reader import Artifact
from ..artifact.structure import flatten
from ..capture.examples import settled
from ..compiler.backends import backend_for
from ..compiler.build import Compiled, Report, compile_step
from ..compiler.cache import Cache
from ..compiler.settle import Verdict
from ..errors import TileworkError, UserError
from ..plan.options import Options
from ..step import Step
from .check import ROUGH, beside_module, random_inputs, repeated
from .sides import run_module


def compile(
    step: Step | Sequence[Step],
    path: str | Path,
    *,
    options: Options | None = None,
    batch_sizes: Sequence[int] = (),
    infer_batch_sizes: Sequence[int] = (),
    weights: Literal["separate", "inside", "none"] = "separate",
    cache: Cache | str | Path | None = None,
    report: Report = lambda _: None,
    verify: bool = True,
) -> Compiled:
    """Compile a training step into the artifact `path`.

    step          one Step, or several that share the same weights. Each becomes a signature, named by Step(name=...).
    options       see Options.
    batch_sizes   batch sizes to compile for, each a signature. With [64, 16], a last batch of 16 runs natively too.
    infer_batch_sizes  more batch sizes, for inference only.
    weights       where the initial weights go: "separate" (a file next to the artifact), "inside", or "none".
    cache         a folder for compiled code; by default the user's own (TILEWORK_CACHE).
    report        called with a line of text for each stage of the compile.
    verify        compare a step with eager PyTorch before the file is written. If native code is wrong, the compiler uses less
                  of it and warns; a wrong artifact is never written. This costs a few eager steps, so turn it off for very
                  large models.
    """
    options = options or Options()
    given: list[Any] = list(step) if isinstance(step, (list, tuple)) else [step]
    if not all(isinstance(s, Step) for s in given):
        raise UserError("signatures", "tilework.compile takes a Step", found=type(given[0]).__name__,
                        fix="tilework.Step(model=..., inputs=..., loss=..., optimizer=...)")  # fmt: skip
    steps = signatures_of(given, batch_sizes, infer_batch_sizes)
    cache = Cache(Path(cache)) if isinstance(cache, (str, Path)) else cache
    judge = (lambda trial: _judge(trial, steps)) if verify and backend_for(options.device).computes else None
    return compile_step(steps, path, options=options, weights=weights, cache=cache, report=report, judge=judge)


def signatures_of(steps: list[Step], batch_sizes: Sequence[int], infer_batch_sizes: Sequence[int]) -> list[Step]:
    """A step for each signature."""
    wrong = [n for n in (*batch_sizes, *infer_batch_sizes) if not isinstance(n, int) or isinstance(n, bool) or n < 1]
    if wrong or not steps:
        raise UserError("signatures", "batch_sizes" if wrong else "no step", found=str(wrong or steps),
                        expected="whole numbers, 1 or more" if wrong else "a Step, or several")  # fmt: skip
    if (batch_sizes or infer_batch_sizes) and len(steps) > 1:
        raise UserError("signatures", "batch sizes are for one step", found=f"{len(steps)} steps",
                        fix="give one Step with batch_sizes=, or a Step for each signature")  # fmt: skip
    first = steps[0]
    if batch_sizes:
        steps = [first if n == first.num_rows else first.with_rows(n) for n in dict.fromkeys(batch_sizes)]
    there = {s.num_rows for s in steps}  # a step's signature infers as well
    return steps + [first.with_rows(n, train=False) for n in dict.fromkeys(infer_batch_sizes) if n not in there]


def _judge(trial: Artifact, steps: Sequence[Step]) -> Verdict:
    manifest, reports, note = trial.manifest, [], ""
    for signature, step in zip(manifest.signatures, steps, strict=True):
        why = ""
        for inputs, on in _inputs(signature, step):
            try:
                expected = run_module(manifest, signature, step, inputs)
            except TileworkError:
                raise
            except Exception as e:
                why = f"not verified: eager PyTorch raises {type(e).__name__} on the inputs: {str(e)[:200]}"
                continue
            reports.append(beside_module(trial, signature, step, inputs, expected))
            note = on
            break
        else:
            return Verdict({}, why, compared=False)
    rough = sum(row.note.startswith(ROUGH) for report in reports for row in report.rows)
    if rough:
        note += f"; {rough} tensors only roughly, since rounding moves them by per cents in eager PyTorch too"
    return Verdict({program: str(row) for report in reports for program, row in report.wrong().items()}, note)


def _inputs(signature: Signature, step: Step) -> Iterator[tuple[list[Tensor], str]]:
    """What to run on: the example inputs, with random numbers where they are all the same, which would hide mistakes. Where the
    examples are only shapes, generated ones; and where the step raises on these, such as it runs on."""
    if step.examples == "shapes":
        yield random_inputs(signature), "on generated inputs, since the examples are only shapes"
        step = settled(step)
    examples = [t.detach() for t in (*flatten(step.inputs)[0], *flatten(step.targets)[0])]
    generator = torch.Generator().manual_seed(7)
    same = [t.is_floating_point() and t.numel() > 1 and bool((t == t.reshape(-1)[0]).all()) for t in examples]
    used = [torch.randn(t.shape, generator=generator).to(t.dtype) if s else t for t, s in zip(examples, same, strict=True)]
    note = "on the example inputs" + (", with random numbers where they are all the same" if any(same) else "")
    yield repeated(used, signature), note
    if any(same):  # they may be the same for a reason: probabilities, say
        yield repeated(examples, signature), "on the example inputs"
