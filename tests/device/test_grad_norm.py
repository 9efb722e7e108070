"""The norm of all gradients (Options.grad_norm), beside eager PyTorch: single steps and each step of a loop, with accumulation,
before clipping, through every optimizer's update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devices import COMPUTING
from test_loop import joined, step_data

import tilework
from models import MODELS
from tilework.artifact.names import NORMS
from tilework.compiler.build import compile_step
from tilework.errors import UserError

NUM_STEPS = 5
CASES = [
    ("linear", {"optimizer": "sgd"}),
    ("linear", {"optimizer": "adamw"}),
    ("mlp", {"optimizer": "adam"}),
    ("linear", {"num_micro_batches": 3}),
    ("linear", {"optimizer": "adamw", "num_micro_batches": 2, "accumulate": "sum"}),
    ("clipped", {}),
    ("multi_optimizer", {}),
    ("tied", {}),
]


def eager(name: str, kwargs: dict, data: list[list[torch.Tensor]], micro: int) -> list[float]:
    """Of each step, by torch."""
    step, norms = MODELS[name](**kwargs), []
    trained = [p for o in step.optimizers for g in o.param_groups for p in g["params"]]
    for inputs in data:
        for optimizer in step.optimizers:
            optimizer.zero_grad()
        for part in zip(*(t.chunk(micro) for t in inputs), strict=True):
            num = len(step.inputs) if isinstance(step.inputs, (tuple, list)) else 1
            output = step.call_model(tuple(part[:num]))
            loss = (
                step.call_loss(output, part[num:]) if step.loss_function else output[0] if isinstance(output, tuple) else output
            )
            (loss / micro if step.accumulate == "mean" else loss).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])))
        if step.clip_value is not None:
            torch.nn.utils.clip_grad_value_(trained, step.clip_value)
        if step.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, step.clip_norm)
        for optimizer in step.optimizers:
            optimizer.step()
    return norms


def opened(workshop: Path, name: str, device: str, seed: int = 0, **kwargs) -> tuple[tilework.Session, tilework.Step]:
    step = MODELS[name](**kwargs)
    path = workshop / f"norm-{name}-{device}-{'-'.join(map(str, kwargs.values()))}.pef"
    if not path.exists():
        compile_step(step, path, options=tilework.Options(device=device, grad_norm=True), weights="none")
    session = tilework.load(path, seed=seed)
    session.to_device(step.model, step.optimizers)
    return session, step


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=[f"{n}-{'-'.join(map(str, k.values()))}" for n, k in CASES])
def test_it_is_that_of_eager_pytorch(workshop: Path, name: str, kwargs: dict, device: str) -> None:
    one, step = opened(workshop, name, device, **kwargs)
    many, _ = opened(workshop, name, device, **kwargs)
    data = step_data(one, step, NUM_STEPS)
    single = []
    for inputs in data:
        one.run(*inputs)
        single.append(one.grad_norm)
    assert single == pytest.approx(eager(name, kwargs, data, one.manifest.signature.num_micro_batches), rel=2e-4)
    many.run(*joined(step, data), num_steps=NUM_STEPS)
    assert many.grad_norms(NUM_STEPS).tolist() == single == one.grad_norms(NUM_STEPS).tolist()
    assert many.grad_norms(2).tolist() == single[-2:] and many.grad_norm == single[-1]


@pytest.mark.parametrize("device", COMPUTING)
def test_sections_give_the_same(workshop: Path, device: str) -> None:
    fused, step = opened(workshop, "linear", device, optimizer="adamw")
    parts, _ = opened(workshop, "linear", device, optimizer="adamw")
    (inputs,) = step_data(fused, step, 1)
    fused.run(*inputs)
    parts.run(*inputs, sections=["fwd", "bwd"])
    with pytest.raises(UserError, match=r"\[run-grad-norm\]"):  # the norm is part of the update
        _ = parts.grad_norm
    by_hand = torch.nn.utils.get_total_norm([g for k, g in parts.gradients().items() if not k.startswith("input/")])
    parts.run(sections=["opt"])
    assert parts.grad_norm == pytest.approx(float(by_hand), rel=1e-5) == pytest.approx(fused.grad_norm, rel=1e-5)


@pytest.mark.parametrize(
    "options", [{"keep_gradients": True, "keep_momentum": True}, {"programs": "fused"}, {"programs": "sections"}]
)
def test_beside_other_options(tmp_path: Path, options: dict) -> None:
    path, step = tmp_path / "m.pef", MODELS["mlp"](optimizer="sgd")
    made = tilework.Options(device="reference", grad_norm=True, **options)
    assert tilework.compile(step, path, options=made, weights="inside").verification.compared
    with tilework.load(path) as session:
        data = step_data(session, step, 2)
        norms = [session.run(*inputs) and session.grad_norm for inputs in data]
    assert norms == pytest.approx(eager("mlp", {"optimizer": "sgd"}, data, 1), rel=2e-4)


def test_the_newest_are_kept(workshop: Path) -> None:
    session, step = opened(workshop, "linear", "cpu", optimizer="sgd")
    (inputs,) = step_data(session, step, 1)
    count = NORMS + 7
    all_inputs = [t.repeat(count, *[1] * (t.dim() - 1)) for t in inputs]
    session.run(*all_inputs, num_steps=count)
    norms = session.grad_norms(NORMS)
    again, _ = opened(workshop, "linear", "cpu", optimizer="sgd")
    expected = []
    for _ in range(count):
        again.run(*inputs)
        expected.append(again.grad_norm)
    assert norms.tolist() == expected[-NORMS:]
    with pytest.raises(UserError, match=f"1 to {NORMS} steps"):
        session.grad_norms(NORMS + 1)
    with pytest.raises(UserError, match="a step first"):
        _ = opened(workshop, "linear", "cpu", optimizer="sgd")[0].grad_norm


def test_a_step_that_was_undone_leaves_no_norm(workshop: Path) -> None:
    opened(workshop, "linear", "cpu", optimizer="sgd")
    step = MODELS["linear"](optimizer="sgd")
    session = tilework.load(workshop / "norm-linear-cpu-sgd.pef", nan_error=True)
    session.to_device(step.model)
    good, bad = (step_data(session, step, 1)[0] for _ in range(2))
    session.run(*good)
    before = session.grad_norm
    bad[0] = bad[0] * float("nan")
    with pytest.raises(UserError, match=r"\[loss-nan\]"):
        session.run(*bad)
    assert session.grad_norm == before
    with pytest.raises(UserError, match="1 steps since"):
        session.grad_norms(2)


def test_a_device_without_numbers_has_none(workshop: Path) -> None:
    opened(workshop, "linear", "cpu", optimizer="sgd")
    with tilework.load(workshop / "norm-linear-cpu-sgd.pef", device="null") as session:
        assert session.grad_norms(3).tolist() == [0.0] * 3


def test_without_it_and_without_an_update(session_of, tmp_path: Path) -> None:
    session, _ = session_of("linear")
    with pytest.raises(UserError, match="--grad-norm"):
        _ = session.grad_norm
    step = MODELS["linear"]()
    step.optimizer = None
    with pytest.raises(UserError, match="no optimizer"):
        tilework.compile(step, tmp_path / "x.pef", options=tilework.Options(grad_norm=True))


def test_a_compile_compares_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the graph computes is right; a wrong one is noticed before an artifact is written."""
    from tilework.capture import opt
    from tilework.errors import BugError

    options = tilework.Options(grad_norm=True, device="reference")
    done = tilework.compile(MODELS["clipped"](), tmp_path / "right.pef", options=options)
    assert done.verification.compared and not done.verification.retreats
    true = opt.global_norm
    monkeypatch.setattr(opt, "global_norm", lambda grads: true(grads) * 1.01)
    with pytest.raises(BugError, match="gradient norm"):
        tilework.compile(MODELS["clipped"](), tmp_path / "wrong.pef", options=options)


def test_parts_of_the_update(tmp_path: Path) -> None:
    """Where replicas share the update out, the norm belongs to what each of them does."""
    path = tmp_path / "m.pef"
    tilework.compile(
        MODELS["mlp"](), path, options=tilework.Options(device="reference", num_replicas=2, num_shards=2, grad_norm=True)
    )
    with tilework.load(path) as session:
        programs = session.manifest.programs
        writers = [name for name, p in programs.items() if "norm/count" in p.writes]
        assert writers == ["opt", "opt_rest"]
