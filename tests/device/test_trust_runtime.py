"""What a run may be trusted with: schedules, random numbers, weights, optimizer state, loops, and warnings where they are due."""

from __future__ import annotations

import copy
import gc
import subprocess
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from devices import COMPUTING
from torch import nn

import tilework
from forge import members_of, write
from tilework import hosts
from tilework.check.check import check
from tilework.runtime.memory import free_memory


def compiled(step: tilework.Step, path: Path, device: str, programs: str = "fused", **kwargs) -> Path:
    options = tilework.Options(device=device, opt_level=1, programs=programs)  # type: ignore[arg-type]
    return tilework.compile(step, path, options=options, **kwargs).path


class Fit(nn.Module):
    """Loss inside forward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).square().mean()


def fit(optimizer=None, *layers: nn.Module) -> tilework.Step:
    torch.manual_seed(0)
    model = Fit(*(layers or (nn.Linear(6, 4),)))
    made = optimizer(model.parameters()) if optimizer else torch.optim.SGD(model.parameters(), lr=0.1)
    return tilework.Step(model=model, inputs=(torch.randn(4, 6),), optimizer=made)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def eager(step: tilework.Step, count: int = 1) -> list[float]:
    found = []
    for _ in range(count):
        for optimizer in step.optimizers:
            optimizer.zero_grad()
        loss = step.model(*step.inputs)
        loss.backward()
        for optimizer in step.optimizers:
            optimizer.step()
        found.append(float(loss.detach()))
    return found


def losses(session: tilework.Session, step: tilework.Step, count: int = 1) -> list[float]:
    return [float(session.run(*step.inputs).loss) for _ in range(count)]


# ---- schedules ----


@pytest.mark.parametrize("device", COMPUTING)
def test_schedules_may_lie_anyhow_in_memory(tmp_path, device: str) -> None:
    step = fit()
    path = compiled(step, tmp_path / "m.pef", device)
    x = step.inputs[0].repeat(6, 1)
    table = np.stack([np.linspace(0.1, 0.01, 6), np.full(6, 99.0)], 1)
    dense = torch.from_numpy(table[:, 0].copy())
    for odd, same in (
        (table[:, 0], dense),
        (table[::-1, 0], dense.flip(0)),
        (torch.from_numpy(table)[:, 0], dense),
        (torch.tensor(0.05).expand(6), torch.full((6,), float(np.float32(0.05)), dtype=torch.float64)),
        (torch._neg_view(-dense), dense),
    ):
        found, expected = (tilework.load(path).run(x, num_steps=6, hyper={"lr": lr}).losses.tolist() for lr in (odd, same))
        assert found == expected


# ---- random numbers of inference ----


class Noisy(nn.Module):
    """Draws random numbers in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)

    def forward(self, x):
        return F.dropout(self.fc(x), 0.5, training=True)


def noisy() -> tilework.Step:
    torch.manual_seed(0)
    model = Noisy()
    return tilework.Step(
        model=model,
        loss=F.mse_loss,
        inputs=(torch.randn(4, 6),),
        targets=(torch.zeros(4, 8),),
        optimizer=adam(model.parameters()),
    )


@pytest.mark.parametrize("device", COMPUTING)
def test_infer_draws_new_random_numbers_from_a_stream_of_its_own(tmp_path, device: str) -> None:
    step = noisy()
    path = compiled(step, tmp_path / "m.pef", device)
    x, y = *step.inputs, *step.targets
    plain, mixed = tilework.load(path, seed=5), tilework.load(path, seed=5)
    trained, samples = [], []
    for _ in range(3):
        trained.append(mixed.run(x, y).loss)
        samples += [mixed.infer(x), mixed.infer(x)]
    assert all(not torch.equal(a, b) for i, a in enumerate(samples) for b in samples[:i])
    assert all(torch.equal(loss, plain.run(x, y).loss) for loss in trained)  # training does not notice inference
    assert all(torch.equal(t, plain.tensors()[k]) for k, t in mixed.tensors().items())

    first = tilework.load(path, seed=5)
    draws = [first.infer(x) for _ in range(4)]
    together = tilework.load(path, seed=5).infer(x.repeat(4, 1), num_batches=4)
    assert torch.equal(torch.cat(draws), together)  # one call of four is four calls
    first.seed(5)
    assert torch.equal(first.infer(x), draws[0])
    first.seed(6)
    assert not torch.equal(first.infer(x), draws[0])


def test_every_device_infers_with_the_same_random_numbers(tmp_path) -> None:
    step = noisy()
    path = compiled(step, tmp_path / "m.pef", "cpu")
    x, y = *step.inputs, *step.targets
    found = []
    for device in ("cpu", "reference"):
        session = tilework.load(path, device=device, seed=7)
        session.run(x, y)
        found.append([session.infer(x) == 0 for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("device", COMPUTING)
def test_a_checkpoint_goes_on_with_both_streams(tmp_path, device: str) -> None:
    step = noisy()
    path = compiled(step, tmp_path / "m.pef", device)
    x, y = *step.inputs, *step.targets
    session = tilework.load(path, seed=3)
    session.run(x, y), session.infer(x), session.infer(x)
    session.save(tmp_path / "c.safetensors")
    other = tilework.load(path, weights=tmp_path / "c.safetensors")
    assert other.random_state() == session.random_state()
    assert torch.equal(other.infer(x), session.infer(x)) and torch.equal(other.run(x, y).loss, session.run(x, y).loss)


def test_the_check_of_an_inference_artifact_that_draws_random_numbers(tmp_path) -> None:
    step = tilework.Step(model=Noisy(), inputs=(torch.randn(4, 6),), loss=None)
    for p in step.model.parameters():
        p.requires_grad_(False)
    report = check(compiled(step, tmp_path / "m.pef", "reference"), step)
    assert report.rows and report.ok, report.first_difference


# ---- weights without optimizer state ----


@pytest.mark.parametrize("device", COMPUTING)
def test_weights_without_state_mean_a_fresh_optimizer(tmp_path, device: str) -> None:
    step = fit(adam)
    session = tilework.load(compiled(step, tmp_path / "m.pef", device))
    initial = session.state_dict()
    first = losses(session, step, 4)
    session.load(tmp_path / "m.safetensors")
    assert session.num_steps == 0
    assert losses(session, step, 4) == first
    session.load_tensors(initial)  # by the model's own names
    assert losses(session, step, 4) == first
    session.save(tmp_path / "c.safetensors")
    on = losses(session, step, 2)
    session.load(tmp_path / "c.safetensors")  # one with state goes on
    assert losses(session, step, 2) == on and session.num_steps == 10


def test_weights_that_do_not_fit_leave_the_optimizer_alone(tmp_path) -> None:
    step = fit(adam)
    session = tilework.load(compiled(step, tmp_path / "m.pef", "reference"))
    losses(session, step, 2)
    before = session.tensors()
    with pytest.raises(tilework.UserError, match="weights-mismatch"):
        session.load_tensors({"layers.0.weight": torch.zeros(1)})
    assert all(torch.equal(t, session.tensors()[k]) for k, t in before.items())


# ---- the weights beside an artifact ----


def test_a_compile_does_not_overwrite_a_checkpoint(tmp_path, monkeypatch) -> None:
    step, path = fit(), tmp_path / "m.pef"
    compiled(step, path, "reference")
    compiled(step, path, "reference")  # its own initial weights may go
    session = tilework.load(path)
    losses(session, step, 3)
    session.save(tmp_path / "m.safetensors")
    trained = (tmp_path / "m.safetensors").read_bytes()
    with monkeypatch.context() as m:
        m.setattr("tilework.compiler.build.capture", lambda *_, **__: pytest.fail("refused only after the work had begun"))
        for content in (trained, safetensors.torch.save({"a": torch.zeros(1)}), b"something else", b""):
            (tmp_path / "m.safetensors").write_bytes(content)
            with pytest.raises(tilework.UserError, match=r"m\.safetensors") as e:
                compiled(step, path, "reference")
            assert e.value.id == "weights-exist" and (tmp_path / "m.safetensors").read_bytes() == content
    compiled(step, path, "reference", weights="inside")  # these touch no file beside
    compiled(step, path, "reference", weights="none")
    assert (tmp_path / "m.safetensors").read_bytes() == b""


def test_other_weights_beside_an_artifact_are_loaded_only_on_purpose(tmp_path) -> None:
    step, path = fit(), tmp_path / "m.pef"
    beside = tmp_path / "m.safetensors"
    compiled(step, path, "reference")
    artifact = tilework.read_artifact(path)
    assert artifact.manifest.weights.sha256 is not None
    session = tilework.load(path)
    losses(session, step, 3)
    trained = session.state_dict()
    session.save(beside)
    for load in (lambda: tilework.load(path), lambda: tilework.Session(artifact)):
        with pytest.raises(tilework.UserError, match="weights=") as e:
            load()
        assert e.value.id == "weights-changed" and str(beside) in str(e.value)
    again = tilework.load(path, weights=beside)
    assert all(torch.equal(t, trained[k]) for k, t in again.state_dict().items()) and again.num_steps == 3

    session.save(tmp_path / "other.safetensors")
    beside.write_bytes(b"not weights at all")
    other = tilework.load(path, weights=tmp_path / "other.safetensors")
    assert all(torch.equal(t, trained[k]) for k, t in other.state_dict().items())
    empty = tilework.load(path, weights=False)
    with pytest.raises(tilework.UserError, match="session-weights"):
        empty.run(*step.inputs)
    empty.to_device(step.model)
    assert losses(empty, step) == eager(step)
    assert check(path, step).ok and check(path).ok  # neither needs the file beside
    beside.unlink()
    with pytest.raises(tilework.UserError, match="session-weights"):
        tilework.load(path).run(*step.inputs)


def test_an_artifact_without_a_digest_of_its_weights_takes_what_lies_beside(tmp_path) -> None:
    """One that was compiled before there was such a digest."""
    import json

    step, path = fit(), tmp_path / "m.pef"
    compiled(step, path, "reference")
    members = members_of(path)
    manifest = json.loads(members["manifest.json"])
    del manifest["weights"]["sha256"]
    write(path, {**members, "manifest.json": json.dumps(manifest).encode()})
    session = tilework.load(path)
    losses(session, step, 2)
    session.save(tmp_path / "m.safetensors")
    assert tilework.load(path).num_steps == 2


# ---- optimizer state ----


def two_groups() -> tilework.Step:
    """The second group joins after 20 steps of the first."""
    torch.manual_seed(0)
    model = Fit(nn.Linear(6, 6), nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model.layers[0].parameters(), lr=0.01)
    step = tilework.Step(model=model, inputs=(torch.randn(4, 6),), optimizer=optimizer)
    eager(step, 20)
    optimizer.add_param_group({"params": list(model.layers[1].parameters()), "lr": 0.02})
    return step


@pytest.mark.parametrize("device", COMPUTING)
def test_each_group_counts_its_own_steps(tmp_path, device: str) -> None:
    step = two_groups()
    path = compiled(step, tmp_path / "m.pef", device)
    by_compile, by_sync = tilework.load(path), tilework.load(path, weights=False)
    by_sync.to_device(step.model, step.optimizer)
    for session in (by_compile, by_sync):
        assert int(session.memory.read("state/opt0.g0/step")) == 20 and int(session.memory.read("state/opt0.g1/step")) == 0
    host = copy.deepcopy(step)
    expected = eager(step, 5)
    for session in (by_compile, by_sync):
        assert losses(session, host, 5) == pytest.approx(expected, rel=1e-5)
    by_sync.to_host(host.model, host.optimizer)
    counts = [int(host.optimizer.state[g["params"][0]]["step"]) for g in host.optimizer.param_groups]
    assert counts == [25, 5]
    assert eager(host, 3) == pytest.approx(eager(step, 3), rel=1e-4)


def test_different_counts_in_one_group(tmp_path) -> None:
    step = fit(adam)
    eager(step, 3)
    path = compiled(step, tmp_path / "m.pef", "reference")
    step.optimizer.state[step.model.layers[0].bias]["step"] += 4
    with pytest.raises(tilework.UserError, match="optimizer-steps") as e:
        compiled(step, tmp_path / "n.pef", "reference")
    assert "opt0.g0" in str(e.value) and "3" in str(e.value) and "7" in str(e.value)
    with pytest.raises(tilework.UserError, match="optimizer-steps"):
        tilework.load(path).to_device(step.model, step.optimizer)
    del step.optimizer.state[step.model.layers[0].bias]  # never stepped, while the weight has been
    with pytest.raises(tilework.UserError, match="optimizer-steps"):
        compiled(step, tmp_path / "n.pef", "reference")


@pytest.mark.parametrize("device", COMPUTING)
def test_checkpoints_with_one_counter_for_an_optimizer_still_load(tmp_path, device: str) -> None:
    step = two_groups()
    session = tilework.load(compiled(step, tmp_path / "m.pef", device))
    tensors = {k: t for k, t in session.tensors().items() if not k.endswith("/step")}
    safetensors.torch.save_file({**tensors, "state/opt0/step": torch.tensor(9)}, tmp_path / "old.safetensors")
    session.load(tmp_path / "old.safetensors")
    assert int(session.memory.read("state/opt0.g0/step")) == int(session.memory.read("state/opt0.g1/step")) == 9


@pytest.mark.parametrize("device", COMPUTING)
def test_dampening_goes_on_where_sgd_had_begun(tmp_path, device: str) -> None:
    """torch's SGD keeps no count: a momentum buffer says that the first step, which is not dampened, is over."""
    step = fit(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.4))
    path = compiled(step, tmp_path / "fresh.pef", device)
    assert losses(tilework.load(path), copy.deepcopy(step), 3) == pytest.approx(eager(copy.deepcopy(step), 3), rel=1e-5)
    eager(step, 4)
    by_compile = tilework.load(compiled(step, tmp_path / "m.pef", device))
    by_sync = tilework.load(path)
    by_sync.to_device(step.model, step.optimizer)
    host = copy.deepcopy(step)
    expected = eager(step, 4)
    for session in (by_compile, by_sync):
        assert losses(session, host, 4) == pytest.approx(expected, rel=1e-5)
    by_sync.to_host(host.model, host.optimizer)
    by_sync.to_device(host.model, host.optimizer)
    assert losses(by_sync, host, 2) == pytest.approx(eager(step, 2), rel=1e-5)


def test_half_begun_momentum_matters_only_where_it_is_dampened(tmp_path) -> None:
    for dampening in (0.0, 0.4):
        step = fit(lambda p, d=dampening: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=d))
        path = compiled(step, tmp_path / "m.pef", "reference")
        eager(step, 2)
        del step.optimizer.state[step.model.layers[0].bias]
        session = tilework.load(path)
        if dampening:
            with pytest.raises(tilework.UserError, match="optimizer-steps"):
                session.to_device(step.model, step.optimizer)
        else:
            session.to_device(step.model, step.optimizer)
            assert losses(session, step, 3) == pytest.approx(eager(step, 3), rel=1e-5)


# ---- a loop is as many calls ----


@pytest.mark.parametrize("device", COMPUTING)
def test_an_input_that_forward_changes_is_new_in_every_step(tmp_path, device: str) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 4)

        def forward(self, x, t):
            t.add_(1.0)
            return (self.fc(x) * t).square().mean()

    torch.manual_seed(0)
    model = Changes()
    x, t = torch.randn(4, 6), torch.tensor(0.0)
    step = tilework.Step(model=model, inputs=(x, t), optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    path = compiled(step, tmp_path / "m.pef", device)
    one, many = tilework.load(path), tilework.load(path)
    assert many.run(x.repeat(4, 1), t, num_steps=4).losses.tolist() == [float(one.run(x, t).loss) for _ in range(4)]
    assert torch.equal(many.infer(x.repeat(3, 1), t, num_batches=3), one.infer(x, t).repeat(3)) and float(t) == 0.0


# ---- losses that are no numbers ----


class Losses(nn.Module):
    """Two losses of different dtypes, running statistics and dropout: all that a step can change."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.fc, self.drop, self.dtype = nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Dropout(0.3), dtype

    def forward(self, x):
        out = self.drop(self.fc(self.norm(x)))
        other = (out + self.fc.weight.sum() * x[0, 0].sqrt()).to(self.dtype)  # not a number where x[0, 0] < 0
        return out.square().mean(), other.square().mean()


def watched(path: Path, dtype: torch.dtype, device: str, programs: str = "fused", **kwargs) -> tuple[Path, tilework.Step]:
    torch.manual_seed(0)
    model = Losses(dtype)
    step = tilework.Step(
        model=model, inputs=(torch.rand(4, 6),), loss=[0, 1], optimizer=adam(model.parameters()), clip_norm=1.0, **kwargs
    )
    return compiled(step, path, device, programs, verify=False), step  # how bf16 rounds is not the question here


def state_of(session: tilework.Session) -> tuple:
    return session.random_state(), session.num_steps, {k: t.tolist() for k, t in session.tensors().items()}


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_whose_loss_is_no_number_changes_nothing(tmp_path, device: str, dtype: torch.dtype) -> None:
    path, step = watched(tmp_path / "m.pef", dtype, device)
    good = step.inputs[0]
    bad = good.clone()
    bad[0, 0] = -1.0
    expected, session = tilework.load(path, seed=4), tilework.load(path, seed=4, nan_error=True)
    assert torch.equal(expected.run(good).loss, session.run(good).loss)
    before = state_of(session)
    with pytest.raises(tilework.UserError, match="not a number at step 2") as e:
        session.run(bad)
    assert e.value.id == "loss-nan" and state_of(session) == before == state_of(expected)
    # steps before it in a loop stay done
    with pytest.raises(tilework.UserError, match="not a number at step 4"):
        session.run(torch.cat([good, 2 * good, bad, good]), num_steps=4)
    expected.run(torch.cat([good, 2 * good]), num_steps=2)
    assert state_of(session) == state_of(expected) and session.num_steps == 3
    assert torch.equal(expected.run(good).loss, session.run(good).loss)


@pytest.mark.slow
@pytest.mark.parametrize("device", COMPUTING)
def test_no_number_in_a_later_micro_batch_and_in_sections(tmp_path, device: str) -> None:
    path, step = watched(tmp_path / "a.pef", torch.float32, device, num_micro_batches=2)
    good = step.inputs[0]
    bad = good.clone()
    bad[0, 0] = -1.0
    session = tilework.load(path, nan_error=True)
    session.run(torch.cat([good, good]))
    before = state_of(session)
    with pytest.raises(tilework.UserError, match="step 2"):
        session.run(torch.cat([good, bad]))
    assert state_of(session) == before and not session.kept_gradients

    path, step = watched(tmp_path / "s.pef", torch.float32, device, "sections")
    session = tilework.load(path, nan_error=True)
    session.run(good)
    session.run(good, sections=["fwd"])
    before = state_of(session)
    with pytest.raises(tilework.UserError, match="step 2"):
        session.run(bad)
    assert state_of(session) == before
    for left in ("bwd", "opt"):  # what an earlier fwd kept is gone
        with pytest.raises(tilework.UserError, match="run-order"):
            session.run(sections=[left])


# ---- the driver ----


@pytest.mark.parametrize("source", ["int nothing;", "const long long tilework_driver_layout[5] = {0};"], ids=["missing", "other"])
def test_a_driver_of_another_layout_is_refused(tmp_path, source: str) -> None:
    path = compiled(fit(), tmp_path / "m.pef", "cpu")
    (tmp_path / "d.c").write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "d.so", tmp_path / "d.c"], check=True)
    write(path, {**members_of(path), "native/driver.so": (tmp_path / "d.so").read_bytes()})
    with pytest.raises(tilework.MachineError, match="compile again") as e:
        tilework.load(path)
    assert e.value.id == "native-driver"
    tilework.load(path, device="reference")  # which needs no driver


# ---- what the host has changed since ----


def said(session: tilework.Session, *args, **kwargs) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        session.run(*args, **kwargs)
    assert all(w.filename == __file__ for w in found if issubclass(w.category, tilework.TileworkWarning))
    return [str(w.message) for w in found if issubclass(w.category, tilework.TileworkWarning)]


@pytest.mark.parametrize("device", COMPUTING)
def test_a_layer_frozen_after_the_compile_is_said_once(tmp_path, device: str) -> None:
    step = fit(None, nn.Linear(6, 6), nn.Linear(6, 4))
    path, x = compiled(step, tmp_path / "m.pef", device, "all"), step.inputs[0]
    assert said(tilework.load(path), x) == []
    step.model.layers[0].requires_grad_(False)
    session = tilework.load(path)
    assert said(session, x, sections=["fwd"]) == []  # trains nothing
    (text,) = said(session, x)
    assert "layers.0.weight" in text and "layers.1" not in text and "compile again" in text
    assert said(session, x) == said(session, x.repeat(2, 1), num_steps=2) == []
    session = tilework.load(path)
    assert len(said(session, x, keep_gradients=True)) == 1 and said(session, x) == []
    del step
    gc.collect()
    assert said(tilework.load(path), x) == []  # nobody is left who could have meant it


def test_a_scheduler_that_nobody_follows_is_said_once(tmp_path) -> None:
    step = fit()
    path, x = compiled(step, tmp_path / "m.pef", "reference"), step.inputs[0]
    torch.optim.lr_scheduler.StepLR(step.optimizer, 1)
    (text,) = said(session := tilework.load(path), x)
    assert "follow" in text and said(session, x) == []
    followed, by_hand, scheduled = (tilework.load(path) for _ in range(3))
    followed.follow(step.optimizer)
    by_hand.set(lr=0.1)
    assert said(followed, x) == said(by_hand, x) == said(scheduled, x, hyper={"lr": 0.1}) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(path, step).ok  # means the hyperparameters that were compiled


def test_the_host_is_known_by_sync_too_and_not_kept_alive(tmp_path) -> None:
    path = compiled(fit(), tmp_path / "m.pef", "reference")
    gc.collect()
    step = fit()
    torch.optim.lr_scheduler.StepLR(step.optimizer, 1)
    step.model.requires_grad_(False)
    session = tilework.load(path)
    assert hosts.host_of(session.artifact.digest) is None
    session.to_device(step.model, step.optimizer)
    assert len(said(session, *step.inputs)) == 2
    alive = weakref.ref(step.model)
    del step
    gc.collect()
    assert alive() is None and hosts.host_of(session.artifact.digest) is None


# ---- memory ----


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable:   1000000 kB\n"}
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1_024_000_000),
        ({"proc/self/cgroup": "0::/\n"}, 1_024_000_000),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "5\n"}, 1_024_000_000),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "500000\n", f"{V2}/memory.current": "100000\n"}, 400_000),
        (  # the tightest of the folders above counts
            {"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "max\n", f"{V2}/a/b/memory.current": "1\n",
             f"{V2}/a/memory.max": "700000\n", f"{V2}/a/memory.current": "600000\n"},
            100_000,
        ),
        (  # the system gives file pages back before it refuses memory
            {"proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.max": "900000\n", f"{V2}/a/memory.current": "900000\n",
             f"{V2}/a/memory.stat": "anon 1\nactive_file 7\ninactive_file 300000\n"},
            300_000,
        ),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "5\n", f"{V2}/memory.current": "9\n"}, 0),
        (
            {"proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/job/1\n", f"{V1}/job/1/memory.limit_in_bytes": "800000\n",
             f"{V1}/job/1/memory.usage_in_bytes": "500000\n", f"{V1}/memory.limit_in_bytes": "9223372036854771712\n",
             f"{V1}/memory.usage_in_bytes": "1\n"},
            300_000,
        ),
        (  # a container sees its own group as the root, and the host's path
            {"proc/self/cgroup": "3:memory:/docker/abc\n0::/../x\n", f"{V1}/memory.limit_in_bytes": "800000\n",
             f"{V1}/memory.usage_in_bytes": "500000\n", f"{V1}/memory.stat": "cache 9\ntotal_inactive_file 50000\n"},
            350_000,
        ),
        ({"proc/self/cgroup": "nonsense\n", f"{V2}/memory.max": "what\n"}, 1_024_000_000),
    ],
)  # fmt: skip
def test_free_memory_respects_the_limits_of_a_job(tmp_path, files: dict[str, str], expected: int) -> None:
    assert free_memory(machine(tmp_path, {**MEMINFO, **files})) == expected


def test_free_memory_that_nobody_tells(tmp_path) -> None:
    assert free_memory(tmp_path) is None
    limited = {"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "500\n", f"{V2}/memory.current": "100\n"}
    assert free_memory(machine(tmp_path, limited)) == 400
    assert free_memory() is not None


def test_a_session_that_does_not_fit_is_refused(tmp_path, monkeypatch) -> None:
    path = compiled(fit(), tmp_path / "m.pef", "reference")
    monkeypatch.setattr("tilework.runtime.devices.host.free_memory", lambda: 10)
    with pytest.raises(tilework.MachineError, match="do not fit into memory"):
        tilework.load(path)
