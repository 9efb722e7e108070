"""Several signatures in one artifact: batch sizes, inference alone, and steps of their own, over one set of weights and state."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from devices import COMPUTING
from torch import Tensor, nn

import tilework
from tilework.check.check import check

ROWS, LAST = 8, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


def made(micro: int = 1) -> tuple[tilework.Step, Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = torch.randn(ROWS // micro, 6), torch.randint(0, 4, (ROWS // micro,))
    step = tilework.Step(model=model, inputs=(x,), targets=(y,), loss=nn.CrossEntropyLoss(), optimizer=optimizer,
                         num_micro_batches=micro)  # fmt: skip
    return step, model, optimizer


def compiled(path: Path, device: str, micro: int = 1, **sizes: object) -> tilework.Session:
    step, *_ = made(micro)
    tilework.compile(step, path, options=tilework.Options(device=device, opt_level=1), weights="inside", **sizes)  # type: ignore
    return tilework.load(path)


def eager(batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], Net]:
    _, model, optimizer = made()
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def data(*rows: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n, 6), torch.randint(0, 4, (n,))) for n in rows]


def near(session: tilework.Session, model: Net) -> None:
    for name, value in session.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("device", COMPUTING)
def test_a_partial_last_batch_trains_as_eager(device: str, tmp_path: Path) -> None:
    session = compiled(tmp_path / "m.pef", device, batch_sizes=[ROWS, LAST])
    batches = data(ROWS, ROWS, LAST, ROWS, LAST)
    losses, model = eager(batches)
    found = [float(session.run(x, y).loss) for x, y in batches]
    assert found == pytest.approx(losses, rel=1e-4)
    near(session, model)
    assert session.num_steps == 5 and int(session.memory.read("state/opt0.g0/step")) == 5


def test_loaders_bring_a_last_batch_of_another_size(tmp_path: Path) -> None:
    session = compiled(tmp_path / "m.pef", "cpu", batch_sizes=[ROWS, LAST])
    [(x, y)] = data(5 * ROWS + LAST)
    losses, model = eager(list(zip(x.split(ROWS), y.split(ROWS), strict=True)))
    parts = [(a, b) for a, b in zip(x.split(ROWS), y.split(ROWS), strict=True)]
    start = session.tensors()
    for source in (tilework.Loader((x, y), batch_size=ROWS, num_steps=2), tilework.Loader(parts, num_steps=2)):
        session.load_tensors(start)
        found = [v for r in session.loop(source) for v in r.losses.tolist()]
        assert found == pytest.approx(losses, rel=1e-4)
        near(session, model)
    short = tilework.Loader((x[:-1], y[:-1]), batch_size=ROWS)
    with pytest.raises(tilework.UserError, match=r"batch_sizes=\[8, 2\]"):
        list(session.loop(short))


def test_inference_at_sizes_of_its_own(tmp_path: Path) -> None:
    session = compiled(tmp_path / "m.pef", "cpu", infer_batch_sizes=[1, 5])
    _, model, _ = made()
    model.eval()
    for rows in (1, 5, ROWS):
        [(x, _)] = data(rows)
        torch.testing.assert_close(session.infer(x), model(x), rtol=1e-4, atol=1e-5)
    [(x, y)] = data(5)
    with pytest.raises(tilework.UserError, match="one of the signatures 8, infer_1, infer_5"):
        session.run(x, y)
    with pytest.raises(tilework.UserError, match="one of the signatures"):
        session.infer(data(2)[0][0])
    with pytest.raises(tilework.UserError, match="no signature 'infer_7'"):
        session.infer(x, signature="infer_7")


@pytest.mark.slow
def test_accumulation_at_other_sizes(tmp_path: Path) -> None:
    """12 rows are three micro-batches of 4; 3 rows are one of their own."""
    session = compiled(tmp_path / "m.pef", "cpu", micro=2, batch_sizes=[ROWS, 12, LAST])
    assert [s.num_micro_batches for s in session.manifest.signatures] == [2, 3, 1]
    for calls, (x, y) in zip(session.calls, data(ROWS, 12, LAST), strict=True):
        before = session.num_steps
        result = session.run(x, y)
        assert result.outputs.shape == (len(x), 4) and session.num_steps == before + 1
        assert len(result.losses) == calls.signature.num_micro_batches


def test_each_signature_is_checked(tmp_path: Path) -> None:
    session = compiled(tmp_path / "m.pef", "cpu", batch_sizes=[ROWS, LAST], infer_batch_sizes=[1])
    report = check(tmp_path / "m.pef", made()[0])
    assert report.ok and {r.name.partition(":")[0] for r in report.rows if ":" in r.name} == {"3", "infer_1"}
    assert {r.program for r in report.rows} >= {"step", "step_3", "infer_3", "infer_1"}
    assert session.manifest.signatures[1].programs["opt"] == "opt"  # the update does not depend on the batch: there is one


def test_steps_of_their_own_share_the_weights(tmp_path: Path) -> None:
    """Two uses of one model, which differ in more than the batch."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).cumsum(1))

    torch.manual_seed(0)
    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens = torch.randint(0, 11, (2, 7))
    steps = [
        tilework.Step(model=model, inputs=(tokens,), loss=None, optimizer=optimizer, name="long"),
        tilework.Step(model=model, inputs=(tokens[:1, :1],), train=False, name="token"),
    ]
    tilework.compile(steps, tmp_path / "m.pef", options=tilework.Options(opt_level=1), weights="inside")
    with tilework.load(tmp_path / "m.pef") as session:
        assert [s.name for s in session.manifest.signatures] == ["long", "token"]
        assert list(session.manifest.signatures[1].programs) == ["infer"]
        torch.testing.assert_close(session.infer(tokens[:1, :1], signature="token"), model(tokens[:1, :1]))
        torch.testing.assert_close(session.infer(tokens), model(tokens))
    other = copy.deepcopy(model)
    with pytest.raises(tilework.UserError, match="does not use the weights of the first one"):
        tilework.compile([steps[0], tilework.Step(model=other, inputs=(tokens[:1],), train=False)], tmp_path / "n.pef")


def test_an_artifact_for_inference_has_no_backward(tmp_path: Path) -> None:
    step, model, _ = made()
    done = tilework.compile(tilework.Step(model=model, inputs=step.inputs, train=False), tmp_path / "m.pef", weights="inside")
    assert list(done.plan.programs) == ["infer"]
    with tilework.load(done.path) as session:
        model.eval()
        torch.testing.assert_close(session.infer(*step.inputs), model(*step.inputs), rtol=1e-4, atol=1e-5)
        with pytest.raises(tilework.UserError, match=r"infer\(\) only"):
            session.run(*step.inputs, sections=["fwd"])


def test_wrong_sizes(tmp_path: Path) -> None:
    step, *_ = made()
    for sizes in ([0], [-1], [1.5], ["8"]):
        with pytest.raises(tilework.UserError, match="whole numbers, 1 or more"):
            tilework.compile(step, tmp_path / "m.pef", batch_sizes=sizes)  # type: ignore[arg-type]
    with pytest.raises(tilework.UserError, match="batch sizes are for one step"):
        tilework.compile([step, step], tmp_path / "m.pef", batch_sizes=[8])
    with pytest.raises(tilework.UserError, match="the same name"):
        tilework.compile([step, step], tmp_path / "m.pef")


def test_gradients_lie_in_buckets(tmp_path: Path) -> None:
    step, *_ = made()
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(num_replicas=2, opt_level=1), weights="inside")
    with tilework.load(tmp_path / "m.pef") as session:
        m = session.manifest
        assert "accumulate" in m.signature.programs and m.signature.num_micro_batches == 1
        [bucket] = m.buckets
        assert sorted(bucket.buffers) == sorted(f"grad/{p.name}" for p in m.parameters)
        whole = session._device.memory.buckets[0]
        session.run(*step.inputs, *step.targets)
        grads = session.gradients()
        assert all(torch.equal(session._device.buffers[f"grad/{k}"], g) for k, g in grads.items())
        total = sum(float(g.sum()) for g in grads.values())
        assert float(whole.sum()) == pytest.approx(total, abs=1e-4)  # the whole is its gradients, and nothing between them
        assert whole.data_ptr() == session._device.buffers[bucket.buffers[0]].data_ptr()


def test_replicas_draw_numbers_of_their_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5))
    step = tilework.Step(model=model, inputs=(torch.ones(4, 6),), loss=lambda out: out.sum(), targets=())
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device="reference"), weights="inside")

    def drawn(**how: int) -> Tensor:
        with tilework.load(tmp_path / "m.pef", **how) as session:  # type: ignore[arg-type]
            return session.run(torch.ones(4, 6), sections=["fwd"]).outputs

    assert torch.equal(drawn(seed=3), drawn(seed=3, rank=0)) and torch.equal(drawn(seed=3, rank=2), drawn(seed=3, rank=2))
    assert not torch.equal(drawn(seed=3, rank=1), drawn(seed=3)) and not torch.equal(drawn(seed=3, rank=1), drawn(seed=3, rank=2))


def test_an_optimizer_that_has_made_steps(tmp_path: Path) -> None:
    step, model, optimizer = made()
    model(torch.randn(ROWS, 6)).sum().backward()
    optimizer.step()
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device="reference"), weights="inside",
                     batch_sizes=[ROWS, LAST], infer_batch_sizes=[LAST, 1])  # fmt: skip
    session = tilework.load(tmp_path / "m.pef")
    assert [s.name for s in session.manifest.signatures] == [str(ROWS), str(LAST), "infer_1"]
    assert int(session.memory.read("state/opt0.g0/step")) == 1


def test_keywords_in_any_order(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return (self.a(x) * scale).square().mean()

    model = Two()
    batch = {"x": torch.randn(4, 6), "scale": torch.randn(4, 3)}
    step = tilework.Step(model=model, inputs=batch, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device="reference"), batch_sizes=[4, 2])
    session = tilework.load(tmp_path / "m.pef")
    small = {"scale": batch["scale"][:2], "x": batch["x"][:2]}
    expected = float(model(small["x"], small["scale"]))
    assert float(session.run(**small).loss) == pytest.approx(expected, rel=1e-5)
