"""The two sides of a check, each as tensors by way and kind: what the artifact's programs compute, and what the user's untouched
module computes in eager PyTorch with torch's own autograd and optimizers.

Ways: "infer", the model in eval mode; "fused", a whole step in one call; "again", the step after it; "sections", fwd, bwd and opt
one by one. Random numbers of the module are those of the artifact, injected from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from ..artifact.manifest import Manifest, Signature
from ..artifact.names import Buffer, Hyper, Kind, hyper_kind, is_kind
from ..artifact.random import next_seed
from ..artifact.structure import flatten, flatten_outputs, names, unflatten
from ..capture.seeded import seeded
from ..capture.snapshot import Snapshot
from ..errors import MachineError
from ..runtime.calls import Calls
from ..runtime.devices import inference_base
from ..runtime.session import Session
from ..runtime.sync import host_tensors
from ..step import Step

SEED = 20240229

Tensors = dict[str, Tensor]
Results = dict[str, dict[str, Tensors]]  # way -> kind (output, gradient, its norm, parameter, state, buffer) -> name -> tensor


# ---- the artifact's side ----


def run_artifact(session: Session, calls: Calls, inputs: list[Tensor], failed: dict[str, str] | None = None) -> Results:
    """Every way that the artifact can run a signature, each from the weights that the session has now. Native code that fails
    goes into `failed`, by what the program does, where that is given."""
    found = Results()
    start = session.tensors()

    def attempt(way: Callable[[Session, Calls, list[Tensor], Results], None], role: Callable[[], str]) -> None:
        session.load_tensors(start)
        session.seed(SEED)
        try:
            way(session, calls, inputs, found)
        except MachineError as e:
            if failed is None or e.id != "native-run":
                raise
            failed[role()] = e.summary

    if "infer" in calls.programs:
        attempt(_run_inference, lambda: "infer")
    if calls.fused is not None and calls.signature.losses:
        attempt(_run_fused, lambda: str(calls.fused))
    if "fwd" in calls.programs and calls.signature.num_micro_batches == 1:
        attempt(_run_sections, lambda: ("fwd", "bwd", "opt")[min(len(found.pop("sections", {})), 2)])
    return found


def _run_inference(session: Session, calls: Calls, inputs: list[Tensor], found: Results) -> None:
    s = calls.signature
    leaves, _ = flatten(session.infer(*_one_batch(s, inputs), signature=s.name))
    found["infer"] = {"output": dict(zip([a.name for a in s.infer_outputs], leaves, strict=True))}


def _run_fused(session: Session, calls: Calls, inputs: list[Tensor], found: Results) -> None:
    s = calls.signature
    found["fused"] = {"output": _named_outputs(s, session.run(*inputs, signature=s.name))}
    if calls.fused == "accumulate":
        found["fused"]["gradient"] = session.gradients()
    found["fused"] |= _state(session)
    with _update_in_parts(session, calls):
        found["again"] = {"output": _named_outputs(s, session.run(*inputs, signature=s.name)), **_state(session)}


class _AllParts:
    """An update in parts (plan/shards.py), all of them here: what replicas would share out."""

    def __init__(self, roles: Sequence[str]) -> None:
        self.own, self.rest = [r for r in roles if r != "opt_rest"], [r for r in roles if r == "opt_rest"]

    def exchange(self) -> None: ...

    def reduce(self, buckets: Sequence[Tensor]) -> None: ...


@contextmanager
def _update_in_parts(session: Session, calls: Calls) -> Iterator[None]:
    """The second step is the one that tries them, where an artifact has them."""
    roles = [r for r in calls.programs if r.startswith("opt_")]
    if not roles:
        yield
        return
    parts: Any = _AllParts(roles)
    session.reduce_with(parts)
    session._running.shards = parts
    try:
        yield
    finally:
        session._running.shards = None
        session.reduce_with(None)


def _run_sections(session: Session, calls: Calls, inputs: list[Tensor], found: Results) -> None:
    made, s = dict[str, Tensors](), calls.signature
    found["sections"] = made
    made["output"] = _named_outputs(s, session.run(*inputs, sections=["fwd"], signature=s.name))
    if "bwd" in calls.sections:
        ones = {k: torch.ones_like(t) for k, t in made["output"].items() if s.buffer(Kind.OUTGRAD, k) in session.memory}
        session.run(sections=["bwd"], out_grads=None if s.losses else ones, signature=s.name)
        made["gradient"] = session.gradients()
    if "opt" in calls.sections:
        session.run(sections=["opt"], signature=s.name)
    made |= _state(session)


def _state(session: Session) -> dict[str, Tensors]:
    """What training changes, by kind."""
    tensors = {Buffer(k): t for k, t in session.tensors().items() if not k.endswith("/step")}

    def of(kind: Kind) -> Tensors:
        return {b.name: t for b, t in tensors.items() if b.kind == kind}

    made = {"parameter": of(Kind.PARAM), "state": of(Kind.STATE), "buffer": of(Kind.BUFFER)}
    if Kind.NORM.of("count") in session.memory and int(session.memory.read(Kind.NORM.of("count"))):
        made["gradient norm"] = {"total": session.grad_norms()[0]}
    return made


def _named_outputs(signature: Signature, result: Any) -> Tensors:
    leaves, _ = flatten(result.outputs)
    named = [a.name for a in signature.outputs]
    if signature.separate_loss:
        losses = result.losses if result.losses.shape[0] > 1 else result.losses[0]
        leaves = [losses, *leaves]
    return dict(zip(named, leaves, strict=True))


# ---- the module's side ----


def run_module(
    manifest: Manifest, signature: Signature, step: Step, inputs: list[Tensor], *, shaken_by: float = 0.0, seed: int = 1
) -> Results:
    """Two steps, and inference before them. The module and its optimizers are put back as they were. `shaken_by`: weights and
    inputs are changed by so many units in their last place before, which shows how much noise the arithmetic makes."""
    found: Results = {}
    trains = any(role not in ("infer", "opt") for role in signature.programs)
    with shaken(step, inputs, shaken_by, seed) as inputs:
        if "infer" in signature.programs:
            found["infer"] = {"output": _infer(step, _one_batch(signature, inputs))}
        if trains:
            found["fused"] = found["sections"] = _train(manifest, signature, step, inputs, 0)
            found["again"] = _train(manifest, signature, step, inputs, 1)
    return found


@contextmanager
def shaken(step: Step, inputs: list[Tensor], units: float, seed: int) -> Iterator[list[Tensor]]:
    """The inputs and, until the end, the step's weights changed by so many units in their last place."""
    with restored(step):
        if units:
            generator = torch.Generator().manual_seed(seed)
            inputs = [_shaken(t, units, generator) for t in inputs]
            with torch.no_grad():
                for t in host(step).values():
                    t.data.copy_(_shaken(t, units, generator))
        yield inputs


def _shaken(t: Tensor, units: float, generator: torch.Generator) -> Tensor:
    """Each element up or down by so many units in its last place."""
    if t.is_complex():
        return torch.view_as_complex(_shaken(torch.view_as_real(t.detach()), units, generator))
    if not t.is_floating_point():
        return t
    by = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
    return (t.detach() * (1 + units * torch.finfo(t.dtype).eps * by.to(t.dtype))).to(t.dtype)


def _train(manifest: Manifest, signature: Signature, step: Step, inputs: list[Tensor], number: int) -> dict[str, Tensors]:
    """One whole step, the `number`-th."""
    params = {Buffer(k).name: t for k, t in host(step).items() if is_kind(k, Kind.PARAM)}
    for optimizer in step.optimizers:
        optimizer.zero_grad(set_to_none=True)
    for p in params.values():
        p.grad = None
    collected: list[list[Tensor]] = []
    leaves: list[Tensor] = []
    num_micro = signature.num_micro_batches
    for micro in range(num_micro):
        leaves = _leaves(signature, step, inputs, micro, num_micro)
        model_inputs, targets = unflatten(signature.input_structure, iter(leaves))
        with seeded(torch.tensor(next_seed(SEED, number * num_micro + micro)), _probabilities(manifest), skips=signature.skips):
            with step.autocast():
                output = step.call_model(model_inputs)
                outputs, *_ = flatten_outputs(output)
                if step.loss_function is not None:
                    outputs = [step.call_loss(output, targets), *outputs]
            sources = [o for a, o in zip(signature.outputs, outputs, strict=True) if a.name in signature.losses]
            # A loss has no gradient where random numbers have left out all that has parameters.
            sources = [o for o in sources or outputs if o.requires_grad]
            scale = 1.0 / num_micro if signature.accumulate == "mean" else 1.0
            if sources:
                seeds = tuple(torch.full_like(s, scale) for s in sources)
                # torch.autograd.backward by another name, which modes over torch's functions do not intercept (capture/trace.py)
                _engine_run_backward(tuple(sources), seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
        collected.append([o.detach().clone() for o in outputs])
    gradients = {k: p.grad.detach().clone() for k, p in params.items() if p.grad is not None}
    for argument, leaf in zip(signature.inputs, leaves, strict=True):
        if leaf.grad is not None:
            gradients[f"input/{argument.name}"] = leaf.grad.clone()
    trained = [p for opt in step.optimizers for g in opt.param_groups for p in g["params"] if p.grad is not None]
    norm = {}
    if Kind.NORM.of("count") in manifest.buffers:
        norm["total"] = torch.nn.utils.get_total_norm([p.grad.float() for p in trained if p.grad is not None])
    if step.clip_value is not None:
        torch.nn.utils.clip_grad_value_(trained, step.clip_value)
    if step.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(trained, step.clip_norm)
    for optimizer in step.optimizers:
        optimizer.step()
    joined = [_join(list(parts), signature.batch_dim) for parts in zip(*collected, strict=True)]
    by_id = {id(p): k for k, p in params.items()}
    state = {
        f"{by_id[id(p)]}/{key}": value.detach().clone()
        for opt in step.optimizers
        for p, values in opt.state.items()
        for key, value in values.items()
        if id(p) in by_id and isinstance(value, Tensor) and key != "step"
    }
    # read again: forward may have put new tensors in their place
    buffers = {Buffer(k).name: b.detach().clone() for k, b in host(step).items() if is_kind(k, Kind.BUFFER)}
    return {
        "output": dict(zip([a.name for a in signature.outputs], joined, strict=True)),
        "gradient": gradients,
        "gradient norm": norm,
        "parameter": {k: p.detach().clone() for k, p in params.items()},
        "state": state,
        "buffer": buffers,
    }


def _infer(step: Step, inputs: list[Tensor]) -> Tensors:
    for gradients in (False, True):  # a model that takes gradients in forward cannot do without
        try:
            with restored(step, optimizers=False), torch.set_grad_enabled(gradients):
                return _outputs_of(step, inputs)
        except RuntimeError as e:
            if gradients or "does not require grad" not in str(e):
                raise
    raise AssertionError


def _outputs_of(step: Step, inputs: list[Tensor]) -> Tensors:
    structure = flatten(step.inputs if isinstance(step.inputs, (tuple, list, dict)) else (step.inputs,))[1]
    for _, root in step.modules:
        root.eval()
    own = [t.detach().clone() for t in inputs]
    with seeded(torch.tensor(next_seed(inference_base(SEED), 0))), step.autocast():
        leaves, shape, _ = flatten_outputs(step.call_model(unflatten(structure, iter(own))))
    return {k: t.detach().clone() for k, t in zip(names(shape, "output"), leaves, strict=True)}


def _one_batch(signature: Signature, inputs: list[Tensor]) -> list[Tensor]:
    """The model's inputs for one micro-batch."""
    found = []
    for argument, value in zip(signature.inputs[: signature.num_model_inputs], inputs, strict=False):
        several = list(value.shape) != argument.type.shape
        found.append(value.chunk(signature.num_micro_batches, dim=signature.batch_dim or 0)[0] if several else value)
    return found


def host(step: Step) -> Tensors:
    return host_tensors(step.model, loss_module(step))


def loss_module(step: Step) -> torch.nn.Module | None:
    return step.loss if isinstance(step.loss, torch.nn.Module) else None


def _join(parts: list[Tensor], batch_dim: int | None) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].dim() == 0 or batch_dim is None or batch_dim >= parts[0].dim():
        return torch.stack(parts)
    return torch.cat(parts, dim=batch_dim)


def _probabilities(manifest: Manifest) -> list[Tensor]:
    """Dropout probabilities in site order."""
    hyper = manifest.hyperparameters.items()
    return [torch.tensor(value, dtype=torch.float64) for name, value in hyper if hyper_kind(name) == Hyper.DROPOUT]


def _leaves(signature: Signature, step: Step, inputs: list[Tensor], micro: int, num_micro: int) -> list[Tensor]:
    own = [*flatten(step.inputs)[0], *flatten(step.targets)[0]]
    found = []
    for argument, value, example in zip(signature.inputs, inputs, own, strict=True):
        shape = argument.type.shape
        if num_micro > 1 and shape and list(value.shape) != shape:
            value = value.chunk(num_micro, dim=signature.batch_dim or 0)[micro]
        leaf = value.detach().clone()
        found.append(leaf.requires_grad_() if example.requires_grad else leaf)
    return found


@contextmanager
def restored(step: Step, *, optimizers: bool = True) -> Iterator[None]:
    """The user's objects, put back whatever happens: what modules hold in Python, parameters, buffers, gradients, and the state
    of optimizers."""
    snapshot = Snapshot(step.modules)
    tensors = list(host(step).values())
    tensors += [p for o in step.optimizers for g in o.param_groups for p in g["params"] if all(p is not t for t in tensors)]
    kept = [(t, t.detach().clone(), t.grad) for t in tensors]
    states = [copy.deepcopy(o.state_dict()) for o in step.optimizers] if optimizers else []
    try:
        yield
    finally:
        snapshot.restore()
        with torch.no_grad():
            for t, value, grad in kept:
                t.data.copy_(value)
                t.grad = grad
        for optimizer, state in zip(step.optimizers, states, strict=False):
            optimizer.load_state_dict(state)
