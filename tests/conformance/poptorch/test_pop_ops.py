"""Operators of the interface."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pop_helpers import options, same, twin
from test_pop_inputs import Run, equal, infer
from torch import nn

import popart
import poptorch
from poptorch import MatMulSerializationMode as Mode

X = torch.arange(12.0).reshape(3, 4)
MAKE = {
    "nop": lambda x: poptorch.nop(x),
    "available memory": lambda x: poptorch.set_available_memory(x * 2, 0.3),
    "overlap": lambda x: poptorch.set_overlap_for_input(x, poptorch.OverlapMode.NoOverlap) + 1,
    "overlap out": lambda x: poptorch.set_overlap_for_output(x + 1, poptorch.OverlapMode.OverlapDeviceIterationLoop),
    "print": lambda x: poptorch.ipu_print_tensor(x, "title") + 1,
    "checkpoint": lambda x: poptorch.recomputationCheckpoint(x) + 1,
    "checkpoint of several": lambda x: poptorch.recomputationCheckpoint(x, x + 1)[1],
    "checkpoint of a list": lambda x: poptorch.recomputationCheckpoint([x, x + 1])[0],
    "serialized": lambda x: poptorch.serializedMatMul(x, x.t(), Mode.ReducingDim, 2),
    "serialized channels": lambda x: poptorch.serializedMatMul(x, x.t(), Mode.OutputChannels, 3, keep_precision=True),
    "serialized not": lambda x: poptorch.serializedMatMul(x, x.t(), Mode.Disabled),
    "slice": lambda x: poptorch.dynamic_slice(x, 1, torch.tensor(1), 2),
    "slice with steps": lambda x: poptorch.dynamic_slice(x, 1, torch.tensor([0]), 4, 2),
    "update": lambda x: poptorch.dynamic_update(x, torch.zeros(3, 2), 1, torch.tensor(1), 2),
    "loop": lambda x: poptorch.for_loop(3, lambda t: t * 2, [x])[0],
    "loop of two": lambda x: poptorch.for_loop(3, lambda a, b: (b, a + b), [x, x])[1],
    "cond": lambda x: poptorch.cond(x.sum() > 3, lambda a: a * 2, [x], lambda a: a - 1, [x])[0],
    "cond, the other side": lambda x: poptorch.cond(x.sum() < 3, lambda a: a * 2, [x], lambda a: a - 1, [x])[0],
    "cpu": lambda x: poptorch.CPU(torch.sin, "sine")(x),
    "scope": lambda x: _scoped(x),
    "farthest": lambda x: poptorch.fps(x, [0, 3], 0.67),
    "nearest": lambda x: poptorch.nearest(x, x.flip(0)),
}  # fmt: skip
EXPECTED = {
    "nop": X, "available memory": X * 2, "overlap": X + 1, "overlap out": X + 1, "print": X + 1, "checkpoint": X + 1,
    "checkpoint of several": X + 1, "checkpoint of a list": X, "serialized": X @ X.t(), "serialized channels": X @ X.t(),
    "serialized not": X @ X.t(), "slice": X[:, 1:3], "slice with steps": X[:, 0:4:2],
    "update": torch.cat([X[:, :1], torch.zeros(3, 2), X[:, 3:]], 1), "loop": X * 8, "loop of two": X * 5, "cond": X * 2,
    "cond, the other side": X - 1, "cpu": torch.sin(X), "scope": X + 1, "farthest": torch.tensor([0, 2, 1], dtype=torch.int32),
    "nearest": torch.tensor([2, 1, 0], dtype=torch.int32),
}  # fmt: skip


def _scoped(x):
    with poptorch.NameScope("name"), poptorch.Attribute(__outline={"layer": "a"}), poptorch.MultiConv().planType("parallel"):
        return x + 1


@pytest.mark.parametrize("name", MAKE)
def test_an_operator(name: str) -> None:
    equal(infer(MAKE[name], X), EXPECTED[name])


def test_a_loop_over_layers_in_inference() -> None:
    fc = nn.Linear(4, 4)

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = fc

        def forward(self, x):
            y = poptorch.for_loop(3, lambda t: t * 0.5 + self.fc(t), [x])[0]
            return poptorch.cond(y.sum() > 0, lambda a: self.fc(a), [y], lambda a: a, [y])[0]

    y = X
    for _ in range(3):
        y = y * 0.5 + fc(y)
    y = fc(y) if y.sum() > 0 else y
    equal(poptorch.inferenceModel(Looped(), options())(X), y.detach())


@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_slice_whose_start_is_an_input(start: int) -> None:
    executor = poptorch.inferenceModel(Run(lambda x, s: poptorch.dynamic_slice(x, 1, s, 2)), options())
    executor(X, torch.tensor(1))
    torch.testing.assert_close(executor(X, torch.tensor(start)), X[:, start : start + 2])


WRONG = [
    (lambda: poptorch.recomputationCheckpoint(3), ValueError, "takes tensors"),
    (lambda: poptorch.recomputationCheckpoint(X, None), ValueError, "takes tensors"),
    (lambda: poptorch.for_loop(2, lambda t: t, X), ValueError, "list of tensors"),
    (lambda: poptorch.for_loop(2, lambda t: t, [X, 3]), ValueError, "list of tensors"),
    (lambda: poptorch.for_loop(2, lambda t: t[:1], [X]), ValueError, "same shapes"),
    (lambda: poptorch.for_loop(2, lambda t: (t, t), [X]), ValueError, "as many tensors"),
    (lambda: poptorch.cond(torch.tensor(True), lambda: X, [], lambda: X[:1], []), ValueError, "same shapes"),
    (lambda: poptorch.serializedMatMul(X, X.t(), Mode.ReducingDim, 3), AssertionError, "Invalid serialization factor"),
    (lambda: poptorch.serializedMatMul(X, X.t(), "reducing", 2), AssertionError, "the mode"),
    (lambda: poptorch.dynamic_slice(X, 0, torch.tensor(1.5), 2), ValueError, "whole numbers"),
    (lambda: poptorch.dynamic_update(X, X, 0, torch.tensor(1), 2), ValueError, "size"),
    (lambda: poptorch.MultiConv().partialsTypes(torch.int32), ValueError, "partials"),
    (lambda: poptorch.custom_op([X], "Cube", "com.acme", 1, [X]), poptorch.Error, "com.acme.Cube"),
    (lambda: poptorch.custom_op([X], "C", "d", 1, [X], {3: 1}), ValueError, "names of attributes"),
    (lambda: poptorch.custom_op([X], "C", "d", 1, [X], {"a": None}), ValueError, "float, int or str"),
    (lambda: poptorch.custom_op([X], "C", "d", 1, [X], {"a": [1, "b"]}), ValueError, "one kind"),
    (lambda: poptorch.custom_op([X], "C", "d", 1, [X], {"ä": 1}), ValueError, "ASCII"),
    (lambda: poptorch.fps(X, [0, 3], random_start=True), poptorch.Error, "random_start"),
    (lambda: poptorch.setLogLevel("LOUD"), ValueError, "Unknown log level"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "kind", "text"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(act, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        act()
    assert isinstance(caught.value, poptorch.Error)


@pytest.mark.parametrize("act", [lambda x: poptorch.for_loop(2, lambda t: t * 2, [x])[0],
                                 lambda x: poptorch.cond(x.sum() > 0, lambda t: t, [x], lambda t: -t, [x])[0]])  # fmt: skip
def test_loops_are_for_inference(act) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return F.mse_loss(act(self.fc(x)), x)

    with pytest.raises(poptorch.Error, match="only supported in inference"):
        poptorch.trainingModel(Net(), options())(X)


def test_a_custom_operator_with_a_python_function() -> None:
    poptorch.register_custom_op("Power", "test.ops", lambda x, exponent=2: x**exponent)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x, y):
            (out,) = poptorch.custom_op([self.fc(x)], "Power", "test.ops", 1, example_outputs=[y], attributes={"exponent": 3})
            return out, F.mse_loss(out, y)

    model = Net()
    other = twin(model)
    y = torch.ones(3, 2)
    poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=1e-4))(X, y)
    F.mse_loss(other.fc(X) ** 3, y).backward()
    torch.optim.SGD(other.parameters(), lr=1e-4).step()
    same(model, other)


def test_channels_keep_spans() -> None:
    channel = poptorch.profiling.Channel("program")
    with channel.tracepoint("load"):
        pass
    executor = poptorch.inferenceModel(nn.Linear(4, 2), options())
    channel.instrument(executor, "compile")
    executor.compile(X)
    assert [name for name, _ in channel.spans] == ["load", "compile"] and executor.isCompiled()


@pytest.mark.parametrize("level", ["TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF", "warn", 2])
def test_log_levels(level) -> None:
    poptorch.setLogLevel(level)


def test_the_log_is_quiet_when_it_is_off(capsys) -> None:
    poptorch.setLogLevel("OFF")
    infer(lambda x: x + 1, torch.tensor([1]))
    assert capsys.readouterr().err == ""


class Deep(nn.Module):
    """Where `marks`, with a checkpoint after each layer."""

    def __init__(self, marks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16)) for _ in range(5)
        )
        self.marks = marks

    def forward(self, x, y):
        for layer in self.layers:
            x = poptorch.recomputationCheckpoint(layer(x)) if self.marks else layer(x)
        return x, F.mse_loss(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [True, False])
def test_checkpoints_save_memory(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_DEVICE", "cpu")
    x, y = torch.randn(64, 16), torch.randn(64, 16)
    outs, temporary = [], []
    for marks in (True, False):
        torch.manual_seed(0)
        model = Deep(marks)
        opts = options().randomSeed(4)
        if not wanted:
            opts._Popart.set("autoRecomputation", int(popart.RecomputationType.NoRecompute))
        executor = poptorch.trainingModel(model, opts, poptorch.optim.SGD(model.parameters(), lr=0.1))
        executor(x, y)
        outs.append(executor(x, y)[0])
        programs = executor._device.session.manifest.programs
        temporary.append(programs["step"].temporary_bytes)
    assert torch.equal(outs[0], outs[1])
    assert temporary[0] < 0.8 * temporary[1] if wanted else temporary[0] == temporary[1]
