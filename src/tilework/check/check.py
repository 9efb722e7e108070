"""check(artifact, step): runs the artifact that will be run, and the user's untouched module, on the same inputs.

The module runs in eager PyTorch with torch's own autograd and optimizers, so a mistake in capture shows. Its random
numbers are those of the artifact, injected from outside. Its parameters, buffers, gradients and optimizer state are put
back afterwards. Without the module, the artifact's own graphs are replayed: "graph only".
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifact.graph import DTYPES
from ..artifact.manifest import is_dropout
from ..artifact.reader import Artifact, read_artifact
from ..artifact.structure import flatten, names, unflatten
from ..errors import UserError
from ..random import next_seed, seeded
from ..runtime.session import Session
from ..runtime.sync import host_tensors
from ..step import Step
from .compare import Row, compare

_SEED = 20240229
_NORMALISED = ("adam", "adamw", "rmsprop", "lamb")  # rules that divide the gradient by its own size
_GRADIENT_NOISE = 1e-6  # rounding noise in a gradient, relative to its largest element


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


@dataclass
class _Results:
    """Tensors by kind, from one step on one side."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    state: dict[str, Tensor]
    buffers: dict[str, Tensor]


def check(path: str | Path, step: Step | None = None, *, device: str | None = None, trust: bool = False) -> Report:
    artifact = read_artifact(path, trust=trust)
    if device == "null" or (device is None and artifact.manifest.fingerprint.device == "null"):
        raise UserError("test-null", "the null device does no arithmetic, so there is nothing to compare")
    if step is None:
        return _graph_only(artifact, device)
    inputs = _step_inputs(artifact, step)
    with Session(artifact, device=device, seed=_SEED) as session:
        session.to_device(step.model, step.optimizers or None, loss=_loss_module(step))
        found = _run_artifact(session, inputs)
        name = session.device_name
    with _restored(step):
        expected = _run_module(artifact, step, inputs)
    low = artifact.manifest.precision == "bfloat16"
    allowance = _allowance(artifact, expected)
    rows = compare("output", found.outputs, expected.outputs, low_precision=low)
    if found.gradients:
        rows += compare("gradient", found.gradients, expected.gradients, low_precision=low)
    rows += compare("parameter", found.parameters, expected.parameters, low_precision=low, allowance=allowance)
    rows += compare("state", found.state, expected.state, low_precision=low)
    rows += compare("buffer", found.buffers, expected.buffers, low_precision=low)
    return Report("module", name, rows)


# ---- the artifact's side ----


def _run_artifact(session: Session, inputs: list[Tensor]) -> _Results:
    """The fused step for what is updated; then, from the same start, the sections one by one for the gradients."""
    start = session.tensors()
    manifest = session.manifest
    gradients: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    if manifest.losses or "bwd" not in session.training_sections:
        if session.training_sections:
            outputs = _named_outputs(session, session.run(*inputs))
        else:
            leaves, _ = flatten(session.infer(*inputs[: manifest.num_model_inputs]))
            outputs = dict(zip([a.name for a in manifest.infer_outputs], leaves, strict=True))
    updated = session.tensors()
    if "fwd" in manifest.programs and manifest.num_micro_batches == 1:
        session.load_tensors(start)
        session.seed(_SEED)
        host_loss = not manifest.losses
        result = session.run(*inputs, sections=["fwd"])
        outputs = outputs or _named_outputs(session, result)
        out_grads = {a.name: torch.ones_like(outputs[a.name]) for a in manifest.outputs
                     if f"outgrad/{a.name}" in session.buffers} if host_loss else None  # fmt: skip
        session.run(sections=["bwd"], out_grads=out_grads)
        gradients = session.gradients()
        if host_loss and "opt" in session.training_sections:
            session.run(sections=["opt"])
            updated = session.tensors()
    return _Results(
        outputs,
        gradients,
        {k.removeprefix("param/"): t for k, t in updated.items() if k.startswith("param/")},
        {k.removeprefix("state/"): t for k, t in updated.items() if k.startswith("state/") and not k.endswith("/step")},
        {k.removeprefix("buffer/"): t for k, t in updated.items() if k.startswith("buffer/")},
    )


def _named_outputs(session: Session, result: Any) -> dict[str, Tensor]:
    leaves, _ = flatten(result.outputs)
    named = [a.name for a in session.manifest.outputs]
    if session.manifest.separate_loss:
        losses = result.losses if result.losses.shape[0] > 1 else result.losses[0]
        leaves = [losses, *leaves]
    return dict(zip(named, leaves, strict=True))


# ---- the module's side ----


def _run_module(artifact: Artifact, step: Step, inputs: list[Tensor]) -> _Results:
    manifest = artifact.manifest
    named = _host(step)
    params = {k.removeprefix("param/"): t for k, t in named.items() if k.startswith("param/")}
    if not any(s in p.sections for p in manifest.programs.values() for s in ("fwd", "bwd")):
        return _run_inference(step, inputs, manifest.num_model_inputs, params)
    for optimizer in step.optimizers:
        optimizer.zero_grad(set_to_none=True)
    for p in params.values():
        p.grad = None
    collected: list[list[Tensor]] = []
    leaves: list[Tensor] = []
    num_micro = manifest.num_micro_batches
    for micro in range(num_micro):
        leaves = _leaves(manifest, step, inputs, micro, num_micro)
        model_inputs, targets = unflatten(manifest.input_structure, iter(leaves))
        probabilities = _probabilities(artifact)
        with seeded(torch.tensor(next_seed(_SEED, micro)), probabilities):
            with torch.autocast("cpu", torch.bfloat16, enabled=step.precision == "bfloat16"):
                output = step.call_model(model_inputs)
                outputs, _ = flatten(output)
                if step.loss_function is not None:
                    outputs = [step.call_loss(output, targets), *outputs]
        sources = [o for a, o in zip(manifest.outputs, outputs, strict=True) if a.name in manifest.losses]
        sources = sources or [o for o in outputs if o.requires_grad]
        scale = 1.0 / num_micro if manifest.accumulate == "mean" else 1.0
        if sources:
            torch.autograd.backward(sources, [torch.full_like(s, scale) for s in sources])
        collected.append([o.detach().clone() for o in outputs])
    gradients = {k: p.grad.detach().clone() for k, p in params.items() if p.grad is not None}
    for argument, leaf in zip(manifest.inputs, leaves, strict=True):
        if leaf.grad is not None:
            gradients[f"input/{argument.name}"] = leaf.grad.clone()
    trained = [p for opt in step.optimizers for g in opt.param_groups for p in g["params"] if p.grad is not None]
    if step.clip_value is not None:
        torch.nn.utils.clip_grad_value_(trained, step.clip_value)
    if step.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trained, step.clip_norm)
    for optimizer in step.optimizers:
        optimizer.step()
    joined = [_join(list(parts), manifest.batch_dim) for parts in zip(*collected, strict=True)]
    by_id = {id(p): k for k, p in params.items()}
    state = {
        f"{by_id[id(p)]}/{key}": value.detach().clone()
        for opt in step.optimizers
        for p, values in opt.state.items()
        for key, value in values.items()
        if id(p) in by_id and isinstance(value, Tensor) and key != "step"
    }
    return _Results(
        dict(zip([a.name for a in manifest.outputs], joined, strict=True)),
        gradients,
        {k: p.detach().clone() for k, p in params.items()},
        state,
        # read again: forward may have put new tensors in their place
        {k.removeprefix("buffer/"): b.detach().clone() for k, b in _host(step).items() if k.startswith("buffer/")},
    )


def _host(step: Step) -> dict[str, Tensor]:
    return host_tensors(step.model, _loss_module(step))


def _run_inference(step: Step, inputs: list[Tensor], count: int, params: dict[str, Tensor]) -> _Results:
    structure = flatten(step.inputs if isinstance(step.inputs, (tuple, list, dict)) else (step.inputs,))[1]
    training = step.model.training
    step.model.eval()
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=step.precision == "bfloat16"):
            leaves, shape = flatten(step.call_model(unflatten(structure, iter(inputs[:count]))))
    finally:
        step.model.train(training)
    return _Results(dict(zip(names(shape, "output"), leaves, strict=True)), {}, dict(params), {}, {})


def _join(parts: list[Tensor], batch_dim: int | None) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].dim() == 0 or batch_dim is None or batch_dim >= parts[0].dim():
        return torch.stack(parts)
    return torch.cat(parts, dim=batch_dim)


def _probabilities(artifact: Artifact) -> list[Tensor]:
    """Dropout probabilities in site order: hyperparameters that belong to no optimizer and no clipping."""
    return [
        torch.tensor(value, dtype=torch.float64) for name, value in artifact.manifest.hyperparameters.items() if is_dropout(name)
    ]


def _leaves(manifest: Any, step: Step, inputs: list[Tensor], micro: int, num_micro: int) -> list[Tensor]:
    own = [*flatten(step.inputs)[0], *flatten(step.targets)[0]]
    found = []
    for argument, value, example in zip(manifest.inputs, inputs, own, strict=True):
        shape = argument.type.shape
        if num_micro > 1 and shape and list(value.shape) != shape:
            value = value.chunk(num_micro, dim=manifest.batch_dim)[micro]
        leaf = value.detach().clone()
        found.append(leaf.requires_grad_() if example.requires_grad else leaf)
    return found


def _step_inputs(artifact: Artifact, step: Step) -> list[Tensor]:
    """The example inputs, once a micro-batch, rolled along the batch so that micro-batches differ."""
    leaves = [*flatten(step.inputs)[0], *flatten(step.targets)[0]]
    num, dim = artifact.manifest.num_micro_batches, artifact.manifest.batch_dim
    if num == 1 or dim is None:
        return [t.detach() for t in leaves]
    return [
        torch.cat([t.detach().roll(i, dims=dim) for i in range(num)], dim=dim) if t.dim() > dim else t.detach() for t in leaves
    ]


@contextmanager
def _restored(step: Step) -> Iterator[None]:
    """The user's parameters, buffers, gradients and optimizer state, put back whatever happens."""
    tensors = list(_host(step).values())
    registered = [(m, dict(m._buffers)) for _, root in step.modules for m in root.modules()]
    tensors += [p for o in step.optimizers for g in o.param_groups for p in g["params"] if all(p is not t for t in tensors)]
    values = [t.detach().clone() for t in tensors]
    grads = [t.grad for t in tensors]
    states = [copy.deepcopy(o.state_dict()) for o in step.optimizers]
    try:
        yield
    finally:
        for module, own in registered:
            module._buffers.clear()
            module._buffers.update(own)
        with torch.no_grad():
            for t, value, grad in zip(tensors, values, grads, strict=True):
                t.data.copy_(value)
                t.grad = grad
        for optimizer, state in zip(step.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def _loss_module(step: Step) -> torch.nn.Module | None:
    return step.loss if isinstance(step.loss, torch.nn.Module) else None


def _allowance(artifact: Artifact, expected: _Results) -> dict[str, Tensor]:
    """How far rounding noise in a gradient may move a parameter: normalised rules turn even a tiny gradient into a
    step of about lr, so an element whose gradient is nearly noise can go either way."""
    found = {}
    hyper = artifact.manifest.hyperparameters
    overall = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0.0)
    for group in artifact.manifest.groups:
        if group.rule not in _NORMALISED:
            continue
        lr, eps = hyper[f"{group.prefix}.lr"], hyper[f"{group.prefix}.eps"]
        for name in group.params:
            if name in expected.gradients:
                g = expected.gradients[name].double().abs()
                noise = _GRADIENT_NOISE * max(float(g.max()), 0.1 * overall)
                found[name] = lr * (2.0 * noise / (g + eps)).clamp(max=2.0)
    return found


# ---- graph only ----


def random_inputs(artifact: Artifact, seed: int = 0) -> list[Tensor]:
    """Inputs of the right shapes: normal numbers, and 0 or 1 for integers, which are valid classes everywhere."""
    generator = torch.Generator().manual_seed(seed)
    num, dim = artifact.manifest.num_micro_batches, artifact.manifest.batch_dim
    found = []
    for argument in artifact.manifest.inputs:
        shape, dtype = list(argument.type.shape), DTYPES[argument.type.dtype]
        if dim is not None and len(shape) > dim:
            shape[dim] *= num
        if dtype.is_floating_point:
            found.append(torch.randn(shape, generator=generator).to(dtype))
        else:
            found.append(torch.randint(0, 2, shape, generator=generator).to(dtype))
    return found


def _graph_only(artifact: Artifact, device: str | None) -> Report:
    inputs = random_inputs(artifact)
    results = []
    for name in (device or artifact.manifest.fingerprint.device, "reference"):
        with Session(artifact, device=name, seed=_SEED) as session:
            session.load_tensors(_some_weights(session))
            results.append((_run_artifact(session, inputs), session.device_name))
    (found, used), (expected, _) = results
    low = artifact.manifest.precision == "bfloat16"
    rows = compare("output", found.outputs, expected.outputs, low_precision=low)
    rows += compare("gradient", found.gradients, expected.gradients, low_precision=low)
    rows += compare("parameter", found.parameters, expected.parameters, low_precision=low,
                    allowance=_allowance(artifact, expected))  # fmt: skip
    rows += compare("state", found.state, expected.state, low_precision=low)
    rows += compare("buffer", found.buffers, expected.buffers, low_precision=low)
    return Report("graph only", used, rows)


def _some_weights(session: Session) -> dict[str, Tensor]:
    """The session's weights where it has them; small random ones otherwise."""
    if session._has_weights:
        return session.tensors()
    generator = torch.Generator().manual_seed(1)
    found = session.tensors()
    for name, t in found.items():
        if name.startswith("param/") and t.is_floating_point():
            found[name] = torch.randn(t.shape, generator=generator).to(t.dtype) * 0.05
        elif name.startswith("buffer/") and t.is_floating_point():
            found[name] = torch.ones_like(t)
    return found
