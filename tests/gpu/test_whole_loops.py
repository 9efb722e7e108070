"""Kernels that are a whole loop, run thread by thread on the host, beside the graph that they were made from. Nothing here needs
a GPU; Triton must be there (make test-gpu-code)."""

# ruff: noqa: E402

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: make test-gpu-code")

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "fuzz")]
from emulator import Emulated
from programs import drawn, make

import tilework
from models import MODELS
from tilework.artifact.names import SEED, Kind, is_kind
from tilework.artifact.random import next_seed
from tilework.compiler.build import plan_step
from tilework.compiler.cuda.persistent.emit import emit
from tilework.compiler.cuda.persistent.formulas import NotSmall
from tilework.compiler.cuda.persistent.owners import Owned, owned
from tilework.compiler.cuda.persistent.stages import Stages, stages
from tilework.compiler.cuda.target import target_for
from tilework.errors import TileworkError, TileworkWarning
from tilework.plan.plan import Plan
from tilework.runtime.devices.reference import Replay
from tilework.zoo import lenet, logreg

STEPS = 3
NAME = "whole_loop"
# Models of the suite whose steps are one kernel; the others hold library calls, or normalize over a batch.
WHOLE = ("linear", "mlp", "gru", "hidden", "dropout", "multi_output", "multi_optimizer", "per_element", "clipped", "stateful")


def staged(step: tilework.Step, **options: bool) -> tuple[Plan, Stages]:
    planned = plan_step(step, tilework.Options(device="reference", programs="fused", **options))
    return planned, stages(planned.programs["step"], target_for("sm_90"))


def start(planned: Plan) -> dict[str, torch.Tensor]:
    """Every buffer of a session, with optimizer state as after some steps."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, kind in planned.buffers.items():
        value = kind.empty().zero_()
        if is_kind(name, Kind.STATE) and value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) * 0.05)
        if is_kind(name, Kind.HYPER):
            value.fill_(planned.step.hyper[name.partition("/")[2]])
        found[name] = value
    for name, tensor in {**planned.step.weights, **planned.step.constants}.items():
        if name in found:
            found[name].copy_(tensor)
    return found


def slices(planned: Plan, step: tilework.Step, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The step's own examples, with noise, for each step of the loop."""
    generator = torch.Generator().manual_seed(2)
    flat = [t for v in (step.inputs, step.targets) for t in (v if isinstance(v, (tuple, list)) else [v])]
    found = {}
    for argument, example in zip(planned.signatures[0].inputs, flat, strict=True):
        noise = [torch.randn(example.shape, generator=generator) * 0.1 for _ in range(STEPS)]
        several = [(example.detach() + n).to(example.dtype) if example.is_floating_point() else example for n in noise]
        found[Kind.INPUT.of(argument.name)] = torch.stack(several).contiguous()
    return found


def compare(planned: Plan, made: Stages, plan: Owned, step: tilework.Step, threads: int, order: int) -> float:
    """The largest difference, as a part of the tensor's largest number."""
    before = start(planned)
    given = slices(planned, step, before)
    outputs = [b for b in before if is_kind(b, Kind.OUTPUT, Kind.CHECK)]
    expected, results = {b: v.clone() for b, v in before.items()}, {b: [] for b in outputs}
    replay = Replay(planned.programs["step"])
    for i in range(STEPS):
        for name, value in given.items():
            expected[name].copy_(value[i])
        if SEED in expected:
            expected[SEED].fill_(next_seed(5, 7 + i))
        replay(expected)
        for name in outputs:
            results[name].append(expected[name].clone())
    mine = {b: v.clone() for b, v in before.items()} | given
    mine |= {b: torch.zeros(STEPS, *before[b].shape, dtype=before[b].dtype) for b in outputs}
    sizes = {b: before[b].numel() * before[b].element_size() for b in (*given, *outputs)}
    emulated = Emulated(emit(made, plan, threads, NAME), NAME)
    emulated.run(mine, STEPS, sizes, 5, 7, order)
    assert not emulated.out_of_range
    worst = 0.0
    for name in before:
        if not is_kind(name, Kind.PARAM, Kind.BUFFER, Kind.STATE, Kind.NORM) and name not in outputs:
            continue
        theirs = torch.stack(results[name]) if name in outputs else expected[name]
        if theirs.numel() and bool(torch.isfinite(theirs).all()):
            difference = (mine[name].double() - theirs.double()).abs().max() / (theirs.double().abs().max() + 1e-6)
            worst = max(worst, float(difference.nan_to_num(torch.inf)))
    return worst


@pytest.mark.parametrize("name", WHOLE)
def test_models(name: str) -> None:
    step = MODELS[name]()
    planned, made = staged(step)
    for blocks, threads, order in ((1, 64, 0), (4, 64, 1), (3, 32, 2)):
        assert compare(planned, made, owned(made, blocks, threads), step, threads, order) < 2e-5


@pytest.mark.parametrize("name", ["linear", "mlp", "clipped"])
def test_the_norm_of_the_gradients(name: str) -> None:
    step = MODELS[name]()
    planned, made = staged(step, grad_norm=True)
    assert "norm/history" in planned.buffers
    for blocks, threads, order in ((1, 64, 0), (4, 64, 1), (3, 32, 2)):
        assert compare(planned, made, owned(made, blocks, threads), step, threads, order) < 2e-5


@pytest.mark.parametrize(("build", "rows"), [(logreg.build, 1), (lenet.build, 1), (lenet.build, 2)])
def test_starters(build, rows: int) -> None:
    step = build(batch_size=rows)
    planned, made = staged(step)
    for blocks, order in ((1, 1), (4, 0), (4, 2)):
        assert compare(planned, made, owned(made, blocks, 64), step, 64, order) < 2e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chunk", range(2))
def test_generated_programs(chunk: int) -> None:
    """Those of the fuzzer whose step is one kernel. Programs that magnify rounding are judged as far as they can be."""
    wrong, looked = [], 0
    for i in range(chunk, 40, 2):
        try:
            step = make(drawn(Random(f"whole loops/{i}")))
            if step.num_micro_batches > 1 or step.precision != "float32":
                continue
            planned, made = staged(step)
            found = compare(planned, made, owned(made, 1 + i % 4, 32), step, 32, i % 3)
        except (NotSmall, TileworkError, TileworkWarning, KeyError):
            continue  # not one kernel; or refused, which tests/fuzz judges
        except RuntimeError as e:  # fake tensors of a GPU go a long way without CUDA, not all of it
            if torch.version.cuda is None and "not linked with support for cuda" in str(e):
                continue
            raise
        looked += 1
        if found > 1e-3:
            wrong.append(f"whole loops/{i}: {found:.1e}")
    assert not wrong, wrong
    assert looked, "no program was one kernel"


def test_a_missing_barrier_is_noticed() -> None:
    """The threads' order is what finds it: this suite can fail."""
    step = lenet.build(batch_size=1)
    planned, made = staged(step)
    plan = owned(made, 4, 64)
    at = next(i for i in plan.order if plan.before[i] == "grid")
    broken = replace(plan, before=tuple("" if i == at else b for i, b in enumerate(plan.before)))
    assert max(compare(planned, made, broken, step, 64, order) for order in (0, 1, 2)) > 1e-3


def test_a_label_out_of_range_is_noticed() -> None:
    step = logreg.build(batch_size=1)
    planned, made = staged(step)
    buffers = start(planned)
    for name, value in buffers.items():
        if is_kind(name, Kind.INPUT) and not value.is_floating_point():
            value.fill_(11)
    emulated = Emulated(emit(made, owned(made, 1, 64), 64, NAME), NAME)
    emulated.run(buffers, 1, {}, 5, 7)
    assert emulated.out_of_range


class Narrow(torch.nn.Module):
    """Whole numbers of 8 bits that wrap round, on both sides of a division."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        wrapped = ((n * 5) > 0).float() + ((n.to(torch.uint8) + 200) // 2).float() / 128 + (-n).float() / 100
        return (self.linear(x) * wrapped).sum(), wrapped


def test_narrow_whole_numbers_wrap_round() -> None:
    model = Narrow()
    n = torch.tensor([[30, 100, -128, 7]], dtype=torch.int8)
    step = tilework.Step(
        model=model, inputs=(torch.randn(1, 4), n), loss=0, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    planned, made = staged(step)
    assert compare(planned, made, owned(made, 2, 32), step, 32, 1) < 1e-6


@pytest.mark.parametrize(("queries", "keys", "fused"), [(16, 16, True), (8, 24, False), (24, 8, False)])
def test_causal_attention_of_other_lengths_is_a_formula(queries: int, keys: int, fused: bool) -> None:
    """The GPU's fused kernel aligns the mask at the other corner."""
    from types import SimpleNamespace

    from tilework.compiler.cuda.attention import _fused

    q, k = (SimpleNamespace(meta={"val": torch.empty(1, 2, n, 16, dtype=torch.bfloat16)}) for n in (queries, keys))
    assert _fused(q, k, k, None, True) == fused and _fused(q, k, k, None, False)


def test_every_micro_batch_is_watched() -> None:
    """A device without kernels: the first of two micro-batches has no number as its loss, the second has one."""
    from types import SimpleNamespace

    from tilework.runtime.cuda.loop import Bound
    from tilework.runtime.devices import Call, NotANumber

    buffers = {"output/loss": torch.zeros(()), "param/w": torch.ones(2)}
    losses = iter([1.0, 2.0, float("nan"), 3.0])
    nothing = SimpleNamespace(launch=lambda: None)
    bound = object.__new__(Bound)
    bound.call = Call(micro="m", update="u", num_steps=2, num_micro_batches=2, watched=("output/loss",), restored=("param/w",))
    bound.device = SimpleNamespace(memory=SimpleNamespace(tensors=buffers), randoms={}, finish=lambda: None)
    bound.table = SimpleNamespace(begin=nothing, end=nothing)
    bound.micro = SimpleNamespace(run=lambda: buffers["output/loss"].fill_(next(losses)))
    bound.update = SimpleNamespace(run=lambda: buffers["param/w"].sub_(buffers["output/loss"]))
    bound._bad = torch.zeros((), dtype=torch.bool)
    bound._run = lambda *_: bound._step()
    with pytest.raises(NotANumber) as e:
        bound._watched((), (), ())
    assert e.value.args == (1,) and buffers["param/w"].tolist() == [-1.0, -1.0]  # as after the first step


def test_a_large_step_is_no_single_kernel() -> None:
    with pytest.raises(NotSmall, match="million operations"):
        staged(lenet.build(batch_size=256))
