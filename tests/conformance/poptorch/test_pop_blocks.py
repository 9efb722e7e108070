"""Blocks, stages and strategies: nothing changes numerically, and what is wrong is said."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from pop_helpers import options, same, twin
from torch import nn

import poptorch

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 1, 0, 2, 2, 1])


class Deep(nn.Module):
    def __init__(self, blocks: int = 4, ipus: list | None = None) -> None:
        super().__init__()
        layers = [nn.Linear(4, 4) for _ in range(blocks)]
        ids = ipus or list(range(blocks))
        self.layers = nn.Sequential(*(poptorch.BeginBlock(m, f"B{i}", ipu_id=ids[i]) for i, m in enumerate(layers)))
        self.last = nn.Linear(4, 3)

    def forward(self, x, y=None):
        out = self.last(torch.tanh(self.layers(x)))
        return out if y is None else (out, F.cross_entropy(out, y))


@pytest.mark.parametrize("strategy", [
    poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement), poptorch.ShardedExecution(poptorch.AutoStage.SameAsIpu),
    poptorch.PipelinedExecution(poptorch.Stage("B0", "B1").ipu(0), poptorch.Stage("B2", "B3").ipu(1)),
    poptorch.PipelinedExecution(["B0"], ["B1", "B2", "B3"]), poptorch.ShardedExecution("B0", "B1", "B2", "B3"),
    poptorch.SerialPhasedExecution(poptorch.Phase("B0", "B1"), poptorch.Phase("B2", "B3")), poptorch.PipelinedExecution(),
], ids=repr)  # fmt: skip
def test_a_strategy_changes_no_number(strategy) -> None:
    model = Deep()
    plain = twin(model)
    poptorch.removeBlocks(plain)
    opts = options(1, 8).setExecutionStrategy(strategy)
    poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))(X, Y)
    poptorch.trainingModel(plain, options(1, 8), torch.optim.SGD(plain.parameters(), lr=0.1))(X, Y)
    same(model, plain)


@pytest.mark.parametrize(
    ("blocks", "accumulation", "fits"), [(4, 7, True), (4, 6, False), (2, 3, True), (2, 2, False), (1, 1, True)]
)
def test_a_pipeline_needs_enough_accumulation(blocks: int, accumulation: int, fits: bool) -> None:
    model = Deep(blocks)
    executor = poptorch.trainingModel(model, options(1, accumulation))
    x, y = X[:1].repeat(accumulation, 1), Y[:1].repeat(accumulation)
    if fits:
        executor(x, y)
        return
    text = f"must be greater than or equal to the number of pipeline stages \\({2 * blocks - 1}\\)"
    with pytest.raises(poptorch.Error, match=r"poptorch.Options\(\).Training.gradientAccumulation " + text):
        executor(x, y)


@pytest.mark.parametrize(("iterations", "fits"), [(4, True), (2, False)])
def test_a_pipeline_needs_enough_iterations_in_inference(iterations: int, fits: bool) -> None:
    executor = poptorch.inferenceModel(Deep(), options(iterations))
    if fits:
        assert executor(X).shape == (8, 3)
        return
    with pytest.raises(poptorch.Error, match=r"poptorch.Options\(\).deviceIterations must be greater"):
        executor(X)


def test_sharding_has_no_such_rule() -> None:
    opts = options().setExecutionStrategy(poptorch.ShardedExecution())
    poptorch.trainingModel(Deep(), opts)(X, Y)


@pytest.mark.parametrize(("strategy", "text"), [
    (lambda: poptorch.PipelinedExecution("B0", "B1", "B2", "B9"), "Unknown Block B9"),
    (lambda: poptorch.ShardedExecution("B0", "B1", "B2"), "Block B3 belongs to no stage"),
])  # fmt: skip
def test_a_strategy_that_does_not_fit_the_model(strategy, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        poptorch.inferenceModel(Deep(), options(8).setExecutionStrategy(strategy()))(X)


@pytest.mark.parametrize(
    "make",
    [
        lambda: poptorch.PipelinedExecution("A", "A"),
        lambda: poptorch.Stage(),
        lambda: poptorch.Stage(3),
        lambda: poptorch.PipelinedExecution(3),
        lambda: poptorch.PipelinedExecution("A").stage("B"),
        lambda: poptorch.Phase("A").ipus(0, 1),
    ],
)
def test_wrong_strategies(make) -> None:
    with pytest.raises(AssertionError):
        make()


def test_a_number_of_devices_that_is_no_power_of_two() -> None:
    executor = poptorch.inferenceModel(Deep(3), options(8))
    with pytest.raises(poptorch.Error, match="power of 2"):
        executor(X)
    poptorch.inferenceModel(Deep(3), options(8).autoRoundNumIPUs(True))(X)


def test_too_many_devices() -> None:
    executor = poptorch.inferenceModel(Deep(2, [0, 63]), options(8, 1, 1).autoRoundNumIPUs(True).replicationFactor(2))
    with pytest.raises(poptorch.Error, match="at most 64"):
        executor(torch.cat([X, X]))


def test_stages_are_kept_in_the_artifact() -> None:
    executor = poptorch.inferenceModel(Deep(2), options(8))
    executor(X)
    stages = executor._device.session.manifest.metadata["poptorch"]["stages"]
    assert [list(s) for s in stages] == [["B0", 0, 0], ["B1", 1, 1]]


def test_a_block_is_the_same_module_and_is_printed() -> None:
    layer = nn.Linear(2, 2)
    assert poptorch.BeginBlock(layer, "first", ipu_id=3) is layer
    text = repr(nn.Sequential(layer))
    assert "BeginBlock(user_id=first, ipu_id=3)" in text and "in_features=2" in text
    poptorch.removeBlocks(layer)
    assert "BeginBlock" not in repr(layer)


def test_a_layer_begins_one_block() -> None:
    layer = poptorch.BeginBlock(nn.Linear(2, 2), "a")
    with pytest.raises(RuntimeError, match="already been called"):
        poptorch.BeginBlock(layer, "b")
    poptorch.removeBlocks(layer)
    poptorch.BeginBlock(layer, "b")


def test_a_copy_of_a_block_stands_alone() -> None:
    layer = poptorch.BeginBlock(nn.Linear(2, 2), "a")
    other = copy.deepcopy(layer)
    poptorch.removeBlocks(other)
    assert "BeginBlock" in repr(layer) and "BeginBlock" not in repr(other)


def test_blocks_in_forward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with poptorch.Block("one", ipu_id=0):
                x = self.a(x)
            poptorch.Block.start("two", ipu_id=1)
            x = self.b(x)
            return poptorch.BeginBlock(self.c.forward, "three", ipu_id=1)(x)

    model = Net()
    executor = poptorch.inferenceModel(model, options(8))
    torch.testing.assert_close(executor(X), model(X).detach())
    assert [s[0] for s in executor._stages] == ["one", "two", "three"]


def test_a_function_as_a_block() -> None:
    @poptorch.BlockFunction("f", ipu_id=0)
    def function(x):
        return x * 2

    class Net(nn.Module):
        def forward(self, x):
            return function(x)

    executor = poptorch.inferenceModel(Net(), options())
    assert torch.equal(executor(X), X * 2) and [s[0] for s in executor._stages] == ["f"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: poptorch.BeginBlock(3),
        lambda: poptorch.Block(user_id=3),
        lambda: poptorch.Block("a", ipu_id=-1),
        lambda: poptorch.BeginBlock(nn.Linear(1, 1), ipu_id="0"),
    ],
)
def test_wrong_blocks(make) -> None:
    with pytest.raises(poptorch.Error):
        make()


def test_blocks_do_nothing_in_eager() -> None:
    model = Deep()
    plain = twin(model)
    poptorch.removeBlocks(plain)
    assert torch.equal(model(X), plain(X))
    with poptorch.Block("x"):
        pass
