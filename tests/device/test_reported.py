"""Things that users found. Each test is a program that once went wrong."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.nn.functional as F
from devices import COMPUTING
from torch import nn

import tilework
from tilework.capture.capture import capture
from tilework.check.check import check

FAST = tilework.Options(opt_level=1)
REFERENCE = tilework.Options(device="reference")


def step_of(model: nn.Module, inputs=None, targets=None, **kwargs) -> tilework.Step:
    inputs = (torch.randn(4, 6),) if inputs is None else inputs
    kwargs.setdefault("loss", F.mse_loss)
    kwargs.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return tilework.Step(model=model, inputs=inputs, targets=(torch.randn(4, 3),) if targets is None else targets, **kwargs)


@pytest.mark.parametrize("device", COMPUTING)
def test_outputs_that_are_copies_of_state(device: str, tmp_path) -> None:
    """An output that is a plain copy or view of a parameter or buffer has the value from before the update."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.other = nn.Linear(6, 3), nn.Linear(6, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            old = self.count.clone()
            self.count += 1
            out = self.fc(x) + self.other(x)
            return out, old, self.fc.bias.detach().clone(), self.other.weight.view(2, 9).detach().clone(), self.fc.weight.t()

    torch.manual_seed(0)
    model = Copies()
    step = step_of(model, loss=lambda out, y: F.mse_loss(out[0], y))
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device=device, opt_level=1))
    bias, weight, fc = model.fc.bias.clone(), model.other.weight.clone(), model.fc.weight.clone()
    for sections in (None, ["fwd"]):
        session = tilework.load(tmp_path / "m.pef")
        out = session.run(*step.inputs, *step.targets, sections=sections).outputs
        assert float(out[1]) == 0.0 and float(session.memory.read("buffer/count")) == 1.0
        assert torch.equal(out[2], bias) and torch.equal(out[3], weight.view(2, 9)) and torch.equal(out[4], fc.t())
    assert check(tmp_path / "m.pef", step).ok


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_bias_before_batchnorm_passes_the_check(seed: int, tmp_path) -> None:
    """Its true gradient is zero, so what both sides compute is rounding noise."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    step = step_of(
        model, loss=F.cross_entropy, targets=(torch.randint(0, 3, (4,)),), optimizer=torch.optim.Adam(model.parameters())
    )
    tilework.compile(step, tmp_path / "m.pef", options=FAST)
    report = check(tmp_path / "m.pef", step)
    assert report.ok, report.first_difference
    assert check(tmp_path / "m.pef").ok


def test_the_check_still_sees_small_errors(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    step = step_of(model)
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    step.loss = lambda out, y: F.mse_loss(out, y) * 1.0005
    report = check(tmp_path / "m.pef", step)
    failed = {(r.kind, r.name) for r in report.rows if not r.ok}
    assert ("output", "loss") in failed and ("gradient", "0.weight") in failed and ("gradient", "3.weight") in failed


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: step_of(nn.Linear(5, 3)), "RuntimeError"),
        (lambda: step_of(nn.Linear(6, 3), loss=lambda out, y: out.nothing), "AttributeError"),
        (lambda: step_of(nn.BatchNorm1d(6), inputs=(torch.randn(1, 6),)), "ValueError"),
        (lambda: step_of(nn.Linear(6, 3), inputs={"nope": torch.randn(4, 6)}), "TypeError"),
    ],
)
def test_a_model_that_fails_is_the_users(make, words: str) -> None:
    with pytest.raises(tilework.UserError) as e:
        capture(make())
    assert e.value.id == "user-code" and words in str(e.value)


def test_models_that_are_wrapped_or_lazy() -> None:
    for model, words in (
        (nn.DataParallel(nn.Linear(6, 3)), "model.module"),
        (torch.compile(nn.Linear(6, 3)), "original"),
        (nn.LazyLinear(3), "no shape yet"),
    ):
        with pytest.raises(tilework.UserError, match="step-argument") as e:
            step_of(model, optimizer=None)
        assert words in str(e.value)


def test_targets_without_a_loss_function() -> None:
    with pytest.raises(tilework.UserError, match="targets: given"):
        step_of(nn.Linear(6, 3), loss="auto")


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(tilework.UserError, match="sparse"):
        capture(step_of(model, inputs=(torch.randint(0, 5, (4,)),)))


def test_one_hot_with_a_given_number_of_classes(tmp_path) -> None:
    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return self.fc(F.one_hot(x, 6).float())

    torch.manual_seed(0)
    model, x = OneHot(), torch.tensor([0, 5, 2, 2])
    step = step_of(model, inputs=(x,))
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    assert check(tmp_path / "m.pef", step).ok


def test_weight_norm_has_native_code(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))
    step = step_of(model)
    tilework.compile(step, tmp_path / "m.pef", options=FAST)
    assert check(tmp_path / "m.pef", step).ok


def test_an_optimizer_that_has_made_steps_keeps_its_state(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    step = step_of(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))

    def eager() -> torch.Tensor:
        step.optimizer.zero_grad()
        loss = F.mse_loss(model(step.inputs[0]), step.targets[0])
        loss.backward()
        step.optimizer.step()
        return loss.detach()

    for _ in range(5):
        eager()
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    session = tilework.load(tmp_path / "m.pef")
    assert int(session.memory.read("state/opt0.g0/step")) == 5
    for _ in range(3):
        assert torch.allclose(session.run(*step.inputs, *step.targets).loss, eager(), rtol=1e-5)


def test_sync_with_the_wrong_objects(tmp_path) -> None:
    model = nn.Linear(6, 3)
    step = step_of(model, optimizer=torch.optim.Adam(model.parameters()))
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    session = tilework.load(tmp_path / "m.pef")
    with pytest.raises(tilework.UserError, match="weights-mismatch"):
        session.to_host(nn.Sequential(nn.Linear(2, 2)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for sync in (session.to_host, session.to_device):
        with pytest.raises(tilework.UserError, match="optimizer-mismatch"):
            sync(model, sgd)


def test_wrong_calls(tmp_path) -> None:
    step = step_of(nn.Linear(6, 3), loss=F.cross_entropy, targets=(torch.randint(0, 3, (4,)),))
    tilework.compile(step, tmp_path / "m.pef", options=FAST)
    session = tilework.load(tmp_path / "m.pef")
    before = session.hyper
    with pytest.raises(tilework.UserError, match="zzz"):
        session.set(lr=9.0, zzz=1.0)
    with pytest.raises(tilework.UserError, match="expected a number"):
        session.set(lr="fast")  # type: ignore[arg-type]
    assert session.hyper == before  # nothing was set
    for wrong in (0, -1, 2.5, "3"):
        with pytest.raises(tilework.UserError, match="num_steps"):
            session.run(*step.inputs, *step.targets, num_steps=wrong)
    assert session.run(*step.inputs, *step.targets, sections="fwd").loss is not None  # type: ignore[arg-type]
    with pytest.raises(tilework.UserError, match="input-values"):
        session.run(step.inputs[0], step.targets[0] + 7)
    session.run(*step.inputs, *step.targets)  # it goes on
    session.close()
    with pytest.raises(tilework.UserError, match="session-closed"):
        session.run(*step.inputs, *step.targets)
    with pytest.raises(tilework.UserError, match="no device 'frob'"):
        tilework.load(tmp_path / "m.pef", device="frob")


@pytest.mark.parametrize("device", COMPUTING)
def test_examples_that_are_not_contiguous(device: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3 * 2 * 3, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(4, 4, 5, 2).permute(0, 3, 1, 2)
    y = torch.randn(3, 4).t()
    step = step_of(model, inputs=(x,), targets=(y,))
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device=device, opt_level=1))
    assert check(tmp_path / "m.pef", step).ok
    session = tilework.load(tmp_path / "m.pef")
    loss = session.run(x.contiguous(), y.contiguous()).loss
    assert torch.allclose(loss, F.mse_loss(model(x), y), rtol=1e-5)


def test_a_dropout_in_a_module_whose_name_looks_like_an_optimizer(tmp_path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.optics = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
            self.opt0 = nn.ModuleDict({"g0": nn.Dropout(0.25)})

        def forward(self, x):
            return self.opt0["g0"](self.optics(x))

    torch.manual_seed(0)
    step = step_of(Named())
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    session = tilework.load(tmp_path / "m.pef")
    assert session.hyper["optics.1.p"] == 0.5
    assert check(tmp_path / "m.pef", step).ok


@pytest.mark.parametrize("device", COMPUTING)
def test_inputs_that_all_micro_batches_share(device: str, tmp_path) -> None:
    """A 0-dim input has no batch: every micro-batch and every step of a call gets the same one."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x, scale):
            return self.fc(x) * scale

    torch.manual_seed(0)
    scale = torch.tensor(2.0)
    step = step_of(Scaled(), inputs=(torch.randn(4, 6), scale), num_micro_batches=2)
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device=device, opt_level=1))
    assert check(tmp_path / "m.pef", step).ok
    session = tilework.load(tmp_path / "m.pef")
    x, y = torch.randn(24, 6), torch.randn(24, 3)
    assert session.run(x, scale, y, num_steps=3).losses.shape == (6,)


def test_tensors_that_are_not_in_plain_memory(tmp_path) -> None:
    step = step_of(nn.Linear(6, 3))
    tilework.compile(step, tmp_path / "m.pef", options=FAST)
    session = tilework.load(tmp_path / "m.pef")
    x, y = step.inputs[0], step.targets[0]
    with pytest.raises(tilework.UserError, match="is on meta"):
        session.run(x.to("meta"), y)
    expected = session.run(-x, y, sections=["fwd"]).loss
    assert torch.equal(session.run(torch._neg_view(x), y, sections=["fwd"]).loss, expected)


def test_an_index_out_of_range_in_a_parallel_loop(tmp_path) -> None:
    """It is an error, not the end of the process."""
    torch.manual_seed(0)
    model = nn.Embedding(100, 64)
    tokens = torch.randint(0, 100, (32, 64))
    step = step_of(model, inputs=(tokens,), targets=(torch.randn(32, 64, 64),))
    tilework.compile(step, tmp_path / "m.pef", options=FAST)
    session = tilework.load(tmp_path / "m.pef", num_threads=2)
    wrong = tokens.clone()
    wrong[3, 5] = 100
    with pytest.raises(tilework.UserError, match="input-values"):
        session.run(wrong, *step.targets)
    session.load(tmp_path / "m.safetensors")  # the step that failed may have been half done
    assert float(session.run(tokens, *step.targets).loss) > 0
    torch.set_num_threads(1)
    assert check(tmp_path / "m.pef", step).ok


@pytest.mark.parametrize("device", COMPUTING)
def test_a_buffer_that_takes_the_old_value_of_another(device: str, tmp_path) -> None:
    class Delay(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.register_buffer("now", torch.zeros(6))
            self.register_buffer("before", torch.zeros(6))

        def forward(self, x):
            self.before = self.now.clone()
            self.now = x.mean(0).detach()
            return self.fc(x)

    torch.manual_seed(0)
    step = step_of(Delay())
    step.model.now += 1
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device=device, opt_level=1))
    session = tilework.load(tmp_path / "m.pef")
    for sections in (None, ["fwd"]):
        old = session.memory.read("buffer/now")
        session.run(torch.randn(4, 6), *step.targets, sections=sections)
        assert torch.equal(session.memory.read("buffer/before"), old)
    kept = step.model.now.clone()
    assert check(tmp_path / "m.pef", step).ok
    assert torch.equal(step.model.now, kept) and not step.model.before.any()  # the model is as it was


def test_gradients_of_the_fused_step(tmp_path) -> None:
    """Those of inputs are there, those of parameters are not."""
    step = step_of(nn.Linear(6, 3), inputs=(torch.randn(4, 6, requires_grad=True),))
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    session = tilework.load(tmp_path / "m.pef")
    session.run(step.inputs[0], *step.targets)
    assert set(session.gradients()) == {"input/input"}
    with pytest.raises(tilework.UserError, match="run-order"):
        session.run(sections=["opt"])  # the parameters' are not there
    session.run(step.inputs[0], *step.targets, sections=["fwd"])
    session.run(sections=["bwd", "opt"])
    with pytest.raises(tilework.UserError, match="run-order"):
        session.run(sections=["bwd"])  # what fwd kept belongs to the weights from before opt


@pytest.mark.parametrize(
    "forward", [lambda x: torch.normal(x, 1.0), lambda x: F.rrelu(x, training=True), lambda x: x + torch.randint_like(x, 3)]
)
def test_random_operators_without_a_seeded_form_are_refused(forward) -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return forward(self.fc(x))

    with pytest.raises(tilework.UserError, match="no seeded form"):
        capture(step_of(Random()))


def test_patches_of_images_with_channels_last(tmp_path) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(self.conv(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)).mean(1)

    torch.manual_seed(0)
    step = step_of(Patches(), inputs=(torch.randn(4, 8, 8, 3),))
    tilework.compile(step, tmp_path / "m.pef", options=FAST)
    assert check(tmp_path / "m.pef", step).ok


def test_names_and_values_that_clash() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, out, y):
            return ((out - y) * self.weight).square().mean()

    model = nn.Sequential(nn.Linear(6, 3))
    model.loss = nn.Linear(3, 3)
    with pytest.raises(tilework.UserError, match="rename the model's attribute"):
        step_of(model, loss=Loss())
    with pytest.raises(tilework.UserError, match="clip_norm"):
        step_of(nn.Linear(6, 3), clip_norm=float("inf"))


def test_plain_values_among_the_inputs(tmp_path) -> None:
    class Flag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x, double):
            return self.fc(x) * (2 if double else 1)

    step = step_of(Flag(), inputs=(torch.randn(4, 6), True))
    tilework.compile(step, tmp_path / "m.pef", options=REFERENCE)
    session = tilework.load(tmp_path / "m.pef")
    session.infer(step.inputs[0], True)
    session.infer(step.inputs[0])
    with pytest.raises(tilework.UserError, match="differs from what was compiled in"):
        session.infer(step.inputs[0], False)


def test_the_comparison_with_odd_numbers() -> None:
    from tilework.check.compare import compare

    inf, nan = float("inf"), float("nan")

    def ok(found: list[float], expected: list[float]) -> bool:
        return compare("output", {"x": torch.tensor(found)}, {"x": torch.tensor(expected)})[0].ok

    assert ok([inf, 1.0], [inf, 1.0]) and ok([nan, 1.0], [nan, 1.0])
    assert not ok([inf, 5.0], [inf, 1.0]) and not ok([nan, 1.0], [1.0, 1.0]) and not ok([1.0, 1.0], [nan, 1.0])
    assert not compare("output", {"x": torch.ones(1)}, {"x": torch.ones(3)})[0].ok


def test_close_from_a_signal_handler(session_of) -> None:
    """It may strike in the middle of a call: what the call uses is freed after it."""
    first, step = session_of("mlp", "cpu")
    before = signal.getsignal(signal.SIGVTALRM)
    try:
        for i in range(20):
            session = tilework.load(first.artifact.path, device="cpu")
            session.load_tensors(first.tensors())
            signal.signal(signal.SIGVTALRM, lambda *_, it=session: it.close())
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0005 + 0.0002 * i)
            with pytest.raises(tilework.UserError, match="session-closed"):
                while True:
                    session.run(*step.inputs, *step.targets)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
