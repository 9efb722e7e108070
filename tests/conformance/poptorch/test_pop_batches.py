"""Batches of device iterations, accumulation and replicas: weights, outputs and losses are those of eager PyTorch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from pop_helpers import Classifier, data, eager, options, same, trained, twin

import poptorch
from poptorch import OutputMode

ROWS = 2
ALL = [1, 2, 4]


@pytest.mark.parametrize(("d", "g", "r"), list(product(ALL, ALL, ALL)))
def test_training_is_eagers(d: int, g: int, r: int) -> None:
    """With momentum, so that the order of the updates counts; two calls, so that state is kept."""
    model = Classifier()
    other = twin(model)
    make = {"lr": 0.2, "momentum": 0.9}
    executor, _ = trained(options(d, g, r, OutputMode.All), model, poptorch.optim.SGD(model.parameters(), **make))
    optimizer = torch.optim.SGD(other.parameters(), **make)
    for call in range(2):
        x, y = data(d * g * r * ROWS, seed=call)
        out, loss = executor(x, y)
        outs, losses = eager(other, optimizer, x, y, d, g, r)
        torch.testing.assert_close(out, torch.cat(outs), rtol=1e-4, atol=1e-5)
        expected = torch.stack(losses) if d * g * r > 1 else losses[0]
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    same(model, other)
    executor.destroy()


def picked(blocks: list[torch.Tensor], mode: OutputMode, d: int, g: int, r: int, period: int) -> list[torch.Tensor]:
    """What the table of output modes says, written out."""
    steps = [blocks[i * r : (i + 1) * r] for i in range(d * g)]  # [micro-batches of a replica][replicas]
    if mode == OutputMode.All:
        return blocks
    if mode == OutputMode.Final:
        return steps[-1]
    if mode == OutputMode.Sum:
        return [torch.stack([s[k] for s in steps]).sum(0) for k in range(r)]
    return [b for s in steps[period - 1 :: period] for b in s]


@pytest.mark.parametrize("mode", [OutputMode.Final, OutputMode.All, OutputMode.Sum, OutputMode.EveryN], ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("d", "g", "r"), [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
)
def test_output_modes_in_training(d: int, g: int, r: int, mode: OutputMode) -> None:
    model = Classifier()
    other = twin(model)
    period = 2 if d * g > 1 else 1
    executor, _ = trained(options(d, g, r, mode, period), model)
    x, y = data(d * g * r * ROWS)
    outs, losses = eager(other, torch.optim.SGD(other.parameters(), lr=0.1), x, y, d, g, r)
    out, loss = executor(x, y)
    torch.testing.assert_close(out, torch.cat(picked(outs, mode, d, g, r, period)), rtol=1e-4, atol=1e-5)
    scalars = picked(losses, mode, d, g, r, period)
    torch.testing.assert_close(loss, scalars[0] if len(scalars) == 1 else torch.stack(scalars), rtol=1e-4, atol=1e-5)
    executor.destroy()


@pytest.mark.parametrize("mode", [OutputMode.Final, OutputMode.All, OutputMode.Sum, OutputMode.EveryN], ids=lambda m: m.name)
@pytest.mark.parametrize(("d", "r"), [(1, 1), (4, 1), (1, 2), (2, 2), (4, 2)])
def test_output_modes_in_inference(d: int, r: int, mode: OutputMode) -> None:
    model = Classifier().eval()
    period = 2 if d > 1 else 1
    executor = poptorch.inferenceModel(model, options(d, 1, r, mode, period))
    x, y = data(d * r * ROWS)
    out, loss = executor(x, y)
    with torch.no_grad():
        blocks = [model(a, b) for a, b in zip(x.chunk(d * r), y.chunk(d * r), strict=True)]
    torch.testing.assert_close(out, torch.cat(picked([b[0] for b in blocks], mode, d, 1, r, period)))
    scalars = picked([b[1] for b in blocks], mode, d, 1, r, period)
    torch.testing.assert_close(loss, scalars[0] if len(scalars) == 1 else torch.stack(scalars))


def test_the_default_of_training_is_the_last_and_of_inference_all() -> None:
    x, y = data(4 * ROWS)
    executor, model = trained(options(4))
    out, loss = executor(x, y)
    assert out.shape == (ROWS, 3) and loss.shape == ()
    inference = poptorch.inferenceModel(model, options(4))
    out, loss = inference(x, y)
    assert out.shape == (4 * ROWS, 3) and loss.shape == (4,)


@pytest.mark.parametrize("reduction", [poptorch.ReductionType.Mean, poptorch.ReductionType.Sum], ids=lambda r: r.name)
@pytest.mark.parametrize(("g", "r"), [(4, 1), (1, 2), (2, 2)])
def test_gradients_are_averaged_or_added(g: int, r: int, reduction: poptorch.ReductionType) -> None:
    model = Classifier()
    other = twin(model)
    opts = options(1, g, r)
    opts.Training.accumulationAndReplicationReductionType(reduction)
    executor, _ = trained(opts, model)
    x, y = data(g * r * ROWS)
    executor(x, y)
    eager(other, torch.optim.SGD(other.parameters(), lr=0.1), x, y, 1, g, r, mean=reduction == poptorch.ReductionType.Mean)
    same(model, other)
    executor.destroy()


@pytest.mark.parametrize(("d", "g", "r", "rows"), [(2, 1, 1, 3), (1, 4, 1, 6), (1, 1, 2, 5), (2, 2, 2, 12), (4, 1, 1, 0)])
@pytest.mark.parametrize("training", [True, False])
def test_a_wrong_batch(d: int, g: int, r: int, rows: int, training: bool) -> None:
    if not training and g > 1:
        d, g = d * g, 1
    opts = options(d, g, r)
    executor = trained(opts)[0] if training else poptorch.inferenceModel(Classifier(), opts)
    with pytest.raises(AssertionError, match=r"^Invalid batch dimension:"):
        executor(*data(rows))
    assert not executor.isCompiled()


def test_the_batch_of_a_later_call_is_checked_as_well() -> None:
    executor, _ = trained(options(2))
    executor(*data(4))
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        executor(*data(5))
    with pytest.raises(poptorch.Error, match=r"expected torch.Size\(\[4, 4\]\) but got torch.Size\(\[6, 4\]\)"):
        executor(*data(6))


def test_inference_does_not_accumulate() -> None:
    opts = poptorch.Options()
    opts.Training.gradientAccumulation(2)
    with pytest.raises(poptorch.Error, match="gradientAccumulation to 1"):
        poptorch.inferenceModel(Classifier(), opts)


def test_a_period_that_does_not_fit() -> None:
    with pytest.raises(AssertionError, match="period must divide"):
        poptorch.inferenceModel(Classifier(), options(4, mode=OutputMode.EveryN, period=3))


def test_batch_normalization_sees_one_micro_batch() -> None:
    class Normal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc, self.loss = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()

        def forward(self, x, y):
            out = self.fc(self.norm(x))
            return out, self.loss(out, y)

    model = Normal()
    other = twin(model)
    executor, _ = trained(options(2, 2), model)
    x, y = data(4 * 3)
    executor(x, y)
    eager(other, torch.optim.SGD(other.parameters(), lr=0.1), x, y, 2, 2, 1)
    same(model, other)
    assert int(model.norm.num_batches_tracked) == 4


def test_replicas_keep_their_own_buffers() -> None:
    class Counting(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x, labels=None):
            self.seen += x.sum()
            return super().forward(x, labels)

    model = Counting()
    x, y = data(4)
    executor, _ = trained(options(1, 1, 2), model)
    with pytest.raises(poptorch.Error, match="broadcasting buffers"):
        executor(x, y)
    executor.destroy()
    executor, _ = trained(options(1, 1, 2).broadcastBuffers(False), model)
    executor(x, y)
    torch.testing.assert_close(model.seen, x[:2].sum())  # the first replica's
    executor.destroy()


def test_inputs_without_a_batch_are_not_divided() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 1)

        def forward(self, x, scale):
            out = self.fc(x) * scale
            return out, poptorch.identity_loss(out, "mean")

    model = Scaled()
    other = twin(model)
    executor, _ = trained(options(2, 2, mode=OutputMode.All), model)
    x = data(8)[0]
    out, _ = executor(x, torch.tensor(3.0))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    expected, _ = eager(other, optimizer, x, torch.full((4,), 3.0), 2, 2, 1)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_inputs_of_different_sizes_are_divided_each_by_itself() -> None:
    class Two(torch.nn.Module):
        def forward(self, a, b):
            return a.sum(), b.sum()

    executor = poptorch.inferenceModel(Two(), options(2))
    a, b = torch.arange(4.0), torch.arange(6.0)
    first, second = executor(a, b)
    assert first.tolist() == [1.0, 5.0] and second.tolist() == [3.0, 12.0]


@pytest.mark.parametrize("d", [1, 3])
def test_on_the_cpu_device(monkeypatch, d: int) -> None:
    """The same in native code."""
    monkeypatch.setenv("TILEWORK_DEVICE", "cpu")
    model = Classifier()
    other = twin(model)
    executor, _ = trained(options(d, 2, 1, OutputMode.All), model)
    x, y = data(d * 4)
    out, loss = executor(x, y)
    outs, losses = eager(other, torch.optim.SGD(other.parameters(), lr=0.1), x, y, d, 2, 1)
    torch.testing.assert_close(out, torch.cat(outs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, torch.stack(losses), rtol=1e-4, atol=1e-5)
    same(model, other)
