"""compile_step(Step) -> an artifact on disk: capture, plan, build, write."""

from __future__ import annotations

import datetime
import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from .. import __version__, hosts
from ..artifact.manifest import (
    FORMAT_VERSION,
    Bucket,
    Fingerprint,
    Group,
    Manifest,
    Parameter,
    Program,
    Verification,
    Weights,
)
from ..artifact.manifest import Tensor as TensorEntry
from ..artifact.names import SUMMED, Kind, is_kind
from ..artifact.operators import SYNCHRONISES
from ..artifact.reader import Artifact
from ..artifact.writer import initial_bytes, require_replaceable, write_artifact, write_whole
from ..capture.capture import Constants, StepGraph, capture
from ..errors import TileworkWarning, UserError
from ..plan.options import Options
from ..plan.plan import Plan, plan
from ..process import rare_garbage_collection
from ..step import Step
from .backends import backend_for
from .cache import Cache, disk_errors
from .settle import Called, Made, Settled, Settling, Verdict

Report = Callable[[str], None]
BUCKET_BYTES = 25 << 20  # of gradients that are reduced in one go: large enough for bandwidth, small enough to overlap
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
    step: Step | Sequence[Step],
    path: str | Path,
    *,
    options: Options | None = None,
    weights: Literal["separate", "inside", "none"] = "separate",
    cache: Cache | None = None,
    report: Report = lambda _: None,
    judge: Judge | None = None,
) -> Compiled:
    """Compile a training step into the artifact `path`; or several, each a signature over the same weights. Weights go beside
    it, inside it, or nowhere. `judge` runs what was built beside the model and says which programs are wrong; tilework.compile
    has one."""
    path, steps = Path(path), [step] if isinstance(step, Step) else list(step)
    options = options or Options()
    if (weights != "none" or judge is not None) and any(t.is_meta for _, m in steps[0].modules for t in m.parameters()):
        raise UserError("model-meta", "the model is on the meta device: it has no weights to write, and nothing to compare",
                        expected="weights='none' and verify=False (--weights none --no-verify)",
                        fix="compile it so, and load weights into the session: session.load(...)")  # fmt: skip
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

    with rare_garbage_collection():
        graphs = _captured(steps, options, report)
        lap("capture")

        def make(options: Options, called: Called) -> Made:
            maker = backend_for(options.device)
            planned = replace(plan(graphs, options, maker.passes), called=called)
            built = maker.build(path.stem, planned, cache, report)
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
                    native=made.built.members,
                    constants=_constants(made.plan),
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
    data = initial_bytes(graphs[0].weights) if weights != "none" else None
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
            made.built.members,
            _constants(made.plan),
            data if weights == "inside" else None,
            _report(made, verification, seconds),
        )
    lap("write")
    hosts.remember(digest, steps[0].model, steps[0].optimizers, steps[0].loss)
    for retreat in settled.retreats:
        warnings.warn(f"{path}: {retreat}: generated code was wrong there, so it is not used", TileworkWarning, stacklevel=2)
    return Compiled(path, beside, digest, made.plan, made.built.notes, seconds, verification)


def _captured(steps: Sequence[Step], options: Options, report: Report) -> list[StepGraph]:
    sections = options.programs != "fused" or "fuse" in options.disable
    constants, graphs = Constants(), list[StepGraph]()
    for step in steps:
        if len(steps) > 1:
            report(f"signature {step.signature_name}")
        graphs.append(
            capture(
                step,
                keep_momentum=options.keep_momentum,
                grad_norm=options.grad_norm,
                num_replicas=options.num_replicas,
                sync_batch_norm=options.sync_batch_norm,
                sections=sections,
                constants=constants,
                report=report,
            )
        )
    _check_signatures(graphs)
    return graphs


def _check_signatures(graphs: Sequence[StepGraph]) -> None:
    """Every name is there once, and every signature uses the same tensors under the same names."""
    first, names = graphs[0], [g.signature.name for g in graphs]
    if len(set(names)) != len(names):
        raise UserError("signatures", "two signatures have the same name", found=", ".join(names),
                        fix="give each batch size once, or name them: Step(name=...)")  # fmt: skip
    for graph in graphs[1:]:
        other = [b for b, t in graph.weights.items() if b in first.weights and is_kind(b, Kind.PARAM, Kind.BUFFER)
                 and first.weights[b].data_ptr() != t.data_ptr()]  # fmt: skip
        more = [b for b in graph.weights if b not in first.weights]
        groups = [g["prefix"] for g in graph.groups if g not in first.groups] if graph.train else []
        if other or more or groups:
            raise UserError(
                "signatures", f"signature {graph.signature.name} does not use the weights of the first one",
                found=", ".join((*other, *more, *groups)[:10]),
                expected=f"the parameters, buffers and optimizers of signature {first.signature.name}",
                fix="give steps of one model and the same optimizers; the one that uses most of the model first",
            )  # fmt: skip


def _constants(planned: Plan) -> dict[str, torch.Tensor]:
    """Values that belong to the programs: constants of the graphs, and buffers that no file of weights has."""
    found: dict[str, torch.Tensor] = {}
    for graph in planned.steps:
        found |= graph.constants
        own = [Kind.BUFFER.of(k) for k in graph.transient]
        found |= {b: graph.weights[b] for b in own if b in graph.weights}
    return {k: t for k, t in found.items() if k in planned.buffers}


def plan_step(step: Step | Sequence[Step], options: Options | None = None, *, report: Report = lambda _: None) -> Plan:
    """What compile() would build: programs, memory and cost. Builds nothing."""
    options = options or Options()
    with rare_garbage_collection():
        graphs = _captured([step] if isinstance(step, Step) else step, options, report)
        return plan(graphs, options, backend_for(options.device).passes)


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
    grouped = buckets(planned)
    return Manifest(
        format=list(FORMAT_VERSION),
        name=name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        producer=f"tilework {__version__}",
        signatures=list(planned.signatures),
        precision=step.precision,  # type: ignore[arg-type]
        num_replicas=options.num_replicas,
        parameters=[
            Parameter(name=k, type=TensorEntry.of(planned.buffers[Kind.PARAM.of(k)]), **p) for k, p in step.params.items()
        ],
        groups=[Group(**g) for g in step.groups],
        hyperparameters=step.hyper,
        programs={
            p: Program(
                sections=list(planned.sections[p]),  # type: ignore[arg-type]
                buffers=list(g.buffers),
                writes=sorted(g.written),
                graph=f"graphs/{p}.json",
                code=built.code_of.get(p),
                abi=g.abi(),
                flops=planned.costs[p].flops,
                bytes=planned.costs[p].bytes,
                temporary_bytes=planned.costs[p].temporary_bytes,
                parallel=planned.costs[p].parallel,
                called=list(planned.called.get(p, ())),
                synchronises=any(n.op == SYNCHRONISES for n in g.nodes),
                completes=completes(planned, p, grouped),
            )
            for p, g in planned.programs.items()
        },
        buffers={b: TensorEntry.of(t) for b, t in planned.buffers.items()},
        native=sorted(built.members),
        buckets=grouped,
        weights=weights,
        metadata=step.metadata,
        fingerprint=Fingerprint(
            format=list(FORMAT_VERSION),
            device=options.device,
            torch=torch_version,
            needs=built.needs,
            options={
                "programs": options.programs,
                "isa": options.isa,
                "opt_level": options.opt_level,
                "keep_momentum": options.keep_momentum,
                "keep_gradients": options.keep_gradients,
                "grad_norm": options.grad_norm,
                "sync_batch_norm": options.sync_batch_norm,
                "tf32": options.tf32,
                "disable": list(options.disable),
            },
        ),
        verification=verification,
        aliases=step.aliases,
        transient=[k for k in step.transient if Kind.BUFFER.of(k) in planned.buffers],
    )


def buckets(planned: Plan) -> list[Bucket]:
    """Gradients side by side in memory, by type, in the order in which the backward pass makes them: the last layers' first."""
    updates = [g for p, g in planned.programs.items() if planned.sections[p] == ("opt",)]
    reads = {b for g in updates for b in g.reads} if updates else set(planned.buffers)
    found: list[Bucket] = []
    open_: dict[str, list[str]] = {}
    for buffer, kind in planned.buffers.items():
        if not is_kind(buffer, *SUMMED) or buffer not in reads:
            continue
        room = open_.setdefault(kind.dtype, [])
        if room and sum(planned.buffers[b].num_bytes for b in room) + kind.num_bytes > BUCKET_BYTES:
            found.append(Bucket(dtype=kind.dtype, buffers=list(room)))
            room.clear()
        room.append(buffer)
    return found + [Bucket(dtype=dtype, buffers=room) for dtype, room in open_.items() if room]


def completes(planned: Plan, program: str, grouped: Sequence[Bucket]) -> list[int]:
    """After which call of a program's pieces each bucket is complete. Buckets are reduced in their order, so one that is complete
    before the one ahead of it counts with that."""
    cut = planned.cuts.get(program)
    if cut is None or planned.options.num_replicas == 1 or planned.roles.get(program) != "accumulate":
        return []
    last: dict[str, int] = {}
    for at, call in enumerate(cut.calls):
        graph = cut.pieces[call.piece]
        for buffer, value in zip(graph.buffers, call.values, strict=True):
            if buffer in graph.written:
                last[cut.base(value)] = at
    found, latest = [], 0
    for bucket in grouped:
        latest = max([latest, *(last.get(b, 0) for b in bucket.buffers)])
        found.append(latest)
    return found
