"""Compiled models as files, and the cache of compiled code."""

from __future__ import annotations

import json
import zipfile

import pytest
import torch
from pop_helpers import Classifier, data, options, same, trained, twin

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
