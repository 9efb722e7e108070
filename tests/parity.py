"""The user's untouched module in eager PyTorch beside an artifact, written independently of tilework.check.

`train_eager` trains a twin (made by the same function, so no deep copy) with torch's own autograd and optimizer. Random
numbers are the artifact's: the same mask is injected on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import tilework
from tilework.artifact.random import next_seed
from tilework.artifact.structure import flatten, unflatten
from tilework.capture.seeded import seeded
from tilework.reach import hidden_parameters

FIRST_STEP = 1e-5  # relative: loss, gradients and updated parameters after one step in float32
LATER_LOSSES = 1e-3  # relative: the losses of 20 steps
NOISE = 1.0  # times the floor below (1e-3 of the largest gradient): under it, rounding decides on the direction of an update
SEED = 5


@dataclass
class Trace:
    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, before clipping
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the first step
    buffers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


def batches(step: tilework.Step, count: int) -> list[list[Tensor]]:
    """Flat inputs of `count` micro-batches: the example, then others like it."""
    leaves = [*flatten(step.inputs)[0], *flatten(step.targets)[0]]
    g = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        batch = []
        for leaf in leaves:
            if leaf.dtype == torch.bool:
                batch.append(leaf)
            elif leaf.is_floating_point():
                binary = set(leaf.detach().unique().tolist()) <= {0.0, 1.0}
                new = torch.randint(0, 2, leaf.shape, generator=g).float() if binary else torch.randn(leaf.shape, generator=g)
                batch.append(new)
            else:
                batch.append(torch.randint(0, int(leaf.max()) + 1, leaf.shape, generator=g))
        found.append(batch)
    return found


def losses_of(step: tilework.Step, outputs: list[Tensor], output: object, targets: object) -> list[Tensor]:
    """What backward starts from, decided here by hand rather than by the code under test."""
    if callable(step.loss):
        return [step.call_loss(output, targets)]
    if isinstance(step.loss, int):
        return [outputs[step.loss]]
    if isinstance(step.loss, list):
        return list(output["loss"])  # type: ignore[index]
    return [o for o in outputs if o.dim() == 0]


def train_eager(step: tilework.Step, data: list[list[Tensor]]) -> Trace:
    trace, micro = Trace(), step.num_micro_batches
    call = step.inputs if isinstance(step.inputs, (tuple, list, dict)) else (step.inputs,)
    own, input_structure = flatten(call)
    target_structure = flatten(step.targets)[1]
    for at in range(0, len(data), micro):
        for opt in step.optimizers:
            opt.zero_grad()
        total = None
        for i in range(micro):
            leaves = [t.clone() for t in data[at + i]]
            for leaf, example in zip(leaves, own, strict=False):
                leaf.requires_grad_(example.requires_grad)
            inputs = unflatten(input_structure, iter(leaves[: len(own)]))
            targets = unflatten(target_structure, iter(leaves[len(own) :]))
            with seeded(torch.tensor(next_seed(SEED, at + i))):
                with torch.autocast("cpu", torch.bfloat16, enabled=step.precision == "bfloat16"):
                    output = step.call_model(inputs)
                    losses = losses_of(step, flatten(output)[0], output, targets)
            objective = sum(loss.sum() for loss in losses) / micro
            objective.backward()
            value = sum(loss.detach() for loss in losses) / micro
            total = value if total is None else total + value
        trace.losses.append(total)
        named = {**dict(step.model.named_parameters()), **hidden_parameters(step.model)}
        if at == 0:
            trace.gradients = {k: p.grad.clone() for k, p in named.items() if p.grad is not None}
            for i, (leaf, example) in enumerate(zip(leaves, own, strict=False)):
                if example.requires_grad:
                    trace.gradients[f"input{i}"] = leaf.grad.clone()
        params = [p for opt in step.optimizers for g in opt.param_groups for p in g["params"]]
        if step.clip_value:
            torch.nn.utils.clip_grad_value_(params, step.clip_value)
        if step.clip_norm:
            torch.nn.utils.clip_grad_norm_(params, step.clip_norm)
        for opt in step.optimizers:
            opt.step()
        if at == 0:
            trace.parameters = {k: p.detach().clone() for k, p in named.items()}
            trace.buffers = {k: b.clone() for k, b in step.model.named_buffers()}
    return trace


def train_session(session: tilework.Session, step: tilework.Step, data: list[list[Tensor]], *, sections: bool) -> Trace:
    """The same from the artifact: fused, or section by section (which also shows the gradients)."""
    trace, micro = Trace(), step.num_micro_batches
    dim = session.manifest.signature.batch_dim
    for at in range(0, len(data), micro):
        group = data[at : at + micro]
        flat = group[0] if micro == 1 else [torch.cat(parts, dim=dim) for parts in zip(*group, strict=True)]
        result = session.run(*flat, keep_gradients=sections)
        trace.losses.append(result.loss)
        if at == 0:
            if sections:
                trace.gradients = session.gradients()
            trace.parameters = {k: t for k, t in session.state_dict().items() if f"param/{k}" in session.memory}
            trace.buffers = {k: t for k, t in session.state_dict().items() if f"buffer/{k}" in session.memory}
    return trace


def relative(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    scale = max(float(expected.detach().abs().max()), floor, 1e-12)
    return float((found.detach().double() - expected.detach().double()).abs().max()) / scale


def assert_same(found: Trace, expected: Trace, *, first: float = FIRST_STEP, later: float = LATER_LOSSES) -> None:
    assert relative(found.losses[0], expected.losses[0]) <= first, "loss of the first step"
    # A gradient that cancels to nearly zero carries the rounding noise of the terms that cancelled.
    floor = 1e-3 * max((float(g.abs().max()) for g in expected.gradients.values()), default=0.0)
    if found.gradients:
        parameters = {k: g for k, g in expected.gradients.items() if not k.startswith("input")}
        assert set(parameters) == {k for k in found.gradients if not k.startswith("input/")}
        for name, gradient in parameters.items():
            assert relative(found.gradients[name], gradient, floor) <= first, f"gradient of {name}"
        for mine, theirs in zip(
            [g for k, g in found.gradients.items() if k.startswith("input/")],
            [g for k, g in expected.gradients.items() if k.startswith("input")], strict=True,
        ):  # fmt: skip
            assert relative(mine, theirs) <= first, "gradient of an input"
    assert set(found.parameters) == set(expected.parameters)
    compared = total = 0
    for name, parameter in expected.parameters.items():
        # Adam and its kin divide a gradient by its own size, so where it is rounding noise (a bias before a softmax or a
        # BatchNorm, whose true gradient is zero) the direction of the update is noise too. Those elements do not count.
        gradient = expected.gradients.get(name)
        counts = torch.ones_like(parameter, dtype=torch.bool) if gradient is None else gradient.abs() > NOISE * floor
        mine, theirs = found.parameters[name][counts], parameter[counts]
        compared, total = compared + counts.sum().item(), total + counts.numel()
        if theirs.numel():
            assert relative(mine, theirs, floor=1e-2) <= first, f"updated parameter {name}"
    assert compared >= 0.5 * total, "too few elements were compared"
    assert set(found.buffers) == set(expected.buffers)
    for name, buffer in expected.buffers.items():
        assert relative(found.buffers[name], buffer, floor=1e-2) <= first, f"buffer {name}"
    for i, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert relative(mine, theirs) <= later, f"loss of step {i + 1}"
