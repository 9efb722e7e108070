"""Sections over several micro-batches, and replicas: gradients that wait for others before the update."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from devices import COMPUTING
from torch import Tensor, nn

import tilework
from tilework.errors import UserError

ROWS, MICRO = 8, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.norm(self.a(x)).relu()))


def compiled(path: Path, device: str, *, micro: int = 1, loss: object = nn.functional.cross_entropy, **more: object):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = torch.randn(ROWS // micro, 6), torch.randint(0, 4, (ROWS // micro,))
    targets = {"targets": (y,), "loss": loss} if loss else {"loss": None}
    step = tilework.Step(model=model, inputs=(x,), optimizer=optimizer, num_micro_batches=micro, **targets)
    tilework.compile(step, path, options=tilework.Options(device=device, opt_level=1, **more), weights="inside")
    return tilework.load(path)


def data(steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(ROWS, 6, generator=g), torch.randint(0, 4, (ROWS,), generator=g)) for _ in range(steps)]


def same(one: tilework.Session, other: tilework.Session, exact: bool = False) -> None:
    for name, value in one.tensors().items():
        torch.testing.assert_close(value, other.tensors()[name], rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6, msg=name)


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize("how", ["together", "forward first", "update apart"])
def test_sections_of_micro_batches_are_the_fused_step(device: str, how: str, tmp_path: Path) -> None:
    """With dropout and BatchNorm: the repeated forward has the same masks, and statistics move once."""
    whole, parts = (compiled(tmp_path / f"{i}.pef", device, micro=MICRO) for i in range(2))
    for x, y in data(3):
        expected = whole.run(x, y)
        if how == "together":
            found = parts.run(x, y, sections=["fwd", "bwd", "reduce", "opt"])
        elif how == "forward first":
            mine = x.clone(), y.clone()
            found = parts.run(*mine, sections=["fwd"])
            mine[0].zero_()  # the caller's memory is his own again
            parts.run(sections=["bwd", "opt"])
        else:
            found = parts.run(x, y, sections=["fwd", "bwd"])
            assert set(parts.gradients()) == {k for k, _ in Net().named_parameters()}
            parts.run(sections=["opt"])
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(found.outputs, expected.outputs)
        same(parts, whole)
    assert parts.num_steps == whole.num_steps == 3


@pytest.mark.parametrize("device", COMPUTING)
def test_micro_batches_with_gradients_from_the_host(device: str, tmp_path: Path) -> None:
    """The loss on the host, over all micro-batches at once, beside the same loss in the step."""
    whole = compiled(tmp_path / "whole.pef", device, micro=MICRO)
    parts = compiled(tmp_path / "parts.pef", device, micro=MICRO)
    for x, y in data(2):
        expected = whole.run(x, y)
        out = parts.run(x, y, sections=["fwd"]).outputs.clone().requires_grad_()
        torch.testing.assert_close(out.detach(), expected.outputs)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        name = parts.manifest.signature.outputs[1].name
        parts.run(sections=["bwd", "opt"], out_grads={name: out.grad})
        same(parts, whole)


class Mean:
    """Averages over the sessions of several threads, bucket by bucket."""

    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size), [None] * size

    def of(self, rank: int):
        mean = self

        class Reducer:
            calls = 0

            def reduce(self, buckets: Sequence[Tensor]) -> None:
                Reducer.calls += 1
                mean.given[rank] = [b.clone() for b in buckets]
                mean.barrier.wait(60)
                for i, bucket in enumerate(buckets):
                    bucket.copy_(sum(given[i] for given in mean.given) / len(mean.given))
                mean.barrier.wait(60)

        return Reducer()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def plain(path: Path, device: str, rows: int, micro: int, **more: object) -> tilework.Session:
    torch.manual_seed(0)
    model = Plain()
    step = tilework.Step(model=model, inputs=(torch.randn(rows // micro, 6),), targets=(torch.randint(0, 4, (rows // micro,)),),
                         loss=nn.functional.cross_entropy, optimizer=torch.optim.Adam(model.parameters(), 1e-2, weight_decay=0.1),
                         clip_norm=0.5, num_micro_batches=micro)  # fmt: skip
    tilework.compile(step, path, options=tilework.Options(device=device, opt_level=1, **more), weights="inside")
    return tilework.load(path)


@pytest.mark.parametrize("device", COMPUTING)
@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_replicas_are_one_with_both_batches(device: str, micro: int, tmp_path: Path) -> None:
    """Clipping by the norm of all gradients, Adam, several steps a call, a schedule; the artifact runs alone as well."""
    batches, lr = data(4), [0.02, 0.01, 0.02, 0.005]
    alone = plain(tmp_path / "alone.pef", device, ROWS, 1)
    expected = [float(alone.run(x, y, hyper={"lr": r}).loss) for (x, y), r in zip(batches, lr, strict=True)]
    replicas = [plain(tmp_path / "m.pef", device, ROWS // 2, micro, num_replicas=2) for _ in range(2)]
    mean, losses = Mean(2), [None, None]

    def train(rank: int) -> None:
        session, half = replicas[rank], slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
        session.reduce_with(mean.of(rank))
        x, y = (torch.cat([b[i][half] for b in batches]) for i in range(2))
        result = session.run(x, y, num_steps=4, hyper={"lr": lr})
        losses[rank] = result.losses.reshape(4, -1).mean(1)

    threads = [threading.Thread(target=train, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for replica in replicas:
        same(replica, alone)
        assert replica.num_steps == 4
    assert ((losses[0] + losses[1]) / 2).tolist() == pytest.approx(expected, rel=1e-4)
    # The same file without others: one replica, in one native call.
    again = tilework.load(tmp_path / "m.pef")
    again.run(batches[0][0][: ROWS // 2], batches[0][1][: ROWS // 2])
    assert again.num_steps == 1


def test_random_numbers_differ_by_rank(tmp_path: Path) -> None:
    compiled(tmp_path / "m.pef", "cpu", num_replicas=2).close()
    x, y = data(1)[0]
    first, same_rank, other = (tilework.load(tmp_path / "m.pef", rank=r).run(x, y).outputs for r in (0, 0, 1))
    assert torch.equal(first, same_rank) and not torch.equal(first, other)


def test_a_step_that_cannot_wait(tmp_path: Path) -> None:
    session = compiled(tmp_path / "m.pef", "reference")
    session.reduce_with(Mean(1).of(0))
    with pytest.raises(UserError, match="other replicas") as e:
        session.run(*data(1)[0])
    assert e.value.id == "run-reduce" and "num_replicas" in e.value.fix
    session.run(*data(1)[0], sections=["fwd", "bwd", "reduce", "opt"])  # one by one it can
    assert session.num_steps == 1


def test_no_step_passes_a_reducer_over(tmp_path: Path) -> None:
    """Also where the artifact has nothing but the fused step."""
    session = compiled(tmp_path / "m.pef", "reference", programs="fused")
    session.reduce_with(Mean(1).of(0))
    with pytest.raises(UserError, match="other replicas"):
        session.run(*data(1)[0])


def test_sections_do_what_they_say(tmp_path: Path) -> None:
    session, reducer = compiled(tmp_path / "m.pef", "reference", num_replicas=2), Mean(1).of(0)
    session.reduce_with(reducer)
    x, y = data(1)[0]
    session.run(x, y, sections=["fwd", "bwd"])
    assert type(reducer).calls == 0
    session.run(sections=["reduce"])
    assert type(reducer).calls == 1 and session.num_steps == 0
    session.run(sections=["opt"])
    assert session.num_steps == 1
    session.run(x, y, sections=["fwd", "bwd", "opt"])
    assert type(reducer).calls == 1
    session.run(x, y)
    assert type(reducer).calls == 2 and session.num_steps == 3
    with pytest.raises(UserError, match="no section"):
        session.run(x, y, sections=[])


def test_gradients_of_outputs_that_do_not_fit(tmp_path: Path) -> None:
    session = compiled(tmp_path / "m.pef", "reference", micro=MICRO)
    x, y = data(1)[0]
    for wrong, text in (({"outputt": torch.ones(ROWS, 4)}, "did you mean"), ({"output": torch.ones(2, 4)}, "expected [8, 4]")):
        session.run(x, y, sections=["fwd"])
        before = session.random_state()
        with pytest.raises(UserError) as e:
            session.run(sections=["bwd"], out_grads=wrong)
        assert e.value.id == "run-out-grads" and text in str(e.value) and session.random_state() == before


def test_backward_belongs_to_its_forward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Plain()
    step = tilework.Step(model=model, inputs=(torch.randn(ROWS, 6),), targets=(torch.randint(0, 4, (ROWS,)),),
                         loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device="reference"), batch_sizes=[ROWS, 3])
    session = tilework.load(tmp_path / "m.pef")
    x, y = data(1)[0]
    session.run(x[:3], y[:3], sections=["fwd"])
    with pytest.raises(UserError, match="needs what a fwd"):
        session.run(sections=["bwd"], signature=str(ROWS))


def test_follow_but(tmp_path: Path) -> None:
    session = compiled(tmp_path / "m.pef", "reference")
    own = torch.optim.Adam(Net().parameters(), 0.5)
    session.set(lr=0.125)
    session.follow(own, but="lr")
    session.run(*data(1)[0])
    assert session.hyper["opt0.g0.lr"] == 0.125
    session.follow(own)
    session.run(*data(1)[0])
    assert session.hyper["opt0.g0.lr"] == 0.5
    with pytest.raises(UserError, match="learning_rate"):
        session.follow(own, but=["learning_rate"])
