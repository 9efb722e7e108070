"""One program on three sides: eager PyTorch with torch.optim, the `reference` device, and the `cpu` device as it ships.

Where a tensor differs by more than rounding, eager PyTorch itself is asked how firm its numbers are: the program runs again
with parameters and inputs changed in their last digits. Differences of the size that this makes are the program's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from programs import Recipe, make, source
from torch import Tensor
from writer import WORDS

import tilework
from tilework.artifact.random import next_seed
from tilework.artifact.structure import flatten, unflatten
from tilework.capture.seeded import seeded
from tilework.errors import UserError

SEED, STEPS = 5, 3
CLOSE = 2e-5  # relative to the largest element
WOBBLE, TIMES = 3e-7, 30  # how much inputs are changed, and how much of what that does is accepted
Values = dict[str, Tensor]  # "1/param/p3": after which step, what, which


class Differs(AssertionError):
    pass


@dataclass
class Outcome:
    refused: str = ""  # the id of the UserError
    wobbly: bool = False  # some tensor was accepted for what eager PyTorch itself does
    devices: list[str] = field(default_factory=list)


def batches(step: tilework.Step) -> list[list[Tensor]]:
    """Flat inputs and targets of every micro-batch of every step: others than the example."""
    g = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS * step.num_micro_batches):
        batch = []
        for leaf in [*flatten(step.inputs)[0], *flatten(step.targets)[0]]:
            if leaf.dtype == torch.bool:
                batch.append(torch.rand(leaf.shape, generator=g) > 0.5)
            elif leaf.is_floating_point():
                batch.append(torch.randn(leaf.shape, generator=g).to(leaf.dtype))
            else:
                most = WORDS if leaf.dim() == 2 else int(leaf.max()) + 1
                batch.append(torch.randint(0, most, leaf.shape, generator=g))
        found.append(batch)
    return found


def losses_of(step: tilework.Step, output: Any, targets: Any) -> list[Tensor]:
    if callable(step.loss):
        return [step.call_loss(output, targets)]
    if step.loss == 0:
        return [output[0]]
    if step.loss == "loss":
        return [output["loss"]]
    return list(output) if isinstance(step.loss, list) else [output]


def eager(step: tilework.Step, data: list[list[Tensor]], wobble: int = 0) -> Values:
    found: Values = {}
    g = torch.Generator().manual_seed(wobble)

    def shaken(t: Tensor) -> Tensor:
        return t * (1 + WOBBLE * torch.randn(t.shape, generator=g, dtype=torch.float64)).to(t.dtype)

    if wobble:
        with torch.no_grad():
            for p in step.model.parameters():
                p.copy_(shaken(p))
    micro, own = step.num_micro_batches, len(flatten(step.inputs)[0])
    structure, target_structure = flatten(step.inputs)[1], flatten(step.targets)[1]
    for i in range(STEPS):
        for optimizer in step.optimizers:
            optimizer.zero_grad()
        total: Any = 0
        for j in range(micro):
            leaves = [t.clone() for t in data[i * micro + j]]
            if wobble:
                leaves = [shaken(t) if t.is_floating_point() else t for t in leaves]
            leaves[0].requires_grad_(flatten(step.inputs)[0][0].requires_grad)
            with seeded(torch.tensor(next_seed(SEED, i * micro + j))):
                output = step.call_model(unflatten(structure, iter(leaves[:own])))
                losses = losses_of(step, output, unflatten(target_structure, iter(leaves[own:])))
                (sum(loss.sum() for loss in losses) / micro).backward()  # type: ignore[union-attr]
            total = total + sum(loss.detach() for loss in losses) / micro
            if micro == 1:
                found |= {f"{i}/output/{k}": o.detach().clone() for k, o in enumerate(flatten(output)[0])}
        found[f"{i}/loss"] = total.double()
        named = dict(step.model.named_parameters())
        found |= {f"{i}/grad/{k}": p.grad.clone() for k, p in named.items() if p.grad is not None}
        if leaves[0].grad is not None and micro == 1:
            found[f"{i}/grad/input/x"] = leaves[0].grad.clone()
        params = [p for o in step.optimizers for group in o.param_groups for p in group["params"]]
        params = [p for p in params if p.grad is not None]
        if step.clip_value and params:
            torch.nn.utils.clip_grad_value_(params, step.clip_value)
        if step.clip_norm and params:
            torch.nn.utils.clip_grad_norm_(params, step.clip_norm)
        for optimizer in step.optimizers:
            optimizer.step()
        found |= {f"{i}/param/{k}": p.detach().clone() for k, p in named.items()}
        found |= {f"{i}/buffer/{k}": b.clone() for k, b in step.model.named_buffers()}
        names = {id(p): k for k, p in named.items()}
        groups = [(f"opt{at}.g{k}", o, group) for at, o in enumerate(step.optimizers) for k, group in enumerate(o.param_groups)]
        for group_name, optimizer, group in groups:
            for p in group["params"]:
                for key, value in optimizer.state.get(p, {}).items():
                    if key == "step":
                        found[f"{i}/state/{group_name}/step"] = value.long()
                    elif value is not None:
                        found[f"{i}/state/{names[id(p)]}/{key}"] = value.clone()
    return found


def joined(group: list[list[Tensor]]) -> list[Tensor]:
    return group[0] if len(group) == 1 else [torch.cat(parts) for parts in zip(*group, strict=True)]


def native(session: tilework.Session, step: tilework.Step, data: list[list[Tensor]], *, sections: bool) -> Values:
    """The same values from a session: one fused call a step, or section by section, which also shows the gradients."""
    found: Values = {}
    micro = step.num_micro_batches
    for i in range(STEPS):
        flat = joined(data[i * micro : (i + 1) * micro])
        if sections and micro == 1 and i % 2:  # three calls, rather than one that does all three
            result = session.run(*flat, sections=["fwd"])
            session.run(sections=["bwd"])
            found |= {f"{i}/grad/{k}": g for k, g in session.gradients().items()}
            session.run(sections=["opt"])
        else:
            result = session.run(*flat, keep_gradients=sections)
            if sections:
                found |= {f"{i}/grad/{k}": g for k, g in session.gradients().items()}
        found[f"{i}/loss"] = result.loss.double()
        if micro == 1:
            found |= {f"{i}/output/{k}": o.clone() for k, o in enumerate(flatten(result.outputs)[0])}
        found |= {f"{i}/{k}": t for k, t in session.tensors().items()}
    return found


def looped(session: tilework.Session, data: list[list[Tensor]], single: Values) -> str:
    """Several steps in one call must give the very same bits as one call for each. Says what does not."""
    session.run(*joined(data), num_steps=STEPS)
    for name, t in session.tensors().items():
        if not torch.equal(t, single[f"{STEPS - 1}/{name}"]) and not bool(t.isnan().any()):
            return f"{name} after {STEPS} steps in one call is not what {STEPS} calls give"
    return ""


def distance(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    a, b = found.detach().double().reshape(-1), expected.detach().double().reshape(-1)
    if not a.numel():
        return 0.0
    apart = (a - b).abs()
    apart[(a == b) | (a.isnan() & b.isnan())] = 0
    return float(apart.nan_to_num(nan=float("inf")).max())


def differing(found: Values, expected: Values, again: Callable[[int], Values]) -> tuple[str, bool]:
    """The first tensor that differs, "" if there is none; and whether some are only as firm as eager PyTorch's own."""
    shaken: list[Values] = []
    wobbly = False
    for name, theirs in expected.items():
        if "/grad/" in name and not any("/grad/" in k for k in found):
            continue
        if name not in found:
            if "/grad/input/" in name or name.startswith(tuple(f"{i}/buffer/" for i in range(STEPS))):
                continue  # an input whose gradient nobody asked for; a buffer that is a constant of the program
            return f"{name} is missing", wobbly
        scale = max(1e-3, float(theirs.detach().double().abs().nan_to_num(0, 0, 0).max()) if theirs.numel() else 0)
        apart = distance(found[name], theirs)
        if apart <= CLOSE * scale:
            continue
        shaken = shaken or [again(k) for k in range(1, 6)]
        own = max(distance(s[name], theirs) if name in s else 0 for s in shaken)
        if not apart <= TIMES * own:
            return f"{name}: {apart:.3g} apart, largest {scale:.3g} (eager moves by {own:.2g})", wobbly
        wobbly = True
    return "", wobbly


def check(recipe: Recipe, folder: Path, devices: tuple[str, ...] = ("reference", "cpu")) -> Outcome:
    """Differs, or any other exception, where something is wrong."""
    outcome = Outcome()
    step, twin = make(recipe), make(recipe, plain=True)
    data = batches(step)
    expected = eager(twin, data)
    sections = recipe["variant"] == "sections"
    disable = (recipe["without"],) if recipe["variant"] == "without" else ()
    # Mostly without its self-check: what the compiler mends on its own account would stay unseen. "shipped": that it does.
    verify = recipe["variant"] in ("verified", "shipped")
    path = folder / "fuzz.pef"
    options = tilework.Options(
        device=devices[-1],
        disable=disable,
        programs="all" if sections else "fused",
        piece_size=recipe.get("piece_size", 400),
    )
    try:
        made = tilework.compile(step, path, options=options, weights="inside", verify=verify)
    except UserError as e:
        outcome.refused = e.id
        return outcome
    if made.verification.retreats and recipe["variant"] != "shipped":
        raise Differs(f"verify: the compiler retreats: {made.verification.retreats}\n{source(recipe)}\n{recipe}")
    for device in devices:
        with tilework.load(path, device=device, seed=SEED, trust=True) as session:
            found = native(session, step, data, sections=sections)
        wrong, wobbly = differing(found, expected, lambda k: eager(make(recipe, plain=True), data, wobble=k))
        outcome.wobbly |= wobbly
        if wrong:
            raise Differs(f"{device}: {wrong}\n{source(recipe)}\n{recipe}")
        if not sections and "fuse" not in disable:
            with tilework.load(path, device=device, seed=SEED, trust=True) as session:
                wrong = looped(session, data, found)
            if wrong:
                raise Differs(f"{device}: {wrong}\n{source(recipe)}\n{recipe}")
        outcome.devices.append(device)
    return outcome
