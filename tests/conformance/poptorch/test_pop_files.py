"""Compiled models as files, and the cache of compiled code."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch
from pop_helpers import Classifier, data, options, same, trained, twin
from torch import nn

import poptorch

X, Y = data(8)


def adam(model):
    return poptorch.optim.Adam(model.parameters(), lr=0.1)


def test_an_exported_program_is_loaded_instead_of_a_compile(tmp_path, monkeypatch) -> None:
    model = Classifier()
    other, plain = twin(model), twin(model)
    executor, _ = trained(options(2), model, adam(model))
    executor.compileAndExport(tmp_path / "m.poptorch", X, Y, export_model=False)
    executor.destroy()
    monkeypatch.setattr("poptorch.executor.compile_to", None)  # nothing is compiled from here on
    loaded, _ = trained(options(2), other, adam(other))
    loaded.loadExecutable(tmp_path / "m.poptorch")
    assert loaded.isCompiled()
    loaded(X, Y)
    monkeypatch.undo()
    monkeypatch.setenv("TILEWORK_DEVICE", "reference")
    again, _ = trained(options(2), plain, adam(plain))
    again(X, Y)
    same(other, plain)


def test_a_folder_gets_a_file_with_the_usual_name(tmp_path) -> None:
    executor = poptorch.inferenceModel(Classifier(), options())
    executor.compileAndExport(tmp_path, X)
    assert (tmp_path / "model.poptorch").exists()
    loaded = poptorch.load(tmp_path)
    torch.testing.assert_close(loaded(X) + 0, executor(X) + 0)


def test_training_goes_on_from_a_loaded_model(tmp_path) -> None:
    model = Classifier()
    start = twin(model)
    executor, _ = trained(options(), model, adam(model))
    executor(X, Y)
    executor.save(tmp_path / "m.poptorch")
    loaded = poptorch.load(tmp_path / "m.poptorch")
    assert type(loaded.model).__mro__[2] is Classifier and loaded.model is not model
    same(loaded.model, model)
    loaded(X, Y)
    assert not torch.equal(loaded.model.fc.weight, start.fc.weight)


def test_options_can_be_edited(tmp_path) -> None:
    executor = poptorch.inferenceModel(Classifier(), options())
    executor.compileAndExport(tmp_path / "m.poptorch", X)
    loaded = poptorch.load(tmp_path / "m.poptorch", edit_opts_fn=lambda o: o.modelName("mine"))
    assert loaded.options.model_name == "mine"


def test_only_the_module_is_a_pickle(tmp_path) -> None:
    executor = poptorch.inferenceModel(Classifier(), options())
    executor.compileAndExport(tmp_path / "with", X)
    executor.save(tmp_path / "without", export_model=False)
    with zipfile.ZipFile(tmp_path / "with") as a, zipfile.ZipFile(tmp_path / "without") as b:
        assert set(a.namelist()) - set(b.namelist()) == {"module.pt"}
        assert json.loads(b.read("poptorch.json"))["options"]["device_iterations"] == 1
    with pytest.raises(poptorch.Error, match="export_model=False"):
        poptorch.load(tmp_path / "without")


def test_before_the_compile_there_is_nothing_to_save(tmp_path) -> None:
    with pytest.raises(poptorch.Error, match="before it can be saved"):
        trained()[0].save(tmp_path / "m")


def test_another_version(tmp_path, monkeypatch) -> None:
    executor = poptorch.inferenceModel(Classifier(), options())
    executor.compileAndExport(tmp_path / "m", X)
    monkeypatch.setattr("poptorch.precompiled.version", lambda: "9.9")
    with pytest.raises(poptorch.Error, match="another version"):
        poptorch.inferenceModel(Classifier(), options()).loadExecutable(tmp_path / "m")


@pytest.mark.parametrize("make", [lambda: trained(options(4))[0], lambda: poptorch.inferenceModel(Classifier(), options(2))])
def test_a_file_for_something_else(tmp_path, make) -> None:
    executor, _ = trained(options(2))
    executor.compileAndExport(tmp_path / "m", X, Y)
    with pytest.raises(poptorch.Error, match="the file was compiled"):
        make().loadExecutable(tmp_path / "m")


@pytest.mark.parametrize("content", [b"", b"no zip", None])
def test_no_such_file(tmp_path, content) -> None:
    if content is not None:
        (tmp_path / "m").write_bytes(content)
    for act in (poptorch.load, poptorch.inferenceModel(Classifier(), options()).loadExecutable):
        with pytest.raises(poptorch.Error, match="not a compiled PopTorch model"):
            act(tmp_path / "m")


@pytest.mark.slow
def test_compiled_code_is_cached(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TILEWORK_DEVICE", "cpu")
    folder = tmp_path / "cache"
    opts = options().enableExecutableCaching(str(folder))
    poptorch.inferenceModel(Classifier(), opts)(X)
    first = set(folder.rglob("*.so"))
    assert first
    poptorch.inferenceModel(Classifier(), opts.clone())(X)
    assert set(folder.rglob("*.so")) == first


def sgd(model, **more):
    return poptorch.optim.SGD(model.parameters(), lr=0.1, **more)


@pytest.mark.parametrize(
    "make", [adam, lambda m: sgd(m, momentum=0.9, max_grad_norm=0.05), lambda m: torch.optim.Adam(m.parameters(), lr=0.1)]
)
@pytest.mark.parametrize("is_attached", [True, False])
def test_optimizer_and_state_are_in_the_file(tmp_path, make, is_attached: bool) -> None:
    model = Classifier()
    executor, _ = trained(model=model, optimizer=make(model))
    executor(X, Y)
    if not is_attached:
        executor.detachFromDevice()
    executor.save(tmp_path / "m")
    loaded = poptorch.load(tmp_path / "m")
    for e in (executor, loaded):
        e(X, Y)
        e(X, Y)
    same(loaded.model, model, 1e-6)


def _sum(o):
    o.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    return o


OTHERS = {
    "accumulation": (lambda: options(1, 4), sgd, "Training.gradientAccumulation"),
    "reduction": (lambda: _sum(options(1, 2)), sgd, "ReductionType"),
    "outputs": (lambda: options(1, 2, mode=poptorch.OutputMode.All), sgd, "outputMode"),
    "anchors": (lambda: options(1, 2).anchorTensor("g", "Gradient___fc.weight"), sgd, "anchorTensor"),
    "rule": (lambda: options(1, 2), adam, "type of optimizer"),
    "clip": (lambda: options(1, 2), lambda m: sgd(m, max_grad_norm=1.0), "max_grad_norm"),
    "switch": (lambda: options(1, 2), lambda m: sgd(m, maximize=True), "maximize in group 0"),
    "momentum": (lambda: options(1, 2), lambda m: sgd(m, momentum=0.5), "momentum"),
    "parameters": (lambda: options(1, 2), lambda m: poptorch.optim.SGD([m.fc.weight], lr=0.1), "without fc.bias"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_for_other_options_or_another_optimizer(tmp_path, name: str) -> None:
    opts, make, text = OTHERS[name]
    executor, _ = trained(options(1, 2), optimizer=None)
    executor.compileAndExport(tmp_path / "m", X, Y, export_model=False)
    model = Classifier()
    other, _ = trained(opts(), model, make(model))
    with pytest.raises(poptorch.Error, match=text):
        other.loadExecutable(tmp_path / "m")
    assert not other.isCompiled()
    other(X, Y)  # is compiled instead


def test_an_inference_executor_is_saved_after_a_call(tmp_path) -> None:
    executor = poptorch.inferenceModel(Classifier(), options())
    found = executor(X)
    executor.save(tmp_path / "m")
    torch.testing.assert_close(poptorch.load(tmp_path / "m")(X) + 0, found + 0)


class Hidden(Classifier):
    """A parameter that no module has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [nn.Parameter(torch.randn(3))]

    def forward(self, x, labels=None):
        out = self.fc(x) + self.more[0]
        return out if labels is None else (out, self.loss(out, labels))


def test_values_of_parameters_make_no_other_forward(tmp_path) -> None:
    def wrapped():
        model = Hidden()
        return poptorch.trainingModel(model, options(), torch.optim.SGD([*model.parameters(), *model.more], lr=0.1)), model

    wrapped()[0].compileAndExport(tmp_path / "m", X, Y, export_model=False)
    other, model = wrapped()
    other.loadExecutable(tmp_path / "m")
    other(X, Y)
    other.setOptimizer(torch.optim.SGD([*model.parameters(), *model.more], lr=0.2))
    with pytest.raises(poptorch.Error, match="without more"):
        other.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.2))


def test_a_parameter_that_only_the_file_trains(tmp_path) -> None:
    executor, _ = trained()
    executor.compileAndExport(tmp_path / "m", X, Y, export_model=False)
    model = Classifier()
    model.fc.bias.requires_grad_(False)
    other, _ = trained(model=model)
    with pytest.raises(poptorch.Error, match=r"without fc\.bias"):
        other.loadExecutable(tmp_path / "m")


class Changed(Classifier):
    def forward(self, x, labels=None):
        out = self.fc(x).relu()
        return out if labels is None else (out, self.loss(out, labels))


class Scaled(Classifier):
    """The value of a tensor that is no buffer is compiled in."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.tensor([factor])

    def forward(self, x, labels=None):
        out = self.fc(x) * self.factor
        return out if labels is None else (out, self.loss(out, labels))


class Pair(nn.Module):
    """Two layers of the same shapes."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.a, self.b, self.swapped = nn.Linear(4, 4), nn.Linear(4, 4), swapped

    def forward(self, x, labels=None):
        one, two = (self.b, self.a) if self.swapped else (self.a, self.b)
        out = two(one(x))
        return out if labels is None else (out, nn.functional.cross_entropy(out, labels))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("one", "two"), [(Classifier, Changed), (lambda: Scaled(1.0), lambda: Scaled(2.0)), (lambda: Pair(False), lambda: Pair(True))]
)
def test_a_file_of_another_forward(tmp_path, one, two, training: bool) -> None:
    inputs = (X, Y) if training else (X,)

    def wrapped(model):
        return poptorch.trainingModel(model, options()) if training else poptorch.inferenceModel(model, options())

    wrapped(one()).compileAndExport(tmp_path / "m", *inputs, export_model=False)
    other = wrapped(two())
    other.loadExecutable(tmp_path / "m")
    with pytest.raises(poptorch.Error, match=r"another model: forward(.|\n)*found: operator \d+: aten"):
        other(*inputs)
    other.destroy()
    other(*inputs)


def test_a_file_for_other_inputs(tmp_path) -> None:
    trained()[0].compileAndExport(tmp_path / "m", X, Y, export_model=False)
    other, _ = trained()
    other.loadExecutable(tmp_path / "m")
    with pytest.raises(poptorch.Error, match=r"for other inputs(.|\n)*\[2, 4\]"):
        other(X[:2], Y[:2])


def test_what_is_drawn_at_random_makes_no_other_forward(tmp_path) -> None:
    """Neither do other data, weights and seeds, nor a file that was saved again."""

    class Noisy(Classifier):
        def forward(self, x, labels=None):
            return super().forward(nn.functional.dropout(x, 0.5) + torch.rand(4), labels)

    torch.manual_seed(1)
    trained(model=Noisy())[0].compileAndExport(tmp_path / "m", X, Y, export_model=False)
    for seed in range(4):
        torch.manual_seed(seed)
        again, _ = trained(model=Noisy())
        again.loadExecutable(tmp_path / "m")
        again.save(tmp_path / "m", export_model=False)
        again(*data(8, seed=seed))


def test_setOptimizer_between_the_file_and_the_first_call(tmp_path) -> None:
    trained()[0].compileAndExport(tmp_path / "m", X, Y, export_model=False)
    other, model = trained()
    other.loadExecutable(tmp_path / "m")
    other.setOptimizer(sgd(model, momentum=0.9))
    with pytest.raises(poptorch.Error, match="momentum"):
        other(X, Y)
    other.setOptimizer(sgd(model))
    other(X, Y)


def test_what_was_compiled_offline_runs_where_it_is_loaded(tmp_path) -> None:
    executor = poptorch.inferenceModel(Classifier(), options().useOfflineIpuTarget())
    executor.compileAndExport(tmp_path / "m.poptorch", X)
    with pytest.raises(poptorch.Error, match="offline device"):
        executor(X)
    loaded = poptorch.load(tmp_path / "m.poptorch")
    torch.testing.assert_close(loaded(X) + 0, executor.model(X)[0] if isinstance(executor.model(X), tuple) else executor.model(X))
