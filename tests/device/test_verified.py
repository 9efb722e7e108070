"""A compile checks itself: planted faults are found, and what is right is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilework
from models import MODELS
from parity import SEED, assert_same, batches, train_eager, train_session
from tilework.capture import capture as capturing
from tilework.check.check import check
from tilework.compiler import build, codegen_cpu
from tilework.compiler.cache import Cache
from tilework.plan import plan as planning
from tilework.plan.aliases import is_view

FAST = tilework.Options(opt_level=1)


def make() -> tilework.Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return tilework.Step(model=model, inputs=(torch.randn(4, 6),), targets=(torch.randn(4, 3),), loss=F.mse_loss,
                         optimizer=torch.optim.Adam(model.parameters(), lr=0.01))  # fmt: skip


def sine_for_tanh(graph):
    nodes = tuple(replace(n, op="aten.sin.default") if n.op == "aten.tanh.default" else n for n in graph.nodes)
    return replace(graph, nodes=nodes)


def test_a_right_compile_says_so(tmp_path) -> None:
    done = tilework.compile(make(), tmp_path / "m.pef", options=FAST)
    assert done.verification.compared and done.verification.note == "on the example inputs" and not done.verification.retreats
    manifest = tilework.read_artifact(done.path).manifest
    assert manifest.verification == done.verification and "verified" in tilework.read_artifact(done.path).report
    assert done.seconds["verify"] > 0


def test_a_pass_that_is_wrong_is_left_out(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(planning.CHANGES, "products", lambda programs: {k: sine_for_tanh(g) for k, g in programs.items()})
    with pytest.warns(tilework.TileworkWarning, match="pass products left out"):
        done = tilework.compile(make(), tmp_path / "m.pef", options=FAST)
    assert "products" in done.plan.options.disable
    assert check(done.path, make()).ok


@pytest.mark.slow
def test_the_operator_that_is_wrong_is_called(tmp_path, monkeypatch) -> None:
    """Code generation that is wrong about one operator: it is found among all of them, and only it is called."""
    original = codegen_cpu.slim
    monkeypatch.setattr(codegen_cpu, "slim", lambda text, *rest: original(text.replace(".tanh()", ".sin()"), *rest))
    cache = Cache(tmp_path / "cache")  # this wrong code must not be found by others
    (cache.folder / "headers").rmdir()
    (cache.folder / "headers").symlink_to(Cache().folder / "headers")
    options = replace(FAST, programs="fused")
    with pytest.warns(tilework.TileworkWarning, match=r"step: aten.tanh.default called through torch's dispatcher"):
        done = tilework.compile(make(), tmp_path / "m.pef", options=options, cache=cache)
    assert done.plan.called["step"] == ("aten.tanh.default",)
    assert tilework.read_artifact(done.path).manifest.programs["step"].called == ["aten.tanh.default"]
    assert check(done.path, make()).ok


def test_nothing_is_written_if_the_capture_is_wrong(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(capturing, "pooling", sine_for_tanh)
    with pytest.raises(tilework.BugError) as e:
        tilework.compile(make(), tmp_path / "m.pef", options=tilework.Options(device="reference"))
    assert e.value.id == "verify-failed" and "output" in e.value.found
    assert not list(tmp_path.iterdir())
    done = tilework.compile(make(), tmp_path / "m.pef", options=tilework.Options(device="reference"), verify=False)
    assert not done.verification.compared and "on request" in done.verification.note
    assert not check(done.path, make()).ok


def test_examples_that_are_only_shapes(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 3))
    ids = torch.full((4, 3), 49)
    step = tilework.Step(model=model, inputs=(ids,), targets=(torch.zeros(4, dtype=torch.int64),), loss=F.cross_entropy,
                         examples="shapes", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))  # fmt: skip
    options = tilework.Options(device="reference")
    assert "generated inputs" in tilework.compile(step, tmp_path / "m.pef", options=options).verification.note

    class OnlyForEven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            if not torch.compiler.is_compiling() and bool(x.sum() < 1e6):
                raise ValueError("not data")
            return self.fc(x).mean()

    other = OnlyForEven()
    done = tilework.compile(tilework.Step(model=other, inputs=(torch.randn(2, 3),)), tmp_path / "o.pef", options=options)
    assert not done.verification.compared and "ValueError" in done.verification.note


def test_constant_examples_are_replaced(tmp_path) -> None:
    step = make()
    step.inputs = (torch.zeros(4, 6),)
    done = tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device="reference"))
    assert "random numbers" in done.verification.note


@pytest.mark.parametrize("how", ["all", "most"])
@pytest.mark.parametrize("name", ["conv_bn", "lstm", "attention", "dropout", "stateful", "accumulated"])
def test_programs_by_calls(name: str, how: str, tmp_path, monkeypatch) -> None:
    """Operators called through torch's dispatcher, all of them or amid generated loops, give eager's numbers."""
    original = planning.plan

    def called(graph) -> tuple[str, ...]:
        if how == "all":
            return ("*",)
        return tuple(sorted({n.op for n in graph.nodes if n.op.startswith("aten.") and not is_view(n.op)}))

    def planned(steps, options, passes):
        made = original(steps, options, passes)
        return replace(made, called={k: called(g) for k, g in made.programs.items()})

    monkeypatch.setattr(build, "plan", planned)
    original_replace = build.replace
    monkeypatch.setattr(
        build, "replace", lambda made, **fields: made if fields == {"called": {}} else original_replace(made, **fields)
    )
    step = MODELS[name]()
    done = build.compile_step(step, tmp_path / "m.pef", options=FAST, weights="none")
    assert all(done.plan.called.values())
    for sections in (False, True):
        if sections and step.num_micro_batches > 1:
            continue
        session = tilework.load(done.path, seed=SEED)
        session.to_device(step.model, step.optimizers or None)
        data = batches(step, 4 * step.num_micro_batches)
        assert_same(train_session(session, step, data, sections=sections), train_eager(MODELS[name](), data))


def test_operators_without_native_code_are_called(tmp_path) -> None:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(5, 3))

        def forward(self, x):
            k = torch.exp(-(torch.cdist(self.p, x) ** 2)) @ torch.exp(-(torch.cdist(x, self.p) ** 2))
            return torch.logdet(k + 2 * torch.eye(5)) + torch.fft.rfft(self.p, dim=0).abs().sum() * 0.1

    torch.manual_seed(0)
    model = Kernel()
    step = tilework.Step(model=model, inputs=(torch.randn(4, 3),), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    done = tilework.compile(step, tmp_path / "m.pef", options=FAST)
    assert done.verification.compared and done.plan.called["step"] and not done.verification.retreats
    assert check(done.path, step).ok


def test_an_index_out_of_range_is_an_error_in_called_code_too(tmp_path) -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(5, 3))

        def forward(self, i):
            return self.p[i].square().sum()

    model = Picks()
    step = tilework.Step(model=model, inputs=(torch.tensor([1, 4, 1]),), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    tilework.compile(step, tmp_path / "m.pef", options=FAST, weights="inside")
    with tilework.load(tmp_path / "m.pef") as session, pytest.raises(tilework.TileworkError):
        session.run(torch.tensor([1, 7, 1]))


def in_bfloat16() -> tilework.Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 10))
    return tilework.Step(model=model, inputs=(torch.randn(32, 64),), targets=(torch.randint(0, 10, (32,)),),
                         loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
                         precision="bfloat16")  # fmt: skip


def test_the_first_step_of_adam_in_16_bits(tmp_path) -> None:
    """It takes the sign of each gradient, and rounding decides that of small ones. What is wrong is found all the same."""
    for programs in ("fused", "all"):
        done = tilework.compile(in_bfloat16(), tmp_path / "m.pef", options=replace(FAST, programs=programs))
        assert done.verification.compared and not done.verification.retreats
    with pytest.MonkeyPatch.context() as m:
        m.setattr(capturing, "pooling", sine_for_tanh)
        with pytest.raises(tilework.BugError, match="verify-failed"):
            tilework.compile(in_bfloat16(), tmp_path / "n.pef", options=tilework.Options(device="reference", programs="fused"))
