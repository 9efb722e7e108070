"""The device's copy of the weights and the host's: who sees what, and how often something is copied."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from pop_helpers import Classifier, data, options, same, trained, twin
from torch import nn

import poptorch

X, Y = data(4)


@pytest.fixture
def counted(monkeypatch):
    """How often weights came to the host."""
    calls = []
    real = poptorch.PoplarExecutor.copyWeightsToHost
    monkeypatch.setattr(poptorch.PoplarExecutor, "copyWeightsToHost", lambda self: (calls.append(self), real(self))[1])
    return calls


READS = {
    "a parameter": lambda m: m.fc.weight + 0,
    "its data": lambda m: m.fc.weight.data,
    "numpy": lambda m: m.fc.weight.detach().numpy(),
    "printing": lambda m: repr(m.fc.weight),
    "state_dict": lambda m: m.state_dict(),
    "parameters": lambda m: [p.sum() for p in m.parameters()],
    "a list of them": lambda m: torch.cat([m.fc.weight.flatten(), m.fc.bias]),
    "a call on the host": lambda m: m(X),
    "a copy": lambda m: copy.deepcopy(m),
    "an item": lambda m: m.fc.bias[0].item(),
    "as a list": lambda m: m.fc.bias.tolist(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_copies_once(counted, read) -> None:
    executor, model = trained()
    executor(X, Y)
    assert len(counted) == 0
    read(model)
    assert len(counted) == 1
    read(model)
    assert len(counted) == 1
    executor(X, Y)
    executor(X, Y)
    assert len(counted) == 1
    read(model)
    assert len(counted) == 2


def test_reading_before_any_call_copies_nothing(counted) -> None:
    executor, model = trained()
    model.state_dict()
    executor.compile(X, Y)
    model.state_dict()
    assert counted == []


def test_what_is_read_is_new() -> None:
    executor, model = trained()
    before = model.fc.weight.detach().clone()
    executor(X, Y)
    assert not torch.equal(model.fc.weight, before)


def test_buffers_as_well(counted) -> None:
    class Counting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, labels=None):
            self.calls += 1
            return super().forward(x, labels)

    executor, model = trained(options(3), Counting())
    executor(*data(6))
    assert model.calls.item() == 3 and len(counted) == 1


def test_the_state_dict_is_plain(tmp_path) -> None:
    executor, model = trained()
    executor(X, Y)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(type(t) is torch.Tensor for t in found.values())
    plain = Classifier()
    plain.load_state_dict(found)
    same(model, plain)
    same_by_executor = executor.state_dict()
    assert torch.equal(same_by_executor["fc.weight"], found["fc.weight"])


@pytest.mark.parametrize("act", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_of_the_original_class(act) -> None:
    executor, model = trained()
    executor(X, Y)
    other = act(model)
    assert type(other) is Classifier and type(other.fc.weight) is nn.Parameter
    same(model, other)


def test_classes_while_wrapped_and_after() -> None:
    executor, model = trained()
    assert type(model).__name__ == "PoptorchClassifier" and isinstance(model, Classifier)
    assert type(model.fc.weight) is not nn.Parameter and isinstance(model.fc.weight, nn.Parameter)
    executor(X, Y)
    executor.destroy()
    assert type(model) is Classifier and type(model.fc.weight) is nn.Parameter


def test_wrapping_twice() -> None:
    executor, model = trained()
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(model, options())
    executor.destroy()
    poptorch.trainingModel(model, options())(X, Y)


def test_destroy_brings_the_weights_back() -> None:
    executor, model = trained()
    before = model.fc.weight.detach().clone()
    executor(X, Y)
    executor.destroy()
    assert not torch.equal(model.fc.weight, before) and not executor.isCompiled() and not executor.isAttachedToDevice()


def test_destroy_lets_other_shapes_in() -> None:
    executor, _model = trained()
    executor(*data(4))
    executor.destroy()
    assert executor(*data(6))[0].shape == (6, 3)


def test_a_host_edit_needs_copyWeightsToDevice() -> None:
    executor, model = trained()
    executor(X, Y)
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.zero_()
    _, loss = executor(X, Y)
    assert loss.item() != pytest.approx(torch.tensor(3.0).log().item())
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.zero_()
    executor.copyWeightsToDevice()
    _, loss = executor(X, Y)
    assert loss.item() == pytest.approx(torch.tensor(3.0).log().item())


def test_load_state_dict_of_the_executor_uploads() -> None:
    executor, _model = trained()
    executor(X, Y)
    executor.load_state_dict({"fc.weight": torch.zeros(3, 4), "fc.bias": torch.zeros(3)})
    _, loss = executor(X, Y)
    assert loss.item() == pytest.approx(torch.tensor(3.0).log().item())


def test_inference_sees_the_trained_weights(counted) -> None:
    executor, model = trained()
    inference = poptorch.inferenceModel(model, options())
    before = inference(X)
    for _ in range(3):
        executor(X, Y)
    after = inference(X)
    assert len(counted) == 1 and not torch.equal(before, after)
    inference(X)
    assert len(counted) == 1
    torch.testing.assert_close(after, model.fc(X))
    executor(X, Y)
    assert not torch.equal(inference(X), after)


def test_training_goes_on_after_inference() -> None:
    """Uploads to the second executor do not disturb the first."""
    executor, model = trained()
    alone, other = trained(model=copy.deepcopy(model))
    inference = poptorch.inferenceModel(model, options())
    for _ in range(3):
        executor(X, Y)
        alone(X, Y)
        inference(X)
    same(model, other)


def test_attach_and_detach() -> None:
    executor, _model = trained()
    assert not executor.isAttachedToDevice() and not executor.isCompiled()
    with pytest.raises(poptorch.Error, match="before the model is compiled"):
        executor.attachToDevice()
    executor.compile(X, Y)
    assert executor.isAttachedToDevice() and executor.isCompiled() and executor._executable
    with pytest.raises(poptorch.Error, match="Device is already attached"):
        executor.attachToDevice()
    executor.detachFromDevice()
    assert not executor.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        executor.detachFromDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        executor.copyWeightsToHost()
    executor.attachToDevice()
    executor(X, Y)


@pytest.mark.parametrize("by_hand", [True, False])
def test_state_survives_a_detach(by_hand: bool) -> None:
    def adam(m):
        return poptorch.optim.Adam(m.parameters(), lr=0.1)

    model = Classifier()
    other = copy.deepcopy(model)
    executor, _ = trained(model=model, optimizer=adam(model))
    alone, _ = trained(model=other, optimizer=adam(other))
    for _ in range(3):
        executor(X, Y)
        alone(X, Y)
        executor.detachFromDevice()
        if by_hand:
            executor.attachToDevice()
    same(model, other)


def test_compile_changes_nothing() -> None:
    executor, model = trained()
    before = copy.deepcopy(model.state_dict())
    executor.compile(X, Y)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_second_compile_is_only_a_warning(capsys) -> None:
    poptorch.setLogLevel("WARN")
    executor, _ = trained()
    executor.compile(X, Y)
    executor.compile(X, Y)
    assert "already compiled" in capsys.readouterr().err


def test_named_buffers() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            return x * self.scale

    model = Scaled()
    executor = poptorch.inferenceModel(model, options().updatableNamedBuffers(["scale"]))
    assert torch.equal(executor(X), X)
    model.scale.fill_(3.0)
    assert torch.equal(executor(X), X)
    executor.copyNamedBuffersToDevice()
    assert torch.equal(executor(X), X * 3)


def test_named_buffers_need_names() -> None:
    executor, _ = trained()
    executor(X, Y)
    with pytest.raises(poptorch.Error, match="names of buffers"):
        executor.copyNamedBuffersToDevice()


def test_the_model_and_its_attributes_are_reached_through_the_executor() -> None:
    executor, model = trained()
    assert executor.model is model and executor.fc is model.fc
    assert [n for n, _ in executor.named_parameters()] == ["fc.weight", "fc.bias"]
    with pytest.raises(AttributeError):
        _ = executor.nothing


@pytest.mark.parametrize("wrong", [None, 3, lambda x: x])
def test_something_else_than_a_model(wrong) -> None:
    with pytest.raises(poptorch.Error, match="not a model"):
        poptorch.inferenceModel(wrong, options())


def test_random_numbers_go_on_from_a_saved_state() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x)

    executor = poptorch.inferenceModel(Noisy(), options().randomSeed(3))
    one = executor(torch.ones(64))
    state = executor.rng_state
    two = executor(torch.ones(64))
    assert not torch.equal(one, two)
    executor.rng_state = state
    assert torch.equal(executor(torch.ones(64)), two)
    again = poptorch.inferenceModel(Noisy(), options().randomSeed(3))
    assert torch.equal(again(torch.ones(64)), one)


def test_random_numbers_of_every_replica_go_on_after_the_device_was_left() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

        def forward(self, x, y):
            out = self.drop(self.fc(x))
            return out, nn.functional.cross_entropy(out, y)

    found = []
    for leave in (False, True):
        torch.manual_seed(0)
        model = Noisy()
        executor = poptorch.trainingModel(model, options(r=2).randomSeed(3), poptorch.optim.SGD(model.parameters(), lr=0.1))
        x, y = data(8)
        executor(x, y)
        if leave:
            executor.detachFromDevice()
        found.append(executor(x, y)[0].clone())
        executor.destroy()
    assert torch.equal(found[0], found[1])


def test_compile_only() -> None:
    executor, _ = trained(options().useOfflineIpuTarget())
    executor.compile(X, Y)
    assert executor.isCompiled() and not executor.isAttachedToDevice()
    with pytest.raises(AssertionError, match="offline"):
        executor(X, Y)


def test_times() -> None:
    executor, _ = trained()
    with pytest.raises(poptorch.Error):
        executor.getLatency()
    executor(X, Y)
    executor(X, Y)
    low, high, mean = executor.getLatency()
    assert 0 < low <= mean <= high and executor.compilationTime() > 0
    counters = executor.getPerfCounters()
    assert set(counters) == {"input", "input_complete", "output", "output_complete"} and len(counters["output"]) == 2


def test_weights_are_not_lost_with_the_executor() -> None:
    """Programs keep only the model; and nothing keeps the model alive."""
    import gc
    import weakref

    executor, model = trained()
    before = model.fc.weight.detach().clone()
    executor(X, Y)
    del executor
    assert not torch.equal(model.fc.weight, before)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class WithLoss(nn.Module):
    """What many programs wrap for training: the network and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, y):
        out = self.model(x)
        return out, nn.functional.cross_entropy(out, y)


def test_inference_of_a_part_of_what_is_trained(counted) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    executor = poptorch.trainingModel(WithLoss(network), options(), torch.optim.SGD(network.parameters(), lr=0.1))
    executor(X, Y)
    network.eval()
    inference = poptorch.inferenceModel(network, options())
    first = inference(X)
    torch.testing.assert_close(first + 0, network(X).detach())
    assert len(counted) == 1
    executor(X, Y)
    second = inference(X)
    assert len(counted) == 2 and not torch.equal(first, second)
    torch.testing.assert_close(second + 0, network(X).detach())
    executor.destroy()
    torch.testing.assert_close(inference(X) + 0, second + 0)


def test_training_of_a_part_of_what_infers() -> None:
    network = Classifier()
    inference = poptorch.inferenceModel(WithLoss(network), options())
    before = inference(X, Y)[0]
    executor, _ = trained(model=network)
    executor(X, Y)
    after = inference(X, Y)[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after + 0, network(X).detach())


def test_two_models_that_share_a_part() -> None:
    """Each wraps the other's part in turn, as a program with two losses does."""
    network = Classifier()
    one, two = WithLoss(network), WithLoss(network)
    first = poptorch.trainingModel(one, options(), torch.optim.SGD(network.parameters(), lr=0.1))
    first(X, Y)
    second = poptorch.trainingModel(two, options(), torch.optim.SGD(network.parameters(), lr=0.1))
    loss = second(X, Y)[1]
    first.destroy()
    second.destroy()
    assert loss.isfinite() and type(network.fc.weight) is nn.Parameter and type(one) is type(two) is WithLoss


class Judging(nn.Module):
    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, real, noise):
        return poptorch.identity_loss(self.judge(self.maker(noise).detach()).square() + self.judge(real), "mean")


class Judged(Judging):
    def forward(self, real, noise):
        return poptorch.identity_loss(self.judge(self.maker(noise)).square(), "mean")


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
@pytest.mark.parametrize("by_hand", [True, False])
def test_two_models_that_train_parts_of_each_other(by_hand: bool, norm) -> None:
    """As a generator and a discriminator: each executor's optimizer has its own part, and both read both. Running statistics are
    changed by both."""
    parts = nn.Sequential(nn.Linear(4, 6), norm(6)), nn.Sequential(nn.Linear(6, 5), norm(5), nn.Linear(5, 1))
    twins = twin(parts[0]), twin(parts[1])
    sides = []
    for kind, trained_part in ((Judging, 1), (Judged, 0)):
        optimizer = poptorch.optim.SGD(parts[trained_part].parameters(), lr=0.1)
        executor = poptorch.trainingModel(kind(*parts), options(), optimizer)
        sides.append((executor, kind(*twins), torch.optim.SGD(twins[trained_part].parameters(), lr=0.1)))
    for i in range(3):
        g = torch.Generator().manual_seed(i)
        real, noise = torch.randn(8, 6, generator=g), torch.randn(8, 4, generator=g)
        for executor, plain, optimizer in sides:
            if by_hand and executor.isAttachedToDevice():
                executor.copyWeightsToDevice()
            loss = executor(real, noise)
            optimizer.zero_grad()
            expected = plain(real, noise)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss + 0, expected.detach())
    for part, other in zip(parts, twins, strict=True):
        same(part, other)


# ---- after destroy ----


def test_a_call_after_destroy_trains_the_model_again() -> None:
    executor, model = trained()
    inference = poptorch.inferenceModel(model, options())
    executor(X, Y)
    executor.destroy()
    assert type(model) is Classifier
    before = model.fc.weight.detach().clone()
    executor(X, Y)
    assert not torch.equal(model.fc.weight, before) and not torch.equal(model.state_dict()["fc.weight"], before)
    torch.testing.assert_close(inference(X) + 0, model.fc(X).detach())


def test_a_call_after_destroy_where_another_executor_trains_the_model() -> None:
    executor, model = trained()
    executor(X, Y)
    executor.destroy()
    other, _ = trained(model=model)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        executor(X, Y)
    other(X, Y)
    other.destroy()
    executor(X, Y)


# ---- which copy is old ----


@pytest.mark.parametrize("copy_", ["copyWeightsToHost", "copyWeightsToHostIfNeeded"])
def test_an_inference_executor_brings_what_was_trained(copy_: str) -> None:
    executor, model = trained()
    inference = poptorch.inferenceModel(model, options())
    inference(X)
    other, plain = trained(model=twin(model))
    executor(X, Y)
    other(X, Y)
    assert getattr(inference, copy_)() in (None, True)
    same(model, plain)
    assert inference.copyWeightsToHostIfNeeded() is False
    torch.testing.assert_close(inference(X) + 0, model.fc(X).detach())


def test_an_inference_executor_brings_its_own_buffers() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x * 2

    model = Counting()
    inference = poptorch.inferenceModel(model, options())
    inference(X)
    inference.copyWeightsToHost()
    assert model.calls.item() == 1


def test_a_call_that_fails_midway_leaves_an_old_host_copy() -> None:
    """The first of its steps was made."""
    opts = options(2)
    opts.Precision.enableFloatingPointExceptions(True)
    executor, model = trained(opts)
    executor(X, Y)
    before = model.fc.weight.detach().clone()
    bad = X.clone()
    bad[2:] = float("nan")
    with pytest.raises(poptorch.Error, match="not a number"):
        executor(bad, Y)
    assert not torch.equal(model.fc.weight, before)
    found = model.fc.weight.detach().clone()
    executor.copyWeightsToHost()
    assert torch.equal(model.fc.weight, found) and found.isfinite().all()


# ---- buffers of replicas ----


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn, self.fc = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x, y):
        out = self.fc(self.bn(x)) * self.scale
        return out, nn.functional.cross_entropy(out, y)


def _means(executor):
    return [s.tensors()["buffer/model.bn.running_mean"] for s in executor._device.sessions]


def _named(executor, optimizer):
    executor.model.scale.fill_(2.0)
    executor.copyNamedBuffersToDevice()
    assert all(s.tensors()["buffer/model.scale"] == 2.0 for s in executor._device.sessions)


def _state(executor, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def _again(executor, optimizer):
    executor.detachFromDevice()
    executor.attachToDevice()


@pytest.mark.parametrize("act", [_named, _state, _again])
def test_replicas_keep_their_own_buffers(act) -> None:
    model = Normed()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opts = options(r=2).broadcastBuffers(False).updatableNamedBuffers(["scale"])
    executor = poptorch.trainingModel(model, opts, optimizer)
    x, y = data(8)
    executor(x, y)
    before = _means(executor)
    assert not torch.equal(*before)
    act(executor, optimizer)
    for a, b in zip(before, _means(executor), strict=True):
        assert torch.equal(a, b)
    executor(x, y)
    executor.destroy()


def test_buffers_that_the_host_has_changed_go_to_all_replicas() -> None:
    model = Normed()
    opts = options(r=2).broadcastBuffers(False)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
    executor(*data(8))
    executor.detachFromDevice()
    model.bn.running_mean.fill_(5.0)
    executor.attachToDevice()
    assert all((m == 5.0).all() for m in _means(executor))
    executor.destroy()
