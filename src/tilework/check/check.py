"""check(artifact, step): runs the artifact that will be run, and the user's untouched module, on the same inputs.

The module runs in eager PyTorch with torch's own autograd and optimizers, so a mistake in capture shows. Where the two differ
by more than rounding usually makes, it is asked how far eager PyTorch itself moves when its last bits change. Without the
module, the artifact's own graphs are replayed: "graph only".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..artifact.graph import DTYPES
from ..artifact.manifest import Manifest, Signature
from ..artifact.names import Kind, is_kind
from ..artifact.reader import Artifact, read_artifact
from ..artifact.structure import flatten
from ..capture.examples import settled
from ..errors import UserError
from ..runtime.checkpoint import require_digest
from ..runtime.devices import device_class
from ..runtime.session import Session
from ..step import Step
from .compare import BF16_COMPUTE, TF32_COMPUTE, Row, compare
from .sides import SEED, Results, loss_module, run_artifact, run_module, shaken

_NORMALISED = (
    "adam",
    "adamw",
    "rmsprop",
    "lamb",
    "adagrad",
    "adamax",
    "nadam",
    "radam",
    "adadelta",
)  # rules that divide the gradient by its own size
_GRADIENT_NOISE, _GRADIENT_NOISE_LOW = 1e-6, 1e-2  # rounding noise in a gradient, relative to its largest element; of 16 bits
_LATER = 50.0  # how much more the second step may be off: it begins where the first one ended
_NOISE_FACTOR, _MOST_NOISE = 30.0, 1e-2  # how much more than eager PyTorch's own noise is excused, and how much noise at most
# Deep nets with normalization over few numbers (ResNet-50, batch 4) turn the last bit into per cents: there, no more than this.
_ROUGH_FACTOR, _ROUGHEST = 3.0, 0.1
_SHAKEN = (
    2.0,
    8.0,
    8.0,
    32.0,
    32.0,
    32.0,
)  # units in the last place; the later ones only where the earlier do not explain everything
_ELSEWHERE = (101, 102)  # seeds of the weights nearby that are tried where eager PyTorch itself jumps
ROUGH = "compared roughly"  # how the note of such a row begins
_ROUNDING = 1e-6  # of the largest tensor of a kind: all that there is of a tensor in which everything cancels
# Which program a kind of tensor comes from. The second step blames the same ones.
_OF_OPT = {"gradient norm": "opt", "parameter": "opt", "state": "opt"}
_PROGRAMS = {
    "sections": {"output": "fwd", "buffer": "fwd", "gradient": "bwd", **_OF_OPT},
    "accumulate": {"output": "accumulate", "buffer": "accumulate", "gradient": "accumulate", **_OF_OPT},
}  # fmt: skip
_WAYS = ("fused", "sections", "again", "infer")
_ORDER = ("output", "buffer", "gradient", "gradient norm", "parameter", "state")  # of computation


@dataclass(frozen=True)
class Report:
    mode: str  # "module" or "graph only"
    device: str
    rows: list[Row]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def first_difference(self) -> Row | None:
        """The first tensor, in the order of computation, that differs."""
        return next((row for row in self.rows if not row.ok), None)

    def wrong(self) -> dict[str, Row]:
        """Programs that are wrong, each with the first tensor that shows it. Within a way of running only the first program is
        blamed: those after it got wrong numbers from it."""
        found: dict[str, Row] = {}
        for chain in (("infer",), ("step",), ("accumulate", "opt"), ("fwd", "bwd", "opt")):
            rows = [r for r in self.rows if not r.ok and r.role in chain]
            if rows:
                first = min(rows, key=lambda r: chain.index(r.role))
                found.setdefault(first.program, first)
        return found


def check(path: str | Path, step: Step | None = None, *, device: str | None = None, trust: bool = False) -> Report:
    """Every signature: at other batch sizes the step's examples are repeated or cut."""
    artifact = read_artifact(path, trust=trust)
    manifest = artifact.manifest
    if not device_class(device or manifest.fingerprint.device).computes:
        raise UserError("test-null", "the null device does no arithmetic, so there is nothing to compare")
    if step is None:
        return _graph_only(artifact, device)
    step = settled(step)
    reports = []
    for signature in manifest.signatures:
        own = step if signature.num_rows in (None, step.num_rows) else step.with_rows(signature.num_rows or 1)
        inputs = step_inputs(signature, own)
        reports.append(beside_module(artifact, signature, own, inputs, run_module(manifest, signature, own, inputs), device))
    return joined(reports)


def joined(reports: Sequence[Report]) -> Report:
    return replace(reports[0], rows=[row for report in reports for row in report.rows])


def beside_module(
    artifact: Artifact, signature: Signature, step: Step, inputs: list[Tensor], expected: Results, device: str | None = None
) -> Report:
    """A signature of the artifact on flat inputs, beside what the module gives for them."""
    here = _at(artifact, signature, step, inputs, expected, device)
    for seed in _ELSEWHERE:
        if not here.jumps:
            break
        # A fault shows at weights next to these as well; a jump that happens to lie at these weights does not.
        with shaken(step, inputs, max(_SHAKEN), seed) as beside:
            there = _at(artifact, signature, step, beside, run_module(artifact.manifest, signature, step, beside), device)
        here = here.or_there(there)
    return Report("module", here.device, [_placed(row, signature) for row in here.rows])


@dataclass(frozen=True)
class _Judged:
    """A comparison at some weights and inputs, judged."""

    device: str
    rows: list[Row]
    moved: list[dict[tuple[str, str, str], float]]  # how far eager PyTorch moved, each time it was shaken

    @property
    def jumps(self) -> bool:
        """Whether rows are wrong, and all of them are such as jump about as far in eager PyTorch itself."""
        wrong = [r for r in self.rows if not r.ok]
        return bool(wrong) and all(
            r.error <= _ROUGH_FACTOR * max((m.get(_key(r), 0.0) for m in self.moved), default=0.0) for r in wrong
        )

    def or_there(self, there: _Judged) -> _Judged:
        note = f"{ROUGH}: at weights that differ in their last bits, since eager PyTorch jumps at these"
        right = {_key(r): replace(r, note=note) for r in there.rows if r.ok}
        return replace(self, rows=[r if r.ok else right.get(_key(r), r) for r in self.rows])


def _key(row: Row) -> tuple[str, str, str]:
    return row.program, row.kind, row.name


def _at(
    artifact: Artifact, signature: Signature, step: Step, inputs: list[Tensor], expected: Results, device: str | None
) -> _Judged:
    with Session(artifact, device=device, seed=SEED, weights=False) as session:
        session.set(session.hyper)  # those that were compiled are meant, whatever a scheduler has done to the module's since
        session.to_device(step.model, step.optimizers or None, loss=loss_module(step))
        failed: dict[str, str] = {}
        found = run_artifact(session, session.calls_of(signature.name), inputs, failed)
        name = session.device_name
    rows = [Row("run", p, float("inf"), 0.0, False, why.splitlines()[0][:200], p) for p, why in failed.items()]
    rows += _rows(artifact, signature, found, expected)
    moved: list[dict[tuple[str, str, str], float]] = []
    if not all(r.ok for r in rows):
        low = bool(_coarse(artifact))
        for seed, units in enumerate(_SHAKEN, start=1):
            trial = _like(run_module(artifact.manifest, signature, step, inputs, shaken_by=units, seed=seed), found)
            moved.append({_key(r): r.error for r in _rows(artifact, signature, trial, expected)})
            judged = _decided(rows, moved, low=low)
            if all(r.ok for r in judged):
                break
        rows = judged
    return _Judged(name, rows, moved)


def _placed(row: Row, signature: Signature) -> Row:
    """With the program's own name, and in signatures after the first the tensor's with the signature's."""
    name = f"{signature.prefix}:{row.name}" if signature.prefix else row.name
    return replace(row, program=signature.programs.get(row.program, row.program), role=row.program, name=name)


def _coarse(artifact: Artifact) -> float:
    """The tolerance where something is computed in 16 bits, or with TF32; 0 where nothing is."""
    if {"bfloat16", "float16"} & _dtypes(artifact):
        return BF16_COMPUTE
    return TF32_COMPUTE if artifact.manifest.fingerprint.options.get("tf32") else 0.0


def _dtypes(artifact: Artifact) -> set[str]:
    return {t.dtype for graph in artifact.graphs.values() for n in graph.nodes for t in n.types if t is not None}


def _rows(artifact: Artifact, signature: Signature, found: Results, expected: Results) -> list[Row]:
    manifest, coarse, mixed = artifact.manifest, _coarse(artifact), "float32" in _dtypes(artifact)
    rows: list[Row] = []
    for way in (w for w in _WAYS if w in found):
        kinds = found[way]
        programs = _PROGRAMS.get("sections" if way == "sections" else "accumulate" if "accumulate" in signature.programs else "")
        later = _LATER if way == "again" else 1.0
        allowance = _allowance(manifest, expected[way].get("gradient", {}), later, low=bool(coarse)) if way != "infer" else {}
        for kind in (k for k in _ORDER if k in kinds):
            if kind == "gradient" and not kinds[kind]:
                continue
            made = compare(kind, kinds[kind], expected[way].get(kind, {}), computed=coarse,
                           allowance=allowance if kind == "parameter" else None, later=later, mixed=mixed)  # fmt: skip
            program = "infer" if way == "infer" else programs[kind] if programs else "step"
            prefix = {"infer": "inference ", "again": "second "}.get(way, "")
            rows += [replace(r, kind=f"{prefix}{r.kind}", program=program) for r in made]
    return rows


def _decided(rows: list[Row], moved: list[dict[tuple[str, str, str], float]], *, low: bool) -> list[Row]:
    """Rows that failed, judged by how far eager PyTorch itself moves when its weights and inputs move by their last bits: right
    if that explains the difference, and is still rounding. Moving them further shows where the model jumps (a ReLU's input that
    is nearly 0, the larger of two that are nearly the same): a jump does not grow with the move. All else counts by its size.
    Where eager PyTorch itself moves by per cents, as much is excused, and the note says so. `low`: 16 bits or TF32, whose
    tolerance is wide already, what is within eager PyTorch's own noise and within per cents."""
    judged = []
    for row in rows:
        errors = [m.get(_key(row), 0.0) for m in moved]
        noise = max(error * _SHAKEN[0] / units for error, units in zip(errors, _SHAKEN, strict=False))
        # Of a second step, which begins with the first one's rounding, no more is asked: the first was judged strictly.
        small = min(errors) <= _MOST_NOISE or row.share <= _ROUNDING or row.kind.startswith("second ")
        excused = not low and small and row.error <= _NOISE_FACTOR * noise
        rough = min(errors) <= _ROUGHEST and row.error <= _ROUGH_FACTOR * noise
        if low:
            rough = row.error <= min(noise, 2 * _ROUGHEST)
        note = f"rounding: eager PyTorch moves by {noise:.1e} when its last bits change"
        if not row.ok and (excused or rough):
            row = replace(row, ok=True, note=note if excused else f"{ROUGH}; {note}")
        judged.append(row)
    return judged


def _like(expected: Results, found: Results) -> Results:
    """The module's results for the ways and kinds that the artifact has."""
    return {way: {kind: expected[way][kind] for kind in kinds if kind in expected[way]} for way, kinds in found.items()}


def step_inputs(signature: Signature, step: Step) -> list[Tensor]:
    """The example inputs, once a micro-batch, rolled along the batch so that micro-batches differ."""
    leaves = [*flatten(step.inputs)[0], *flatten(step.targets)[0]]
    return repeated([t.detach() for t in leaves], signature)


def repeated(leaves: list[Tensor], signature: Signature) -> list[Tensor]:
    num, dim = signature.num_micro_batches, signature.batch_dim
    if num == 1 or dim is None:
        return leaves
    return [torch.cat([t.roll(i, dims=dim) for i in range(num)], dim=dim) if t.dim() > dim else t for t in leaves]


def _allowance(manifest: Manifest, gradients: dict[str, Tensor], later: float, *, low: bool) -> dict[str, Tensor]:
    """How far rounding noise in a gradient may move a parameter: normalised rules turn even a tiny gradient into a
    step of about lr, so an element whose gradient is nearly noise can go either way."""
    found = {}
    hyper = manifest.hyperparameters
    overall = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    for group in manifest.groups:
        if group.rule not in _NORMALISED:
            continue
        lr, eps = hyper[f"{group.prefix}.lr"], hyper[f"{group.prefix}.eps"]
        for name in group.params:
            if name in gradients:
                g = gradients[name].double().abs()
                noise = (_GRADIENT_NOISE_LOW if low else _GRADIENT_NOISE) * later * max(float(g.max()), 0.1 * overall)
                found[name] = lr * (2.0 * noise / (g + eps)).clamp(max=2.0) * (2.0 if later > 1 else 1.0)
    return found


# ---- graph only ----


def random_inputs(signature: Signature, seed: int = 0) -> list[Tensor]:
    """Inputs of the right shapes: normal numbers, and 0 or 1 for integers, which are valid classes everywhere."""
    generator = torch.Generator().manual_seed(seed)
    num, dim = signature.num_micro_batches, signature.batch_dim
    found = []
    for argument in signature.inputs:
        shape, dtype = list(argument.type.shape), DTYPES[argument.type.dtype]
        if dim is not None and len(shape) > dim:
            shape[dim] *= num
        if dtype.is_floating_point:
            found.append(torch.randn(shape, generator=generator).to(dtype))
        else:
            found.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
    return found


def _graph_only(artifact: Artifact, device: str | None) -> Report:
    return joined([_replayed(artifact, signature, device) for signature in artifact.manifest.signatures])


def _replayed(artifact: Artifact, signature: Signature, device: str | None) -> Report:
    inputs = random_inputs(signature)
    results = []
    for name in (device or artifact.manifest.fingerprint.device, "reference"):
        with Session(artifact, device=name, seed=SEED, weights=_own_weights(artifact)) as session:
            session.load_tensors(some_weights(session))
            results.append((run_artifact(session, session.calls_of(signature.name), inputs), session.device_name))
    (found, used), (expected, _) = results
    found.pop("again", None)  # without the module nobody says how much noise there is by then
    if "fused" in expected:  # it does not keep its gradients; those of the sections say how much noise to expect
        expected["fused"].setdefault("gradient", expected.get("sections", {}).get("gradient", {}))
    rows = _rows(artifact, signature, found, expected)
    return Report("graph only", used, [_placed(row, signature) for row in rows])


def _own_weights(artifact: Artifact) -> Literal[False] | None:
    """None: the artifact's own, where they are as they were compiled. False: what lies beside it may be anything by now."""
    if artifact.weights_beside is not None:
        try:
            require_digest(artifact.weights_beside, artifact.manifest.weights.sha256, artifact.path)
        except UserError:
            return False
    return None


def some_weights(session: Session) -> dict[str, Tensor]:
    """The session's weights where it has them; small random ones otherwise."""
    if session._has_weights:
        return session.tensors()
    generator = torch.Generator().manual_seed(1)
    found = session.tensors()
    for name, t in found.items():
        if is_kind(name, Kind.PARAM) and t.is_floating_point():
            found[name] = torch.randn(t.shape, generator=generator).to(t.dtype) * 0.05
        elif is_kind(name, Kind.BUFFER) and t.is_floating_point():
            found[name] = torch.ones_like(t)
    return found
