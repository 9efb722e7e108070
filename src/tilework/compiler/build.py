"""compile_step(Step) -> an artifact on disk: capture, plan, build, write."""

from __future__ import annotations

import datetime
import gc
import hashlib
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from .. import __version__, hosts
from ..artifact.manifest import (
    FORMAT_VERSION,
    Argument,
    Fingerprint,
    Group,
    Manifest,
    Parameter,
    Program,
    Verification,
    Weights,
)
from ..artifact.manifest import Tensor as TensorEntry
from ..artifact.reader import Artifact
from ..artifact.writer import initial_bytes, require_replaceable, write_artifact, write_whole
from ..capture.capture import StepGraph, capture
from ..errors import TileworkWarning
from ..plan.options import Options
from ..plan.plan import Plan, plan
from ..step import Step
from .backends import Built, backend_for
from .cache import Cache, disk_errors
from .settle import Called, Made, Settled, Settling, Verdict

Report = Callable[[str], None]
Judge = Callable[[Artifact], Verdict]  # of an artifact that is not written yet, without weights


@dataclass(frozen=True)
class Compiled:
    """What a compile made, and how long its parts took (seconds)."""

    path: Path
    weights: Path | None
    digest: str
    plan: Plan
    notes: dict[str, str]
    seconds: dict[str, float]
    verification: Verification

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
    judge: Judge | None = None,
) -> Compiled:
    """Compile a training step into the artifact `path`. Weights go beside it, inside it, or nowhere. `judge` runs what was built
    beside the model and says which programs are wrong; tilework.compile has one."""
    path = Path(path)
    options = options or Options()
    beside = path.with_suffix(".safetensors") if weights == "separate" else None
    if beside is not None:
        require_replaceable(beside)
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        seconds[name] = round(now - clock, 3)
        clock = now

    with _rare_garbage_collection():
        graph = _captured(step, options, report)
        lap("capture")

        def make(options: Options, called: Called) -> Made:
            planned = replace(plan(graph, options), called=called)
            built = backend_for(options.device).build(path.stem, planned, cache, report)
            return Made(replace(planned, called=built.called), built)

        def judged(made: Made) -> Verdict:
            assert judge is not None
            begin = time.perf_counter()
            verdict = judge(
                Artifact(
                    path=path,
                    manifest=make_manifest(path.stem, made, Weights(where="none")),
                    digest="",
                    members={},
                    native=_native_members(made.built),
                    constants=_constants(graph, made.plan),
                    weights=None,
                    graphs=made.plan.programs,
                    report="",
                )
            )
            seconds["verify"] = round(seconds.get("verify", 0.0) + time.perf_counter() - begin, 3)
            return verdict

        if judge is None:
            settled = Settled(make(options, {}), "not verified: left out on request", compared=False)
        else:
            settled = Settling(options, make, judged, report).settle()
        made = settled.made
        lap("build")
        seconds["build"] = round(seconds["build"] - seconds.get("verify", 0.0), 3)
    report("writing the artifact")
    data = initial_bytes(graph.weights) if weights != "none" else None
    sha256 = hashlib.sha256(data).hexdigest() if beside is not None and data is not None else None
    with disk_errors(f"writing {path}"):
        if beside is not None and data is not None:
            content = data
            write_whole(beside, lambda f: f.write(content))
        where = Weights(where=weights, file=beside.name if beside else None, sha256=sha256)
        verification = Verification(note=settled.note, compared=settled.compared, retreats=settled.retreats)
        digest = write_artifact(
            path,
            make_manifest(path.stem, made, where, verification),
            made.plan.programs,
            _native_members(made.built),
            _constants(graph, made.plan),
            data if weights == "inside" else None,
            _report(made, verification, seconds),
        )
    lap("write")
    hosts.remember(digest, step.model, step.optimizers, step.loss)
    for retreat in settled.retreats:
        warnings.warn(f"{path}: {retreat}: generated code was wrong there, so it is not used", TileworkWarning, stacklevel=2)
    return Compiled(path, beside, digest, made.plan, made.built.notes, seconds, verification)


def _captured(step: Step, options: Options, report: Report) -> StepGraph:
    sections = options.programs != "fused" or "fuse" in options.disable
    return capture(step, keep_momentum=options.keep_momentum, sections=sections, report=report)


def _constants(graph: StepGraph, planned: Plan) -> dict[str, torch.Tensor]:
    """Values that belong to the program: constants of the graph, and buffers that no file of weights has."""
    own = {f"buffer/{k}": graph.weights[f"buffer/{k}"] for k in graph.transient if f"buffer/{k}" in graph.weights}
    return {k: t for k, t in {**graph.constants, **own}.items() if k in planned.buffers}


def plan_step(step: Step, options: Options | None = None, *, report: Report = lambda _: None) -> Plan:
    """What compile_step would build: programs, memory and cost. Nothing is built."""
    options = options or Options()
    with _rare_garbage_collection():
        return plan(_captured(step, options, report), options)


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


def _report(made: Made, verification: Verification, seconds: dict[str, float]) -> str:
    lines = [str(made.plan), "", *(f"{p}: {note}" for p, note in made.built.notes.items()), ""]
    lines += [f"verified: {verification.note}" if verification.compared else verification.note, *verification.retreats, ""]
    lines += [f"{part}: {took} s" for part, took in seconds.items()]
    return "\n".join(lines) + "\n"


def make_manifest(name: str, made: Made, weights: Weights, verification: Verification | None = None) -> Manifest:
    planned, built = made.plan, made.built
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
                called=list(planned.called.get(p, ())),
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
        verification=verification,
        checks=step.checks,
        aliases=step.aliases,
        transient=[k for k in step.transient if f"buffer/{k}" in planned.buffers],
    )
