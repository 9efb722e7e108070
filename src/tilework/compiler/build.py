"""compile_step(Step) -> an artifact on disk: capture, plan, build, write."""

from __future__ import annotations

import datetime
import gc
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from .. import __version__
from ..artifact.manifest import (
    FORMAT_VERSION,
    Argument,
    Fingerprint,
    Group,
    Manifest,
    Parameter,
    Program,
    Weights,
)
from ..artifact.manifest import Tensor as TensorEntry
from ..artifact.writer import tensor_bytes, write_artifact, write_whole
from ..capture.capture import StepGraph, capture
from ..plan.options import Options
from ..plan.plan import Plan, plan
from ..step import Step
from .backends import Built, backend_for
from .cache import Cache, disk_errors

Report = Callable[[str], None]


@dataclass(frozen=True)
class Compiled:
    """What a compile made, and how long its parts took (seconds)."""

    path: Path
    weights: Path | None
    digest: str
    plan: Plan
    notes: dict[str, str]
    seconds: dict[str, float]

    def __str__(self) -> str:
        took = ", ".join(f"{k} {v:.1f} s" for k, v in self.seconds.items())
        return f"{self.path} ({took})\n{self.plan}"


def compile_step(
    step: Step,
    path: str | Path,
    *,
    options: Options | None = None,
    weights: Literal["separate", "inside", "none"] = "separate",
    cache: Cache | None = None,
    report: Report = lambda _: None,
) -> Compiled:
    """Compile a training step into the artifact `path`. Weights go beside it, inside it, or nowhere."""
    path = Path(path)
    options = options or Options()
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name] = round(now - clock, 3)
        clock = now

    sections = options.programs != "fused" or "fuse" in options.disable
    with _rare_garbage_collection():
        graph = capture(step, keep_momentum=options.keep_momentum, sections=sections, report=report)
        lap("capture")
        planned = plan(graph, options)
        lap("plan")
        built = backend_for(options.device).build(path.stem, planned, cache, report)
        lap("build")
    report("writing the artifact")
    data = tensor_bytes(graph.weights) if weights != "none" else None
    beside = path.with_suffix(".safetensors") if weights == "separate" else None
    with disk_errors(f"writing {path}"):
        if beside is not None and data is not None:
            content = data
            write_whole(beside, lambda f: f.write(content))
        where = Weights(where=weights, file=beside.name if beside else None)
        digest = write_artifact(
            path,
            make_manifest(path.stem, planned, built, where),
            planned.programs,
            _native_members(built),
            {k: t for k, t in graph.constants.items() if k in planned.buffers},
            data if weights == "inside" else None,
            _report(planned, built, seconds),
        )
    lap("write")
    return Compiled(path, beside, digest, planned, built.notes, seconds)


def plan_step(step: Step, options: Options | None = None, *, report: Report = lambda _: None) -> Plan:
    """What compile_step would build: programs, memory and cost. Nothing is built."""
    options = options or Options()
    sections = options.programs != "fused" or "fuse" in options.disable
    with _rare_garbage_collection():
        return plan(capture(step, keep_momentum=options.keep_momentum, sections=sections, report=report), options)


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Tracing and code generation make millions of objects that live to the end; looking through them for cycles as often
    as Python does by default took a fifth of a compile."""
    before = gc.get_threshold()
    gc.set_threshold(20_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _native_members(built: Built) -> dict[str, bytes]:
    members = {f"native/{library}.so": code for library, code in built.libraries.items()}
    if built.driver is not None:
        members["native/driver.so"] = built.driver
    return members


def _report(planned: Plan, built: Built, seconds: dict[str, float]) -> str:
    lines = [str(planned), "", *(f"{p}: {note}" for p, note in built.notes.items()), ""]
    lines += [f"{part}: {took} s" for part, took in seconds.items()]
    return "\n".join(lines) + "\n"


def make_manifest(name: str, planned: Plan, built: Built, weights: Weights) -> Manifest:
    step: StepGraph = planned.step
    options = planned.options
    torch_version = [int(p) for p in torch.__version__.split("+")[0].split(".")[:2]]
    return Manifest(
        format=list(FORMAT_VERSION),
        name=name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        producer=f"tilework {__version__}",
        inputs=[Argument(name=k, type=TensorEntry.of(t)) for k, t in step.inputs.items()],
        num_model_inputs=step.num_model_inputs,
        input_structure=step.input_structure,
        outputs=[Argument(name=k, type=TensorEntry.of(t)) for k, t in step.outputs.items()],
        output_structure=step.output_structure,
        infer_outputs=[Argument(name=k, type=TensorEntry.of(t)) for k, t in step.infer_outputs.items()],
        infer_structure=step.infer_structure,
        losses=list(step.losses),
        separate_loss=step.separate_loss,
        batch_dim=step.batch_dim,
        num_micro_batches=step.num_micro_batches,
        accumulate=step.accumulate,  # type: ignore[arg-type]
        precision=step.precision,  # type: ignore[arg-type]
        parameters=[Parameter(name=k, type=TensorEntry.of(planned.buffers[f"param/{k}"]), **p) for k, p in step.params.items()],
        groups=[Group(**g) for g in step.groups],
        hyperparameters=step.hyper,
        programs={
            p: Program(
                sections=list(planned.sections[p]),  # type: ignore[arg-type]
                buffers=list(g.buffers),
                writes=sorted(g.written),
                graph=f"graphs/{p}.json",
                code=f"native/{built.library_of[p]}.so" if p in built.library_of else None,
                abi=g.abi(),
                flops=planned.costs[p].flops,
                bytes=planned.costs[p].bytes,
                temporary_bytes=planned.costs[p].temporary_bytes,
            )
            for p, g in planned.programs.items()
        },
        buffers={b: TensorEntry.of(t) for b, t in planned.buffers.items()},
        weights=weights,
        metadata=step.metadata,
        fingerprint=Fingerprint(
            format=list(FORMAT_VERSION),
            device=options.device,  # type: ignore[arg-type]
            torch=torch_version,
            architecture=platform.machine(),
            features=built.features,
            glibc=built.glibc,
            options={
                "programs": options.programs,
                "isa": options.isa,
                "opt_level": options.opt_level,
                "keep_momentum": options.keep_momentum,
                "keep_gradients": options.keep_gradients,
                "disable": list(options.disable),
            },
        ),
    )
