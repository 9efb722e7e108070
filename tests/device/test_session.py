"""One suite that every device passes: sections, sync, gradients, hyperparameters, wrong inputs. `null` has its own
expectations: it takes everything, checks everything, and computes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from devices import ALL, COMPUTING
from torch import nn

import tilework
from models import MODELS
from parity import SEED, batches, train_eager
from tilework.artifact.structure import flatten


def inputs_of(step: tilework.Step) -> list[torch.Tensor]:
    return [t.detach() for t in [*flatten(step.inputs)[0], *flatten(step.targets)[0]]]


# ---- every device ----


@pytest.mark.parametrize("device", ALL)
def test_run_returns_loss_and_outputs_in_the_models_structure(session_of, device: str) -> None:
    session, step = session_of("multi_output", device)
    result = session.run(*inputs_of(step))
    assert isinstance(result.outputs["loss"], tuple) and isinstance(result.outputs["out"], list)
    assert result.outputs["out"][1][1] is None
    assert result.outputs["out"][0].shape == (5, 3) and result.loss.shape == ()
    if device == "null":
        assert float(result.loss) == 0 and not result.outputs["extra"].any()
    else:
        total = result.outputs["loss"][0] + result.outputs["loss"][1]
        assert torch.equal(result.loss, total)


@pytest.mark.parametrize("device", ALL)
def test_wrong_inputs_list_every_difference(session_of, device: str) -> None:
    session, step = session_of("multi_output", device)
    x, label, value = inputs_of(step)
    with pytest.raises(tilework.UserError) as e:
        session.run(x.long(), label[:3], value)
    text = str(e.value)
    assert "x: dtype is int64, expected float32" in text
    assert "label: shape is [3], expected [5]" in text and "value" not in text.split("see:")[0]
    with pytest.raises(tilework.UserError, match="wrong number of input tensors") as e:
        session.run(x, label)
    assert "2:" in str(e.value) and "3: x float32[5, 7], label int64[5]" in str(e.value)


@pytest.mark.parametrize("device", ALL)
def test_wrong_sections_and_names(session_of, device: str) -> None:
    session, step = session_of("mlp", device)
    with pytest.raises(tilework.UserError, match="no section 'forward'"):
        session.run(*inputs_of(step), sections=["forward"])
    with pytest.raises(tilework.UserError, match="did you mean 'lr'"):
        session.set(lrr=1.0)
    with pytest.raises(tilework.UserError, match="bwd needs what a fwd"):
        session.run(sections=["bwd"])
    with pytest.raises(tilework.UserError, match="fused step does not keep"):
        session.gradients()
    with pytest.raises(tilework.UserError, match="not run"):
        session.run(*inputs_of(step), sections=["opt"])


@pytest.mark.parametrize("device", ALL)
def test_hyperparameters_are_run_time_inputs(session_of, device: str) -> None:
    session, step = session_of("residual", device)
    session.set(lr=0.0, weight_decay=0.0)
    before = session.tensors()
    session.run(*inputs_of(step))
    assert all(torch.equal(t, before[k]) for k, t in session.tensors().items() if k.startswith("param/"))
    session.set({"opt0.g0.lr": 0.1})
    assert session.hyper["opt0.g0.lr"] == 0.1
    session.run(*inputs_of(step))
    changed = any(not torch.equal(t, before[k]) for k, t in session.tensors().items() if k.startswith("param/"))
    assert changed == (device != "null")


@pytest.mark.parametrize("device", ALL)
def test_session_without_weights_refuses(artifact, device: str) -> None:
    session = tilework.load(artifact("mlp", device))
    step = MODELS["mlp"]()
    if device == "null":
        session.run(*inputs_of(step))
        return
    with pytest.raises(tilework.UserError, match="no weights yet"):
        session.run(*inputs_of(step))


@pytest.mark.parametrize("device", ALL)
def test_save_and_load(session_of, artifact, device: str, tmp_path) -> None:
    session, step = session_of("mlp", device)
    session.run(*inputs_of(step))
    session.save(tmp_path / "w.safetensors")
    other = tilework.load(artifact("mlp", device), weights=tmp_path / "w.safetensors")
    assert other.num_steps == 1
    mine, theirs = session.tensors(), other.tensors()
    assert mine.keys() == theirs.keys() and all(torch.equal(t, theirs[k]) for k, t in mine.items())
    assert any(k.startswith("state/") for k in mine)


@pytest.mark.slow
@pytest.mark.parametrize("device", COMPUTING)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(session_of, artifact, device: str, tmp_path) -> None:
    """Dropout masks, momentum and step count included."""
    session, step = session_of("dropout", device, seed=9, optimizer="adam")
    data = batches(step, 6)
    losses = [session.run(*b).loss for b in data[:3]]
    session.save(tmp_path / "c.safetensors")
    losses += [session.run(*b).loss for b in data[3:]]
    other = tilework.load(artifact("dropout", device, optimizer="adam"), weights=tmp_path / "c.safetensors", seed=1234)
    again = [other.run(*b).loss for b in data[3:]]
    assert all(torch.equal(a, b) for a, b in zip(losses[3:], again, strict=True))
    assert all(torch.equal(t, other.tensors()[k]) for k, t in session.tensors().items())


@pytest.mark.parametrize("device", ALL)
def test_foreign_weights_are_listed(session_of, device: str) -> None:
    session, _ = session_of("mlp", device)
    with pytest.raises(tilework.UserError) as e:
        session.load_tensors({"0.weight": torch.zeros(3), "nothing": torch.zeros(1)})
    assert "0.weight" in str(e.value) and "nothing" in str(e.value)
    with pytest.raises(tilework.UserError, match="lacks tensors"):
        session.to_device(nn.Sequential(nn.Linear(10, 16)))


# ---- devices that compute ----


@pytest.mark.parametrize("device", COMPUTING)
def test_fwd_alone_changes_no_weight(session_of, device: str) -> None:
    session, step = session_of("conv_bn", device)
    before = session.tensors()
    session.run(*inputs_of(step), sections=["fwd"])
    after = session.tensors()
    assert all(torch.equal(t, before[k]) for k, t in after.items() if k.startswith(("param/", "state/")))
    # BatchNorm's running statistics follow forward, as in eager training mode
    assert not torch.equal(after["buffer/bn1.running_mean"], before["buffer/bn1.running_mean"])


@pytest.mark.parametrize("device", COMPUTING)
def test_sections_one_by_one_equal_the_fused_step(session_of, device: str) -> None:
    fused, step = session_of("dropout", device, seed=SEED)
    parts, _ = session_of("dropout", device, seed=SEED)
    for _ in range(3):
        a = fused.run(*inputs_of(step))
        b = parts.run(*inputs_of(step), sections=["fwd"])
        parts.run(sections=["bwd"])
        parts.run(sections=["reduce", "opt"])
        assert torch.allclose(a.loss, b.loss, rtol=1e-6)
    for k, t in fused.tensors().items():
        assert torch.allclose(t, parts.tensors()[k], rtol=1e-5, atol=1e-6), k


@pytest.mark.parametrize("device", COMPUTING)
def test_loss_on_the_host(session_of, device: str) -> None:
    """fwd, a loss on the host, its gradient back in, then bwd and opt: the same as the loss on the device."""
    whole, step = session_of("mlp", device)
    session, _ = session_of("mlp", device)
    x, y = inputs_of(step)
    whole.run(x, y)
    out = session.run(x, y, sections=["fwd"]).outputs.requires_grad_()
    F.cross_entropy(out, y).backward()
    session.run(sections=["bwd", "opt"], out_grads=[out.grad])
    for k, t in whole.tensors().items():
        assert torch.allclose(t, session.tensors()[k], rtol=1e-4, atol=1e-6), k


@pytest.mark.parametrize("device", COMPUTING)
def test_model_without_a_loss(device: str, workshop) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(3, 5), torch.randn(3, 2)
    step = tilework.Step(model=model, inputs=(x,), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    path = workshop / f"host-loss-{device}.pef"
    tilework.compile(step, path, options=tilework.Options(device=device, opt_level=1), weights="inside")
    session = tilework.load(path)
    with pytest.raises(tilework.UserError, match="computed on the host"):
        session.run(x)
    out = session.run(x, sections=["fwd"]).outputs.requires_grad_()
    with pytest.raises(tilework.UserError, match="gradients of the outputs"):
        session.run(sections=["bwd"])
    F.mse_loss(out, y).backward()
    session.run(sections=["bwd", "opt"], out_grads={"output": out.grad})
    F.mse_loss(model(x), y).backward()
    step.optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(session.state_dict()[name], p, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("device", COMPUTING)
def test_weights_per_element_through_output_gradients(session_of, device: str) -> None:
    session, step = session_of("per_element", device)
    x, y = inputs_of(step)
    weights = torch.linspace(0, 1, 6)
    session.run(x, y, sections=["fwd"])
    session.run(sections=["bwd"], out_grads={"output0": weights})
    twin = MODELS["per_element"]().model
    (twin(x, y)[0] * weights).sum().backward()
    assert torch.allclose(session.gradients()["fc.weight"], twin.fc.weight.grad, rtol=1e-5, atol=1e-7)
    # the next bwd starts from ones again
    session.run(x, y, sections=["fwd"])
    session.run(sections=["bwd"])
    twin.zero_grad()
    twin(x, y)[0].sum().backward()
    assert torch.allclose(session.gradients()["fc.weight"], twin.fc.weight.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", COMPUTING)
def test_host_and_device_are_separate(session_of, device: str) -> None:
    session, step = session_of("mlp", device)
    x, y = inputs_of(step)
    loss = step.loss(step.model(x), y)  # a host graph, made before the device runs
    before = {k: v.clone() for k, v in step.model.state_dict().items()}
    session.run(x, y)
    assert all(torch.equal(v, before[k]) for k, v in step.model.state_dict().items())
    loss.backward()  # nothing it needs was touched
    assert step.model[0].weight.grad is not None
    session.to_host(step.model, step.optimizer)
    changed = {k for k, v in step.model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"0.weight", "0.bias", "4.weight", "4.bias"}  # layer 2 is frozen
    assert int(step.optimizer.state[step.model[0].weight]["step"]) == 1
    with torch.no_grad():
        step.model[0].weight.zero_()
    assert session.memory.read("param/0.weight").any()  # a host edit does not reach the device by itself


@pytest.mark.parametrize("device", COMPUTING)
def test_training_goes_on_where_the_other_side_stopped(session_of, device: str) -> None:
    """Two steps on the device, sync, two on the host, sync, two on the device: as six on the host."""
    session, step = session_of("residual", device)
    twin = MODELS["residual"]()
    data = batches(step, 6)
    expected = train_eager(twin, data)
    losses = [session.run(*b).loss for b in data[:2]]
    session.to_host(step.model, step.optimizer)
    losses += train_eager(step, data[2:4]).losses
    session.to_device(step.model, step.optimizer)
    losses += [session.run(*b).loss for b in data[4:]]
    for mine, theirs in zip(losses, expected.losses, strict=True):
        assert torch.allclose(mine, theirs.detach(), rtol=1e-4)


def test_state_dict_and_torch_save_work_as_before(session_of, tmp_path) -> None:
    session, step = session_of("tied", "reference")
    session.run(*inputs_of(step))
    fresh = MODELS["tied"]().model
    fresh.load_state_dict(session.state_dict(), strict=False)
    assert torch.equal(fresh.embed.weight, session.memory.read("param/embed.weight"))
    assert fresh.head.weight is fresh.embed.weight  # still tied
    torch.save(step.model.state_dict(), tmp_path / "m.pt")
    step.model.load_state_dict(torch.load(tmp_path / "m.pt"))


@pytest.mark.parametrize("device", COMPUTING)
def test_inference_from_a_training_artifact(session_of, device: str) -> None:
    session, step = session_of("conv_bn", device)
    x, y = inputs_of(step)
    session.run(x, y)
    session.to_host(step.model)
    before = session.tensors()
    out = session.infer(x)
    step.model.eval()
    with torch.no_grad():
        assert torch.allclose(out, step.model(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(t, before[k]) for k, t in session.tensors().items())


@pytest.mark.parametrize("device", COMPUTING)
def test_inference_needs_no_target_and_drops_nothing(session_of, device: str) -> None:
    """The model adds noise to its input in eval mode too, so only its dropout must be gone: two seeds, one structure."""
    session, step = session_of("accumulated", device)
    x = inputs_of(step)[0]
    a, b = session.infer(x), session.infer(x)
    assert torch.equal(a, b)


@pytest.mark.parametrize("device", COMPUTING)
def test_dropout_probability_is_a_run_time_input(session_of, device: str) -> None:
    session, step = session_of("accumulated", device)
    x, y = (torch.cat([t] * 3) for t in inputs_of(step))
    assert session.hyper["3.p"] == pytest.approx(0.2)
    session.set(p=0.0, lr=0.0)
    first, second = session.run(x, y).losses, session.run(x, y).losses
    assert torch.allclose(first, second)  # nothing is random any more
    assert torch.allclose(first[0], first[1])
    session.set(p=0.9)
    third, fourth = session.run(x, y).losses, session.run(x, y).losses
    assert not torch.allclose(third, fourth)


SCHEDULES = {
    "one_cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8),  # changes momentum too
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.3),
}


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedulers_of_torch(session_of, device: str, schedule: str) -> None:
    session, step = session_of("multi_optimizer", device, optimizer="sgd_nesterov")
    twin = MODELS["multi_optimizer"](optimizer="sgd_nesterov")
    mine = [SCHEDULES[schedule](o) for o in step.optimizers]
    theirs = [SCHEDULES[schedule](o) for o in twin.optimizers]
    session.follow(*step.optimizers)
    rates = set()
    for batch in batches(step, 6):
        found = session.run(*batch).loss
        rates.add(session.hyper["opt1.g0.lr"])
        for scheduler in mine:
            scheduler.step()
        expected = train_eager(twin, [batch]).losses[0]
        for scheduler in theirs:
            scheduler.step()
        assert torch.allclose(found, expected.detach(), rtol=1e-4)
    assert len(rates) > 2


def test_following_momentum_that_was_not_compiled_in(session_of) -> None:
    session, step = session_of("linear", "reference")
    torch.optim.lr_scheduler.OneCycleLR(step.optimizer, max_lr=0.2, total_steps=8)
    session.follow(step.optimizer)
    with pytest.raises(tilework.UserError, match="keep_momentum"):
        session.run(*inputs_of(step))


@pytest.mark.parametrize("device", COMPUTING)
def test_several_steps_in_one_call(session_of, device: str) -> None:
    one, step = session_of("dropout", device, seed=1)
    many, _ = session_of("dropout", device, seed=1)
    data = batches(step, 4)
    single = torch.stack([one.run(*b).loss for b in data])
    together = many.run(*[torch.cat(parts) for parts in zip(*data, strict=True)], num_steps=4)
    assert torch.equal(single, together.losses)
    assert many.num_steps == 4 and together.outputs.shape == (16, 3)
    assert all(torch.equal(t, many.tensors()[k]) for k, t in one.tensors().items())


@pytest.mark.parametrize("device", COMPUTING)
def test_same_seed_same_run_other_seed_other_run(session_of, device: str) -> None:
    runs = []
    for seed in (1, 1, 2):
        session, step = session_of("dropout", device, seed=seed)
        runs.append(torch.stack([session.run(*inputs_of(step)).loss for _ in range(3)]))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("device", COMPUTING)
def test_nan_loss_is_an_error_with_the_step(artifact, device: str) -> None:
    session = tilework.load(artifact("linear", device), nan_error=True)
    step = MODELS["linear"]()
    session.to_device(step.model)
    x, y = inputs_of(step)
    session.run(x, y)
    session.run(x, y)
    with pytest.raises(tilework.UserError, match="not a number at step 3"):
        session.run(x * float("nan"), y)


@pytest.mark.parametrize("device", COMPUTING)
def test_inputs_may_be_strided_or_numpy(session_of, device: str) -> None:
    session, step = session_of("conv_bn", device)
    other, _ = session_of("conv_bn", device)
    x, y = inputs_of(step)
    expected = session.run(x, y).loss
    strided = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not strided.is_contiguous()
    assert torch.equal(other.run(strided, y).loss, expected)
    third, _ = session_of("conv_bn", device)
    assert torch.equal(third.run(np.asarray(x), np.asarray(y)).loss, expected)


@pytest.mark.parametrize("device", COMPUTING)
def test_inputs_as_the_dict_they_were_compiled_with(session_of, device: str) -> None:
    session, step = session_of("attention", device)
    turned = {"mask": step.inputs["mask"], "bias": None, "tokens": step.inputs["tokens"]}  # another order of keys
    loss = session.run(turned, step.targets).loss
    again, _ = session_of("attention", device)
    assert torch.equal(loss, again.run(step.inputs["tokens"], step.inputs["mask"], step.targets[0]).loss)


def test_keeping_gradients_in_the_fused_step(workshop) -> None:
    step = MODELS["linear"]()
    path = workshop / "kept.pef"
    tilework.compile(
        step,
        path,
        options=tilework.Options(device="reference", programs="fused", keep_gradients=True),
        weights="inside",
    )
    session = tilework.load(path)
    session.run(*inputs_of(step))
    assert session.gradients()["fc.weight"].abs().sum() > 0
    with pytest.raises(tilework.UserError, match="cannot run the section fwd on its own"):
        session.run(*inputs_of(step), sections=["fwd"])


def test_momentum_that_was_not_compiled_in(session_of, workshop) -> None:
    session, _ = session_of("linear", "reference")
    with pytest.raises(tilework.UserError, match="keep_momentum"):
        session.set(momentum=0.9)
    path = workshop / "momentum.pef"
    step = MODELS["linear"]()
    tilework.compile(step, path, options=tilework.Options(device="reference", keep_momentum=True), weights="inside")
    session = tilework.load(path)
    session.set(momentum=0.9)
    twin = MODELS["linear"]()
    twin.optimizer.param_groups[0]["momentum"] = 0.9
    data = batches(step, 4)
    for found, expected in zip([session.run(*b).loss for b in data], train_eager(twin, data).losses, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("device", ALL)
def test_wrong_names_are_listed(session_of, device: str) -> None:
    session, step = session_of("attention", device)
    with pytest.raises(tilework.UserError) as e:
        session.run({"token": step.inputs["tokens"], "mask": step.inputs["mask"]}, step.targets)
    assert "token: not an input; did you mean 'tokens'?" in str(e.value) and "tokens: missing" in str(e.value)


def test_unused_sections_take_no_memory() -> None:
    """A buffer is pages of zeros that the system hands out when they are touched."""
    import resource

    from tilework.artifact.graph import TensorType

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    big = TensorType.dense("float32", (64, 1024, 1024)).empty()  # 256 MB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64_000  # kB
    assert big.data_ptr() % 64 == 0 and float(big[3, 5, 7]) == 0.0
