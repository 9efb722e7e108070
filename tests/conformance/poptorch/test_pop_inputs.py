"""What models take and return: structures, types, changes in place."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from pop_helpers import Classifier, data, options, same, trained, twin
from torch import nn

import poptorch
from poptorch import OutputMode


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Run(nn.Module):
    """A function as a model."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def infer(function, *args, opts=None, **kwargs):
    return poptorch.inferenceModel(Run(function), opts or options())(*args, **kwargs)


X = torch.arange(6.0).reshape(3, 2)
OUTPUTS = {
    "a tensor": lambda x: x + 1,
    "a tuple": lambda x: (x + 1, x * 2),
    "a list": lambda x: [x + 1, x * 2],
    "a dict": lambda x: {"a": x + 1, "b": {"c": x * 2}},
    "a named tuple": lambda x: Pair(x + 1, x * 2),
    "deep": lambda x: (x, [x + 1, (x + 2, {"k": x + 3})]),
    "None inside": lambda x: (x + 1, None, x + 2),
    "numbers and texts inside": lambda x: (x + 1, 3, "text", [2.5]),
    "one in a tuple": lambda x: (x + 1,),
    "the input itself": lambda x: x,
    "twice the same": lambda x: (x, x),
}


def equal(a, b) -> None:
    assert type(a) is type(b) or isinstance(a, torch.Tensor)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a + 0, b + 0)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            equal(a[k], b[k])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for i, j in zip(a, b, strict=True):
            equal(i, j)
    else:
        assert a == b


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_structure_of_outputs(name: str) -> None:
    equal(infer(OUTPUTS[name], X), OUTPUTS[name](X))


INPUTS = {
    "two": (lambda a, b: a - b, (X, X * 2), {}),
    "by name": (lambda a, b: a - b, (), {"b": X, "a": X * 2}),
    "mixed": (lambda a, b: a - b, (X,), {"b": X * 3}),
    "None": (lambda a, mask=None: a if mask is None else a * mask, (X, None), {}),
    "a default": (lambda a, scale=3.0: a * scale, (X,), {}),
    "a number": (lambda a, scale: a * scale, (X, 2.5), {}),
    "a flag": (lambda a, negate: -a if negate else a, (X,), {"negate": True}),
    "a tuple": (lambda p: p[0] - p[1], ((X, X * 2),), {}),
    "a dict": (lambda p: p["x"] - p["y"], ({"x": X, "y": X * 2},), {}),
    "a named tuple": (lambda p: p.a - p.b, (Pair(X, X * 2),), {}),
    "a list of tuples": (lambda p: p[0][0] + p[1][1], ([(X, X), (X, X * 2)],), {}),
    "no row after another": (lambda a: a * 2, (X.t().contiguous().t(),), {}),
    "bool": (lambda a, m: torch.where(m, a, -a), (X, X > 2), {}),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_structure_of_inputs(name: str) -> None:
    function, args, kwargs = INPUTS[name]
    equal(infer(function, *args, **kwargs), function(*args, **kwargs))


CHANGES = [
    ((X,), (X, X)),
    ((X,), ((X,),)),
    ((X, 2.0), (X, 3.0)),
    ((X, None), (X, X)),
    (({"a": X},), ({"b": X},)),
    ((X,), (torch.zeros(4, 2),)),
    ((X,), (torch.zeros(3, 3),)),
    ((X,), (torch.zeros(3, 2, dtype=torch.int32),)),
    ((X,), (torch.zeros(3, 2, dtype=torch.float16),)),
]


@pytest.mark.parametrize(("first", "second"), CHANGES, ids=range(len(CHANGES)))
def test_what_may_not_change_after_the_compile(first, second) -> None:
    executor = poptorch.inferenceModel(
        Run(lambda *args: X * 2 + 0 * torch.utils._pytree.tree_leaves(args)[0].float().sum()), options()
    )
    executor(*first)
    with pytest.raises(poptorch.Error):
        executor(*second)
    executor(*first)


def scaled(a, b, scale=2.0, *, extra=None):
    return (a - b) * scale if extra is None else extra


class Scaled(nn.Module):
    def forward(self, a, b, scale=2.0, *, extra=None):
        return scaled(a, b, scale, extra=extra)


WAYS = [
    ((), {"a": X, "b": X + 1}), ((), {"b": X + 1, "a": X}), ((X,), {"b": X + 1}), ((X, X + 1), {}), ((X, X + 1, 2.0), {}),
    ((X, X + 1), {"extra": None}), ((), {"extra": None, "scale": 2.0, "b": X + 1, "a": X}),
]  # fmt: skip


@pytest.mark.parametrize("first", range(len(WAYS)))
def test_the_same_arguments_in_another_way(first: int) -> None:
    """By position or by name, in any order, with defaults or without."""
    executor = poptorch.inferenceModel(Scaled(), options())
    for args, kwargs in (WAYS[first], *WAYS):
        equal(executor(*args, **kwargs), scaled(*args, **kwargs))
    with pytest.raises(poptorch.Error, match=r"(?s)has another value than when.*3\.0.*2\.0"):
        executor(X, X, scale=3.0)
    for args, kwargs in [((X,), {}), ((X, X), {"extra": X}), ((X, X), {"other": X}), ((X, X, 2.0, None), {})]:
        with pytest.raises(poptorch.Error):
            executor(*args, **kwargs)


def test_arguments_by_any_name_in_another_order() -> None:
    executor = poptorch.inferenceModel(Run(lambda **named: named["a"] - named["b"]), options())
    equal(executor(a=X, b=X * 3), -2 * X)
    equal(executor(b=X * 3, a=X), -2 * X)


def test_the_text_of_a_changed_shape() -> None:
    executor = poptorch.inferenceModel(Run(lambda x: x * 2), options())
    executor(torch.zeros(1))
    with pytest.raises(poptorch.Error, match=r"expected torch\.Size\(\[1\]\) but got torch\.Size\(\[2\]\)"):
        executor(torch.zeros(2))


TYPES = [
    (torch.int64, torch.int32), (torch.int32, torch.int32), (torch.float64, torch.float32), (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32), (torch.float16, torch.float16), (torch.bool, torch.bool), (torch.int8, torch.int8),
    (torch.uint8, torch.uint8), (torch.int16, torch.int16),
]  # fmt: skip


@pytest.mark.parametrize(("given", "returned"), TYPES, ids=str)
def test_types(given: torch.dtype, returned: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1]).to(given)
    out = infer(lambda t: t.clone(), x)
    assert out.dtype == returned and torch.equal(out.float(), x.float())


def test_coercions_are_logged(capsys) -> None:
    poptorch.setLogLevel("WARN")
    infer(lambda t: t + 1, torch.tensor([1, 2]))
    assert "[warning] Type coerced from Long to Int" in capsys.readouterr().err


def test_labels_of_32_bits() -> None:
    """torch's own loss would refuse them."""
    model = Classifier()
    other = twin(model)
    x, y = data(4)
    trained(model=model)[0](x, y.int())
    trained(model=other)[0](x, y)
    same(model, other)


def test_32_and_64_bits_are_the_same_type() -> None:
    executor, _ = trained()
    x, y = data(4)
    a = executor(x, y)
    assert executor(x.double(), y.int())[0].shape == a[0].shape


@pytest.mark.parametrize(("made", "back"), [(torch.float64, torch.float32), (torch.bfloat16, torch.float32),
                                            (torch.int64, torch.int32), (torch.float16, torch.float16)])  # fmt: skip
def test_types_that_forward_makes(made: torch.dtype, back: torch.dtype) -> None:
    assert infer(lambda x: x.to(made), torch.tensor([0.0, 1.0, 2.0])).dtype == back


def test_half_activations_beside_float_weights() -> None:
    fc, conv = nn.Linear(4, 3), nn.Conv2d(1, 2, 3)
    x = torch.randn(2, 4)
    out = poptorch.inferenceModel(fc, options())(x.half())
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), fc(x), rtol=1e-2, atol=1e-2)
    image = torch.randn(1, 1, 5, 5)
    out = poptorch.inferenceModel(conv, options())(image.half())
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), conv(image), rtol=1e-2, atol=1e-2)


MIXED = {
    "attention": (nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)[0]),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), lambda m, x: m(x)),
    "encoder, evaluated": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), lambda m, x: m(x)),
    "lstm": (nn.LSTM(8, 8, batch_first=True), lambda m, x: m(x)[0]),
    "lstm with a state": (nn.LSTM(8, 8, batch_first=True), lambda m, x: m(x, (x.new_zeros(1, 2, 8),) * 2)[1][1]),
    "gru": (nn.GRU(8, 8, num_layers=2), lambda m, x: m(x)[0]),
    "rnn": (nn.RNN(8, 8), lambda m, x: m(x)[0]),
    "lstm cell": (nn.LSTMCell(8, 8), lambda m, x: m(x[:, 0])[0]),
    "prelu": (nn.PReLU(5), lambda m, x: m(x)),
}


class Core(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.core, self.fc, self._name = twin(MIXED[name][0]), nn.Linear(8, 3), name

    def forward(self, x, y=None):
        out = MIXED[self._name][1](self.core, x)
        if y is None:
            return out
        return out, nn.functional.cross_entropy(self.fc(out).flatten(0, -2).float(), y)


@pytest.mark.parametrize("kinds", ["half activations", "half weights"])
@pytest.mark.parametrize("name", MIXED)
def test_layers_of_16_bits_beside_32(name: str, kinds: str) -> None:
    model = Core(name)
    x = torch.randn(2, 5, 8)
    expected = model(x).detach()
    if kinds == "half weights":
        model.core.half()
    given = x if kinds == "half weights" else x.half()
    out = poptorch.inferenceModel(model, options())(given)
    assert out.dtype == torch.float16 or name.startswith("encoder")  # its sum with a float32 input is float32
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
    y = torch.randint(3, (expected[..., 0].numel(),))
    before = [p.detach().clone() for p in model.core.parameters()]
    poptorch.trainingModel(model, options(), poptorch.optim.SGD(model.parameters(), lr=1.0))(given, y)
    assert any(not torch.equal(p, b) for p, b in zip(model.core.parameters(), before, strict=True))


@pytest.mark.parametrize(("kind", "model"), [
    (torch.float64, nn.Linear(8, 3)), (torch.bfloat16, nn.Linear(8, 3)), (torch.float64, nn.LSTM(8, 3)),
], ids=str)  # fmt: skip
def test_a_model_of_wide_types_is_refused(kind: torch.dtype, model: nn.Module) -> None:
    """Its inputs are float32 on the device."""
    name = str(kind).removeprefix("torch.")
    with pytest.raises(poptorch.Error, match=rf"(?s)weights of {name}, inputs of float32.*model\.float\(\)"):
        poptorch.inferenceModel(model.to(kind), options())(torch.randn(2, 2, 8).to(kind))
    poptorch.inferenceModel(model.float(), options())(torch.randn(2, 2, 8).to(kind))


def test_types_that_nothing_mixes_are_refused_with_advice() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)types of its weights and inputs.*Half.*give them one type") as e:
        infer(lambda x, y: torch.dot(x, y), torch.ones(3).half(), torch.ones(3))
    assert isinstance(e.value, poptorch.Error)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)])
def test_half_activations_update_float_statistics(norm) -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(1, 2, 3), norm(2), nn.Linear(2, 3)

        def forward(self, x, y):
            out = self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))
            return out, nn.functional.cross_entropy(out.float(), y)

    model = Normalized()
    plain = twin(model)
    x, y = torch.randn(8, 1, 5, 5), torch.randint(0, 3, (8,))
    executor = poptorch.trainingModel(model, options(), poptorch.optim.SGD(model.parameters(), lr=0.1))
    executor(x.half(), y)
    plain(x, y)
    assert model.norm.running_mean.dtype == torch.float32 and plain.norm.running_mean.abs().max() > 1e-3
    torch.testing.assert_close(torch.Tensor(model.norm.running_mean), plain.norm.running_mean, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(torch.Tensor(model.norm.running_var), plain.norm.running_var, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("seed", [1, 7])
def test_a_half_model_with_batch_norm_compiles(seed: int) -> None:
    """Eager PyTorch itself moves by several per cents there when a last bit changes."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)]
    model = Classifier(32 * 64, 10)
    model.fc = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), model.fc)
    model.half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, loss_scaling=128.0)
    executor, _ = trained(None, model, optimizer)
    _, loss = executor(torch.randn(8, 3, 8, 8).half(), torch.randint(10, (8,)))
    assert loss.dtype == torch.float16 and loss.isfinite()


def test_a_half_model() -> None:
    fc = nn.Linear(4, 3).half()
    out = poptorch.inferenceModel(fc, options())(torch.randn(2, 4).half())
    assert out.dtype == torch.float16


@pytest.mark.parametrize("d", [1, 2])
def test_an_input_that_forward_changes_is_changed(d: int) -> None:
    def change(x):
        x += 1
        return x.sum()

    x = torch.zeros(4, 2)
    infer(change, x, opts=options(d))
    assert torch.equal(x, torch.ones(4, 2))


@pytest.mark.parametrize(("d", "g", "r"), [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
def test_an_input_that_forward_changes_in_training(d: int, g: int, r: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x):
            x.mul_(2)
            return poptorch.identity_loss(self.fc(x), "mean")

    x = torch.arange(16.0).reshape(8, 2)
    executor, _ = trained(options(d, g, r), Net())
    executor(x)
    assert torch.equal(x, torch.arange(16.0).reshape(8, 2) * 2)
    executor.destroy()


def test_inputs_are_otherwise_left_alone() -> None:
    x, y = data(4)
    before = x.clone()
    executor, _ = trained()
    executor(x, y)
    assert torch.equal(x, before)


def test_submodules_from_outside() -> None:
    """A closure over a module that is no attribute."""
    fc = nn.Linear(2, 2)
    equal(infer(lambda x: fc(x), X), fc(X).detach())


@pytest.mark.parametrize("how", ["assigned", "deleted"])
def test_a_buffer_that_forward_replaces(how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            if how == "assigned":
                self.count = self.count + 1
            else:
                del self.count
            return x

    model = Net()
    with pytest.raises(poptorch.Error, match="'count' of Net was"):
        poptorch.inferenceModel(model, options())(X)
    assert torch.equal(model.count, torch.zeros(1))


def test_the_mode_is_that_of_the_first_call() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x)

    x = torch.ones(100)
    assert not torch.equal(poptorch.inferenceModel(Net(), options())(x), x)
    evaluated = Net().eval()
    executor = poptorch.inferenceModel(evaluated, options())
    assert torch.equal(executor(x), x)
    evaluated.train()
    assert torch.equal(executor(x), x) and evaluated.training


def test_compiling_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    executor = poptorch.inferenceModel(model, options())
    executor.compile(torch.randn(5, 4))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and model.training
    assert all(m.training for m in model.modules())


def test_running_on_the_device() -> None:
    seen = []

    def forward(x):
        seen.append(poptorch.isRunningOnIpu()) if False else None
        return x + (1 if poptorch.isRunningOnIpu() else 0)

    assert not poptorch.isRunningOnIpu()
    equal(infer(forward, X), X + 1)
    assert not poptorch.isRunningOnIpu()


def test_synthetic_data() -> None:
    executor = poptorch.inferenceModel(Run(lambda x: x.clone()), options().enableSyntheticData(True))
    a, b = executor(torch.zeros(8)), executor(torch.ones(8))
    assert torch.equal(a, b) and a.std() > 0


def test_floating_point_exceptions() -> None:
    opts = options()
    opts.Precision.enableFloatingPointExceptions(True)
    executor, _ = trained(opts)
    x, y = data(4)
    executor(x, y)
    with pytest.raises(poptorch.Error, match="not a number"):
        executor(x * float("nan"), y)


def test_gradients_can_be_anchored() -> None:
    opts = options().anchorTensor("grad", "Gradient___fc.weight").anchorTensor("now", "UpdatedVar___model.fc.bias")
    opts.anchorTensor("weight", "fc.weight")
    model = Classifier()
    other = twin(model)
    executor, _ = trained(opts, model)
    x, y = data(4)
    executor(x, y)
    other(x, y)[1].backward()
    torch.testing.assert_close(executor.getAnchoredTensor("grad"), other.fc.weight.grad)
    assert torch.equal(executor.getAnchoredTensor("now"), model.fc.bias)
    assert torch.equal(executor.getAnchoredTensor("weight"), model.fc.weight)
    assert {"Gradient___fc.weight", "UpdatedVar___fc.bias"} <= set(executor.getTensorNames())
    with pytest.raises(poptorch.Error, match="no anchored tensor 'other'"):
        executor.getAnchoredTensor("other")


def test_an_anchor_that_is_not_there_is_refused_at_once() -> None:
    executor, _ = trained(options().anchorTensor("a", "Gradient___fc.weigth"))
    with pytest.raises(poptorch.Error, match=r"fc\.weigth' cannot be read"):
        executor(*data(4))


def test_outputs_without_a_batch() -> None:
    """Their first dimension is concatenated like any other."""
    out = infer(lambda x: torch.stack([x.sum(), x.mean()]), torch.arange(8.0), opts=options(2, mode=OutputMode.All))
    assert out.tolist() == [6.0, 1.5, 22.0, 5.5]


def test_a_model_that_cannot_be_compiled_says_where() -> None:
    def forward(x):
        return x * 2 if x.sum() > 3 else x

    with pytest.raises(poptorch.Error, match=r"test_pop_inputs.py"):
        infer(forward, X)


def test_a_model_that_fails_says_what() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        poptorch.inferenceModel(nn.Linear(3, 3), options())(torch.zeros(2, 2))


def test_the_progress_bar(capsys) -> None:
    poptorch.inferenceModel(nn.Linear(2, 2), options().showCompilationProgressBar(True))(X)
    err = capsys.readouterr().err
    assert "Graph compilation: 100%" in err and "100/100 [" in err
    poptorch.inferenceModel(nn.Linear(2, 2), options())(X)
    assert "Graph compilation" not in capsys.readouterr().err
