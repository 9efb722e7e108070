"""Optimizers: every rule beside eager PyTorch, values that change, and the checks."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from pop_helpers import Classifier, data, eager, options, same, trained, twin

import poptorch
import tilework

P, T = poptorch.optim, torch.optim
RULES = {
    "sgd": (lambda p: P.SGD(p, lr=0.1), lambda p: T.SGD(p, lr=0.1)),
    "sgd momentum": (lambda p: P.SGD(p, lr=0.1, momentum=0.9), lambda p: T.SGD(p, lr=0.1, momentum=0.9)),
    "sgd dampening": (lambda p: P.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
                      lambda p: T.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01)),
    "sgd nesterov": (lambda p: P.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
                     lambda p: T.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "sgd separate": (lambda p: P.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=False, velocity_scaling=64.0),
                     lambda p: T.SGD(p, lr=0.1, momentum=0.9)),
    "sgd maximize": (lambda p: P.SGD(p, lr=0.1, maximize=True), lambda p: T.SGD(p, lr=0.1, maximize=True)),
    "adam": (lambda p: P.Adam(p, lr=0.02, betas=(0.8, 0.99), weight_decay=0.01),
             lambda p: T.Adam(p, lr=0.02, betas=(0.8, 0.99), weight_decay=0.01)),
    "adamw": (lambda p: P.AdamW(p, lr=0.02, weight_decay=0.1), lambda p: T.AdamW(p, lr=0.02, weight_decay=0.1)),
    "adamw uncorrected": (lambda p: P.AdamW(p, lr=0.002, bias_correction=False),
                          lambda p: tilework.optim.AdamW(p, lr=0.002, bias_correction=False)),
    "rmsprop": (lambda p: P.RMSprop(p, lr=0.01, alpha=0.9), lambda p: T.RMSprop(p, lr=0.01, alpha=0.9)),
    "rmsprop centered": (lambda p: P.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
                         lambda p: T.RMSprop(p, lr=0.01, momentum=0.5, centered=True)),
    "rmsprop tf": (lambda p: P.RMSprop(p, lr=0.01, momentum=0.5, use_tf_variant=True),
                   lambda p: tilework.optim.RMSprop(p, lr=0.01, momentum=0.5, use_tf_variant=True)),
    "lamb": (lambda p: P.LAMB(p, lr=0.01, weight_decay=0.01),
             lambda p: tilework.optim.LAMB(p, lr=0.01, eps=1e-8, weight_decay=0.01)),
    "lamb limited": (lambda p: P.LAMB(p, lr=0.01, max_weight_norm=0.5, bias_correction=False),
                     lambda p: tilework.optim.LAMB(p, lr=0.01, eps=1e-8, max_weight_norm=0.5, bias_correction=False)),
    "torch sgd": (lambda p: T.SGD(p, lr=0.1, momentum=0.9), lambda p: T.SGD(p, lr=0.1, momentum=0.9)),
    "torch adam": (lambda p: T.Adam(p, lr=0.02), lambda p: T.Adam(p, lr=0.02)),
    "torch adamw": (lambda p: T.AdamW(p, lr=0.02), lambda p: T.AdamW(p, lr=0.02)),
    "torch rmsprop": (lambda p: T.RMSprop(p, lr=0.02), lambda p: T.RMSprop(p, lr=0.02)),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_eagers(name: str) -> None:
    ours, theirs = RULES[name]
    model = Classifier()
    other = twin(model)
    executor, _ = trained(options(3, 2), model, ours(model.parameters()))
    optimizer = theirs(other.parameters())
    for call in range(2):
        x, y = data(12, seed=call)
        executor(x, y)
        eager(other, optimizer, x, y, 3, 2, 1)
    same(model, other, 2e-5)


@pytest.mark.parametrize("scaling", [1.0, 128.0])
@pytest.mark.parametrize("kind", [P.SGD, P.Adam, P.AdamW, P.RMSprop, P.LAMB], ids=lambda k: k.__name__)
def test_loss_scaling_changes_nothing(kind: type, scaling: float) -> None:
    model, other = Classifier(), None
    other = twin(model)
    x, y = data(4)
    trained(model=model, optimizer=kind(model.parameters(), lr=0.01, loss_scaling=scaling))[0](x, y)
    trained(model=other, optimizer=kind(other.parameters(), lr=0.01))[0](x, y)
    same(model, other)


@pytest.mark.parametrize("kind", [P.SGD, P.Adam, P.AdamW, P.RMSprop, P.LAMB], ids=lambda k: k.__name__)
def test_they_are_optimizers_of_torch(kind: type) -> None:
    made = kind(Classifier().parameters(), lr=0.01)
    assert isinstance(made, torch.optim.Optimizer)
    if kind is not P.LAMB:
        assert isinstance(made, getattr(torch.optim, kind.__name__))
    assert torch.optim.lr_scheduler.StepLR(made, 1).get_last_lr() == [0.01]


@pytest.mark.parametrize("kind", [P.Adam, P.AdamW])
def test_amsgrad_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="amsgrad"):
        kind(Classifier().parameters(), amsgrad=True)
    model = Classifier()
    with pytest.raises(poptorch.Error, match="amsgrad"):
        poptorch.trainingModel(model, options(), T.Adam(model.parameters(), amsgrad=True))


@pytest.mark.parametrize("kind", [T.Adagrad, T.Adadelta, T.Adamax, T.NAdam])
def test_other_optimizers_are_refused_by_name(kind: type) -> None:
    model = Classifier()
    with pytest.raises(poptorch.Error, match="Unsupported optimizer type") as caught:
        poptorch.trainingModel(model, options(), kind(model.parameters()))
    assert kind.__name__ in str(caught.value)


def test_sgd_by_default() -> None:
    model = Classifier()
    other = twin(model)
    x, y = data(4)
    poptorch.trainingModel(model, options())(x, y)
    eager(other, T.SGD(other.parameters(), lr=0.01), x, y, 1, 1, 1)
    same(model, other)


def test_a_wrong_type_of_accumulator() -> None:
    with pytest.raises(ValueError, match="accum_type"):
        P.Adam(Classifier().parameters(), accum_type=torch.int32)


def test_a_learning_rate_counts_from_setOptimizer_on() -> None:
    model = Classifier()
    other = twin(model)
    optimizer = P.SGD(model.parameters(), lr=0.1)
    executor, _ = trained(model=model, optimizer=optimizer)
    theirs = T.SGD(other.parameters(), lr=0.1)
    x, y = data(4)
    executor(x, y)
    eager(other, theirs, x, y, 1, 1, 1)
    optimizer.param_groups[0]["lr"] = 0.5
    executor(x, y)  # not yet
    eager(other, theirs, x, y, 1, 1, 1)
    same(model, other)
    executor.setOptimizer(optimizer)
    theirs.param_groups[0]["lr"] = 0.5
    executor(x, y)
    eager(other, theirs, x, y, 1, 1, 1)
    same(model, other)


def test_a_scheduler() -> None:
    model = Classifier()
    other = twin(model)
    optimizer, theirs = P.Adam(model.parameters(), lr=0.1), T.Adam(other.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.3) for o in (optimizer, theirs)]
    executor, _ = trained(options(2), model, optimizer)
    for call in range(3):
        x, y = data(4, seed=call)
        executor(x, y)
        eager(other, theirs, x, y, 2, 1, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that optimizer.step() was not called
            for s in schedules:
                s.step()
        executor.setOptimizer(optimizer)
    same(model, other, 1e-5)


def test_groups_have_values_of_their_own() -> None:
    model = Classifier()
    other = twin(model)

    def groups(m):
        return [{"params": [m.fc.weight], "lr": 0.3}, {"params": [m.fc.bias], "weight_decay": 0.5}]

    executor, _ = trained(model=model, optimizer=P.SGD(groups(model), lr=0.1))
    x, y = data(4)
    executor(x, y)
    eager(other, T.SGD(groups(other), lr=0.1), x, y, 1, 1, 1)
    same(model, other)


def test_parameters_that_the_optimizer_does_not_have_stay() -> None:
    model = Classifier()
    before = model.fc.bias.detach().clone()
    executor, _ = trained(model=model, optimizer=P.SGD([model.fc.weight], lr=0.5))
    executor(*data(4))
    assert torch.equal(model.fc.bias, before)


def test_clipping_by_norm() -> None:
    model = Classifier()
    other = twin(model)
    executor, _ = trained(options(1, 2), model, P.SGD(model.parameters(), lr=0.5, max_grad_norm=0.05))
    x, y = data(4)
    executor(x, y)
    eager(other, T.SGD(other.parameters(), lr=0.5), x, y, 1, 2, 1,
          after=lambda: torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05))  # fmt: skip
    same(model, other)


def test_constants_cannot_change_and_variables_can() -> None:
    model = Classifier()
    optimizer = P.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert optimizer.variable_attrs.isConstant("weight_decay")
    assert not optimizer.variable_attrs.isConstant("momentum") and not optimizer.variable_attrs.isConstant("lr")
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    executor.setOptimizer(P.SGD(model.parameters(), lr=0.2, momentum=0.5))
    with pytest.raises(poptorch.Error, match="'weight_decay' was constant"):
        executor.setOptimizer(P.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))


def test_marks() -> None:
    model = Classifier()
    optimizer = P.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.variable_attrs.markAsConstant("momentum")
    optimizer.variable_attrs.markAsVariable("weight_decay")
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    executor.setOptimizer(P.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5))
    with pytest.raises(poptorch.Error, match="'momentum' was constant"):
        executor.setOptimizer(P.SGD(model.parameters(), lr=0.1, momentum=0.1))
    with pytest.raises(ValueError, match="unknown attribute"):
        optimizer.variable_attrs.markAsConstant("nothing")


@pytest.mark.parametrize("other", [lambda p: P.Adam(p), lambda p: P.SGD([{"params": [q]} for q in p], lr=0.1)])
def test_another_optimizer_than_was_compiled(other) -> None:
    executor, model = trained()
    executor(*data(4))
    with pytest.raises(poptorch.Error, match="setOptimizer"):
        executor.setOptimizer(other(list(model.parameters())))


def test_a_users_step_is_not_run() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("never")

    model = Classifier()
    other = twin(model)
    with pytest.warns(UserWarning, match="does not run Python optimizer code"):
        executor, _ = trained(model=model, optimizer=Mine(model.parameters(), lr=0.1))
    x, y = data(4)
    executor(x, y)
    eager(other, T.SGD(other.parameters(), lr=0.1), x, y, 1, 1, 1)
    same(model, other)


@pytest.mark.parametrize("relaxed", [False, True])
def test_unknown_attributes_are_named_once(capsys, relaxed: bool) -> None:
    poptorch.setLogLevel("WARN")
    model = Classifier()
    optimizer = P.AdamW(model.parameters(), lr=0.1, bias_correction=False)
    optimizer.param_groups[0]["initial_lr"] = 0.1
    executor, _ = trained(options().relaxOptimizerAttributesChecks(relaxed), model, optimizer)
    for _ in range(2):
        executor(*data(4))
        executor.setOptimizer(optimizer)
    text = "Ignoring unexpected group 0 attribute in ADAMW_NO_BIAS optimizer: ['initial_lr']"
    assert capsys.readouterr().err.count(text) == (0 if relaxed else 1)


def test_the_state_before_and_after_the_compile() -> None:
    model = Classifier()
    optimizer = P.Adam(model.parameters(), lr=0.1)
    assert optimizer.state_dict()["ipu_state"] is None and optimizer.state_dict()["ipu_param"] is None
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    found = optimizer.state_dict()
    assert {"Accl1___fc.weight", "Accl2___fc.bias"} <= set(found["ipu_state"])
    assert found["ipu_state"]["Accl1___fc.weight"].shape == (3, 4) and found["ipu_state"]["Accl1___fc.weight"].abs().sum() > 0
    assert float(found["ipu_param"]["learningRate___specific___fc.bias"]) == pytest.approx(0.1)
    assert "param_groups" in found
    executor.detachFromDevice()
    assert set(optimizer.state_dict()["ipu_state"]) == set(found["ipu_state"])


@pytest.mark.parametrize("name", ["sgd momentum", "adam", "adamw uncorrected", "rmsprop centered", "lamb"])
def test_training_goes_on_from_a_saved_state(tmp_path, name: str) -> None:
    """Two calls in one run are one call in each of two."""
    make = RULES[name][0]
    model = Classifier()
    start = twin(model)
    (x, y), (x2, y2) = data(4, seed=1), data(4, seed=2)
    executor, _ = trained(model=model, optimizer=make(model.parameters()))
    executor(x, y)
    executor(x2, y2)

    optimizer = make(start.parameters())
    first, _ = trained(model=start, optimizer=optimizer)
    first(x, y)
    torch.save({"model": start.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    first.destroy()

    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    again = Classifier()
    again.load_state_dict(saved["model"])
    optimizer = make(again.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    second, _ = trained(model=again, optimizer=optimizer)
    second(x2, y2)
    same(model, again, 1e-5)


def test_a_plain_state_is_refused() -> None:
    model = Classifier()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states"):
        P.SGD(model.parameters(), lr=0.1).load_state_dict(T.SGD(model.parameters(), lr=0.1).state_dict())


HALF = [(P.AdamW, T.AdamW), (P.Adam, T.Adam), (P.RMSprop, T.RMSprop), (P.LAMB, tilework.optim.LAMB), (P.SGD, T.SGD),
        (T.AdamW, T.AdamW), (T.Adam, T.Adam), (T.RMSprop, T.RMSprop)]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(("kind", "plain"), HALF)
def test_half_models(kind, plain, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are float32: in float16 the usual eps is zero, and the update not a number. Close to the same in float32."""
    monkeypatch.setenv("TILEWORK_DEVICE", device)
    torch.manual_seed(0)
    model = Classifier()
    model.fc.weight.data[:, 0] = 0.0
    wide = twin(model)
    model.half()
    executor = poptorch.trainingModel(model, options(), kind(model.parameters(), lr=0.01))
    optimizer = plain(wide.parameters(), lr=0.01)
    x, y = data(8)
    x[:, 1] *= 1e-4  # gradients whose squares float16 cannot hold
    for _ in range(3):
        loss = executor(x.half(), y)[1]
        optimizer.zero_grad()
        expected = wide(x, y)[1]
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss.float() + 0, expected.detach(), rtol=2e-2, atol=2e-2)
    assert model.fc.weight.dtype == torch.float16
    torch.testing.assert_close(model.fc.weight.detach().float(), wide.fc.weight.detach(), rtol=1e-2, atol=6e-3)
    state = {k: t.dtype for k, t in executor._device.session.tensors().items() if "fc.weight/" in k}
    assert set(state.values()) <= {torch.float32}


# ---- what setOptimizer cannot apply ----


def _swapped(m):
    return P.SGD([{"params": [m.fc.bias], "lr": 0.5}, {"params": [m.fc.weight], "lr": 0.0}], lr=0.1)


def _dampened(m):
    return T.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5)


REFUSED = {
    "a switch": (lambda m: P.SGD(m.parameters(), lr=0.1, momentum=0.9),
                 lambda m: P.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), "nesterov in group 0"),
    "groups swapped": (lambda m: P.SGD([{"params": [m.fc.weight]}, {"params": [m.fc.bias]}], lr=0.1), _swapped,
                       "set of parameters in group 0"),
    "a parameter less": (lambda m: P.SGD(m.parameters(), lr=0.1), lambda m: P.SGD([m.fc.weight], lr=0.1), "without fc.bias"),
    "a parameter more": (lambda m: P.SGD([m.fc.weight], lr=0.1), lambda m: P.SGD(m.parameters(), lr=0.1), "with fc.bias"),
    "another model's": (lambda m: P.SGD(m.parameters(), lr=0.1), lambda m: P.SGD(twin(m).parameters(), lr=0.1), "without"),
    "dampening": (lambda m: T.SGD(m.parameters(), lr=0.1, momentum=0.9), _dampened, "another dampening"),
    "momentum": (lambda m: T.SGD(m.parameters(), lr=0.1), lambda m: T.SGD(m.parameters(), lr=0.1, momentum=0.5),
                 "another momentum"),
    "no clip any more": (lambda m: P.SGD(m.parameters(), lr=0.1, max_grad_norm=1.0), lambda m: P.SGD(m.parameters(), lr=0.1),
                         "another max_grad_norm"),
    "a limit": (lambda m: P.LAMB(m.parameters(), max_weight_norm=1.0),
                lambda m: P.LAMB(m.parameters(), max_weight_norm=2.0), "another max_weight_norm"),
}  # fmt: skip


@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_compiled_in_cannot_be_changed(name: str, is_attached: bool) -> None:
    before, after, text = REFUSED[name]
    model = Classifier()
    optimizer = before(model)
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    if not is_attached:
        executor.detachFromDevice()
    with pytest.raises(poptorch.Error, match=text):
        executor.setOptimizer(after(model))
    executor.setOptimizer(optimizer)
    executor(*data(4))


def test_a_switch_that_was_changed_in_the_same_optimizer() -> None:
    model = Classifier()
    optimizer = P.SGD(model.parameters(), lr=0.1, momentum=0.9)
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(poptorch.Error, match="nesterov"):
        executor.setOptimizer(optimizer)
    executor.destroy()  # as the error says
    other, theirs = twin(model), T.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    executor.setOptimizer(P.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))
    executor(*data(4))
    theirs = T.SGD(other.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    eager(other, theirs, *data(4), 1, 1, 1)
    same(model, other)


def test_a_clip_that_was_given_can_be_changed() -> None:
    model = Classifier()
    other = twin(model)
    optimizer = P.SGD(model.parameters(), lr=0.5, max_grad_norm=0.05)
    executor, _ = trained(model=model, optimizer=optimizer)
    theirs, (x, y) = T.SGD(other.parameters(), lr=0.5), data(4)
    for norm in (0.05, 0.2):
        optimizer.max_grad_norm = norm
        if executor.isCompiled():
            executor.setOptimizer(optimizer)
        executor(x, y)
        eager(other, theirs, x, y, 1, 1, 1, after=lambda n=norm: torch.nn.utils.clip_grad_norm_(other.parameters(), n))
    same(model, other)


def test_parameters_that_are_not_trained_are_nobodys_difference() -> None:
    model = Classifier()
    model.fc.bias.requires_grad_(False)
    executor, _ = trained(model=model, optimizer=P.SGD(model.parameters(), lr=0.1))
    executor(*data(4))
    executor.setOptimizer(P.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2))
    executor(*data(4))


def test_setOptimizer_copies_no_weights() -> None:
    model = Classifier()
    optimizer = P.SGD(model.parameters(), lr=0.1)
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    executor.setOptimizer(optimizer)
    assert executor._shared.is_stale


@pytest.mark.parametrize("as_group", [True, False])
def test_scalings_of_groups_have_no_effect(as_group: bool, capsys) -> None:
    poptorch.setLogLevel("WARN")
    model = Classifier()
    if as_group:
        optimizer = P.SGD([{"params": model.parameters(), "velocity_scaling": 2.0}], lr=0.1, momentum=0.9)
    else:
        optimizer = P.SGD(model.parameters(), lr=0.1, momentum=0.9, velocity_scaling=2.0)
    group = optimizer.param_groups[0]
    assert group["velocity_scaling"] == 2.0 and group["loss_scaling"] == 1.0
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    group["velocity_scaling"], group["loss_scaling"] = 4.0, 8.0
    executor.setOptimizer(optimizer)
    executor(*data(4))
    assert "Ignoring unexpected" not in capsys.readouterr().err
    assert P.SGD(model.parameters(), lr=0.1).param_groups[0]["velocity_scaling"] == 1.0


# ---- where the state is ----


def _straight(make, calls: int):
    """A model after so many calls, and its start."""
    torch.manual_seed(7)
    model = Classifier()
    start = twin(model)
    executor, _ = trained(model=model, optimizer=make(model.parameters()))
    for i in range(calls):
        executor(*data(4, seed=i))
    return model, start


STATEFUL = {
    "sgd": lambda p: P.SGD(p, lr=0.1, momentum=0.9, max_grad_norm=0.5),
    "adam": lambda p: P.Adam(p, lr=0.05),
    "torch adam": lambda p: T.Adam(p, lr=0.05),
    "torch sgd": lambda p: T.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_survives_destroy(name: str, is_new: bool) -> None:
    make = STATEFUL[name]
    expected, model = _straight(make, 3)
    optimizer = make(model.parameters())
    executor, _ = trained(model=model, optimizer=optimizer)
    for i in range(3):
        executor(*data(4, seed=i))
        executor.destroy()
        if is_new:
            executor, _ = trained(model=model, optimizer=optimizer)
    same(expected, model, 1e-5)


def test_an_old_checkpoint_does_not_come_back() -> None:
    model = Classifier()
    first = P.SGD(model.parameters(), lr=0.1, momentum=0.9)
    executor, _ = trained(model=model, optimizer=first)
    executor(*data(4))
    saved = copy.deepcopy(first.state_dict())
    executor.destroy()
    optimizer = P.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state_dict()["ipu_state"]["Accl___fc.weight"], saved["ipu_state"]["Accl___fc.weight"])
    executor, _ = trained(model=model, optimizer=optimizer)
    for i in range(3):
        executor(*data(4, seed=i))
    newest = optimizer.state_dict()["ipu_state"]["Accl___fc.weight"]
    assert not torch.equal(newest, saved["ipu_state"]["Accl___fc.weight"])
    executor.destroy()
    executor, _ = trained(model=model, optimizer=optimizer)
    executor.compile(*data(4))
    assert torch.equal(optimizer.state_dict()["ipu_state"]["Accl___fc.weight"], newest)


@pytest.mark.parametrize("way", ["attached", "detached", "set", "set while detached"])
def test_state_that_is_loaded_counts(way: str) -> None:
    """One call, a checkpoint, others, back to the checkpoint, and the second call."""
    make = STATEFUL["adam"]
    expected, model = _straight(make, 2)
    optimizer = make(model.parameters())
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4, seed=0))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    for i in range(3):
        executor(*data(4, seed=9 + i))
    if "detached" in way:
        executor.detachFromDevice()
    executor.load_state_dict(weights)
    new = make(model.parameters()) if "set" in way else optimizer
    new.load_state_dict(state)
    executor.setOptimizer(new)
    executor(*data(4, seed=1))
    same(expected, model, 1e-5)


@pytest.mark.parametrize("is_attached", [True, False])
@pytest.mark.parametrize("name", ["adam", "torch adam"])
def test_another_optimizer_takes_the_state_over(name: str, is_attached: bool) -> None:
    make = STATEFUL[name]
    expected, model = _straight(make, 3)
    first, second = make(model.parameters()), make(model.parameters())
    executor, _ = trained(model=model, optimizer=first)
    for i, optimizer in enumerate((second, first, first)):
        executor(*data(4, seed=i))
        if not is_attached:
            executor.detachFromDevice()
        executor.setOptimizer(optimizer)
    same(expected, model, 1e-5)


def test_a_torch_optimizer_has_the_state_while_no_device_has_it() -> None:
    make = STATEFUL["torch adam"]
    expected, model = _straight(make, 2)
    optimizer = make(model.parameters())
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4, seed=0))
    executor.detachFromDevice()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert float(state["state"][0]["step"]) == 1.0
    executor(*data(4, seed=9))
    executor.load_state_dict(weights)
    new = make(model.parameters())
    new.load_state_dict(state)
    executor.setOptimizer(new)
    executor(*data(4, seed=1))
    same(expected, model, 1e-5)


def test_state_before_the_first_step_is_a_fresh_start() -> None:
    make = STATEFUL["adam"]
    expected, model = _straight(make, 1)
    optimizer = make(model.parameters())
    weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4, seed=9))
    executor.load_state_dict(weights)
    optimizer.load_state_dict(state)
    executor(*data(4, seed=0))
    same(expected, model, 1e-5)


def test_state_of_another_shape_is_refused_and_nothing_changes() -> None:
    model = Classifier()
    optimizer = P.SGD(model.parameters(), lr=0.1, momentum=0.9)
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    state = copy.deepcopy(optimizer.state_dict())
    wrong = {**state, "ipu_state": {**state["ipu_state"], "Accl___fc.bias": torch.zeros(7)}}
    with pytest.raises(poptorch.Error, match="does not fit"):
        optimizer.load_state_dict(wrong)
    assert torch.equal(optimizer.state_dict()["ipu_state"]["Accl___fc.bias"], state["ipu_state"]["Accl___fc.bias"])
    executor.detachFromDevice()
    optimizer.load_state_dict(wrong)
    for _ in range(2):  # no half attached device after the first time
        with pytest.raises(poptorch.Error, match="does not fit"):
            executor(*data(4))
    optimizer.load_state_dict(state)
    executor(*data(4))


def test_state_that_does_not_fit_is_named(capsys) -> None:
    poptorch.setLogLevel("WARN")
    model = Classifier()
    optimizer = P.SGD(model.parameters(), lr=0.1, momentum=0.9)
    executor, _ = trained(model=model, optimizer=optimizer)
    executor(*data(4))
    state = optimizer.state_dict()
    del state["ipu_state"]["Accl___fc.bias"]
    state["ipu_state"]["Accl___other"] = torch.zeros(1)
    optimizer.load_state_dict(state)
    said = capsys.readouterr().err
    assert "has no Accl___fc.bias: it starts at zero" in said and "no use for: Accl___other" in said


# ---- copies ----


@pytest.mark.parametrize("act", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_copies_keep_the_clip_and_the_state(act, is_wrapped: bool) -> None:
    make = STATEFUL["sgd"]
    expected, model = _straight(make, 2)
    optimizer = make(model.parameters())
    calls = range(2)
    if is_wrapped:
        trained(model=model, optimizer=optimizer)[0](*data(4, seed=0))
        calls = range(1, 2)
    model, optimizer = act((model, optimizer))
    assert optimizer.max_grad_norm == 0.5 and not optimizer.variable_attrs.isConstant("max_grad_norm")
    executor, _ = trained(model=model, optimizer=optimizer)
    for i in calls:
        executor(*data(4, seed=i))
    same(expected, model, 1e-5)
