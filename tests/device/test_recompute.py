"""tilework.recompute_from: values between marks are computed again in the backward pass. The numbers are the same bits, and the
step needs less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import COMPUTING
from torch import Tensor, nn

import tilework
from tilework.compiler import memory
from tilework.compiler.codegen_cpu import generate
from tilework.plan.recompute import MARK

pytestmark = pytest.mark.slow

WIDTH, ROWS = 32, 256


class Layer(nn.Module):
    def __init__(self, drop: float, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Deep(nn.Module):
    def __init__(self, marks: bool, drop: float = 0.1, norm: bool = False, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(drop, norm) for _ in range(layers))
        self.head, self.marks = nn.Linear(WIDTH, 3), marks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = tilework.recompute_from(layer(x)) if self.marks else layer(x)
        return self.head(x)


def data(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=g), torch.randint(0, 3, (rows,), generator=g)


def step(marks: bool, micro: int = 1, **model: Any) -> tilework.Step:
    torch.manual_seed(0)
    deep, (x, y) = Deep(marks, **model), data(ROWS // micro)
    return tilework.Step(model=deep, inputs=(x,), targets=(y,), loss=nn.CrossEntropyLoss(), num_micro_batches=micro,
                         optimizer=torch.optim.AdamW(deep.parameters(), 1e-2))  # fmt: skip


def options(**settings: Any) -> tilework.Options:
    return tilework.Options(**{"programs": "fused", "opt_level": 1, **settings})


def trained(path: Path) -> tuple[list[float], dict[str, Tensor]]:
    with tilework.load(path, seed=3) as session:
        losses = [session.run(*data()).losses.flatten().tolist() for _ in range(4)]
        return losses, session.state_dict()  # type: ignore[return-value]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dropout": ({}, {}),
    "micro-batches": ({"micro": 2}, {}),
    "pieces": ({}, {"piece_size": 60}),
    "running statistics": ({"norm": True, "drop": 0.0}, {}),
    "replicas": ({}, {"num_replicas": 2}),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in ("dropout", "pieces") else [pytest.mark.full]) for c in CASES])
@pytest.mark.parametrize("device", COMPUTING)
def test_the_same_bits(case: str, device: str, tmp_path: Path) -> None:
    model, settings = CASES[case]
    if device != "cpu" and settings:
        pytest.skip("settings of the cpu's")
    found = []
    for marks in (True, False):
        path = tmp_path / f"{marks}.pef"
        tilework.compile(step(marks, **model), path, options=options(device=device, **settings))
        found.append(trained(path))
    (losses, weights), (plain_losses, plain_weights) = found
    if device == "cuda":  # where other kernels are the fastest for another program, and round otherwise
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain_losses))
        return
    assert losses == plain_losses and losses[0] != losses[1]
    for name, want in plain_weights.items():
        assert torch.equal(weights[name], want), name


def test_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plan, and in the code that is generated."""
    sizes: list[int] = []
    arrange = memory.arrange

    def noted(places: list[memory.Place]) -> int:
        sizes.append(arrange(places))
        return sizes[-1]

    monkeypatch.setattr(memory, "arrange", noted)
    planned, needed = {}, {}
    for marks in (True, False):
        plan = tilework.plan_step(step(marks), options=options())
        planned[marks] = plan.memory["temporary"]
        generate(plan.programs["step"], options(), tmp_path)
        needed[marks] = sizes[-1]
    assert planned[True] < 0.7 * planned[False]
    assert needed[True] < 0.6 * needed[False]


def test_turned_off_it_is_the_plain_step() -> None:
    off = tilework.plan_step(step(True), options=options(disable=("recompute",)))
    plain = tilework.plan_step(step(False), options=options())
    assert [len(g.nodes) for g in off.programs.values()] == [len(g.nodes) for g in plain.programs.values()]
    assert off.memory == plain.memory


def test_no_mark_is_left(tmp_path: Path) -> None:
    for made in (options(), options(programs="all"), options(programs="sections"), options(disable=("recompute", "fuse"))):
        plan = tilework.plan_step(step(True), options=made)
        assert not any(n.op == MARK for g in plan.programs.values() for n in g.nodes)


def test_only_what_lies_between_marks_is_computed_again() -> None:
    plan = tilework.plan_step(step(True, layers=3), options=options(disable=("sums", "products", "updates")))
    (graph,) = [g for name, g in plan.programs.items() if name == "step"]
    again = [n for n in graph.nodes if n.name.endswith(".again")]
    assert sum(n.op == "aten.gelu.default" for n in again) == 3
    assert sum(n.op == "aten.addmm.default" for n in again) == 3  # `up`; the backward pass does not need what `down` makes
    assert {n.section for n in again} == {"bwd"}
    assert sum(n.op.startswith("aten.native_layer_norm") for n in again) == 3
    late = [n for n in graph.nodes if n.op == "tilework.after.default"]
    assert 3 <= len(late) <= 6  # each layer's input, and the seed


def test_eager_pytorch_sees_the_value_itself() -> None:
    x = torch.randn(3, requires_grad=True)
    (tilework.recompute_from(x) * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
