"""Programs in pieces: what repeats is one piece, nothing is lost, and writes come in time. tests/fuzz compiles generated programs
in small pieces; here are the models that pieces are made for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tilework
from tilework.artifact.graph import Graph, Node, Ref, TensorType
from tilework.capture.capture import StepGraph, capture
from tilework.compiler.backends import backend_for
from tilework.compiler.build import plan_step
from tilework.plan.pieces import Cut
from tilework.plan.plan import Plan, plan
from tilework.plan.sums import sums
from tilework.plan.views import find_views

pytestmark = pytest.mark.slow

FUSED = tilework.Options(programs="fused")


class Encoder(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.encoder(x) * torch.linspace(0.1, 1.0, 16)).tanh().mean()  # not a constant of a normalised output


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM, width: int = 12, **settings: object) -> None:
        super().__init__()
        self.layer = kind(8, width, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].square().mean()


class Deeper(Encoder):
    def __init__(self) -> None:
        super().__init__(6)


@functools.cache
def recurrent(kind: type[nn.Module], width: int = 12) -> Callable[[], nn.Module]:
    return lambda: Recurrent(kind, width)


class Counting(nn.Module):
    """Layers that change a buffer which a later layer still reads as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(12)
        )
        self.register_buffer("total", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.total.clone()
        for layer in self.layers:
            x = x + layer(x) * self.total.clone()
            self.total.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x * before).square().mean()


def step_of(
    model: nn.Module, x: Tensor, rule: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: object
) -> tilework.Step:
    return tilework.Step(model=model, inputs=(x,), loss=0, optimizer=rule(model.parameters(), lr=1e-2), **settings)


def cut_of(step: tilework.Step, program: str = "step") -> Cut:
    return plan_step(step, FUSED).cuts[program]


@functools.cache
def captured(make: Callable[[], nn.Module], *shape: int) -> StepGraph:
    """Capturing takes longer than planning: once for all tests of a model."""
    return capture(step_of(make(), torch.randn(*shape)), sections=False)


def planned(make: Callable[[], nn.Module], *shape: int, **options: object) -> Plan:
    chosen = tilework.Options(programs="fused", **options)
    return plan([captured(make, *shape)], chosen, backend_for("cpu").passes)


def test_layers_that_repeat_are_one_piece() -> None:
    few, many = (planned(make, 2, 5, 16).cuts["step"] for make in (Encoder, Deeper))
    assert len(few.pieces) == len(many.pieces)
    assert sorted(p.digest() for p in few.pieces) == sorted(p.digest() for p in many.pieces)
    assert len(many.calls) > len(few.calls) > len(few.pieces)
    assert len(many.updates) == 1 and len(many.updates[0].instances) == 6 * 12


def test_each_layer_draws_random_numbers_of_its_own() -> None:
    cut = planned(Encoder, 2, 5, 16).cuts["step"]
    assert len(set(cut.numbers.values())) == len(cut.numbers) >= 4 * 3


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_time_steps_are_one_piece(kind: type[nn.Module]) -> None:
    few, many = (planned(recurrent(kind), 3, n, 8).cuts["step"] for n in (14, 20))
    assert sum(len(p.nodes) for p in many.pieces) <= 1.2 * sum(len(p.nodes) for p in few.pieces)


def _covered(cut: Cut, graph: Graph) -> None:
    """Every buffer that the program writes is written, and values are made before they are used."""
    made = set(graph.reads) | set(cut.numbers)
    written: list[str] = []
    for call in cut.calls:
        piece = cut.pieces[call.piece]
        value = dict(zip(piece.buffers, call.values, strict=True))
        assert {cut.base(value[b]) for b in piece.reads} <= made
        written += [value[b] for b in piece.buffers if b in piece.written]
        made |= {cut.base(value[b]) for b in piece.written}
    for update in cut.updates:
        assert {cut.base(v) for v in update.inputs()} <= made
        written += update.writes()
    assert {w for w in written if cut.base(w) not in cut.temporaries} == graph.written
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("size", [8, 400])
def test_nothing_is_lost(size: int) -> None:
    for make, *shape in (
        (Encoder, 2, 5, 16),
        (recurrent(nn.LSTM), 3, 14, 8),
        (recurrent(nn.LSTM, 120), 3, 14, 8),
        (Counting, 4, 8),
    ):
        made = planned(make, *shape, piece_size=size)  # type: ignore[arg-type]
        assert "step" in made.cuts
        for name, cut in made.cuts.items():
            _covered(cut, made.programs[name])


def test_the_gradient_of_a_recurrent_weight_is_one_product() -> None:
    with_sums, without = (
        planned(recurrent(nn.LSTM), 3, 14, 8, disable=("products", *off)).programs["step"] for off in ((), ("sums",))
    )
    products = [sum(n.op == "aten.mm.default" for n in graph.nodes) for graph in (with_sums, without)]
    assert products[1] - products[0] == 13  # 14 time steps


def test_a_recurrent_weight_is_transposed_once() -> None:
    graph = planned(recurrent(nn.LSTM, 120), 3, 14, 8).programs["step"]
    copies = [n for n in graph.nodes if n.op == "aten.clone.default" and n.name.endswith("_once")]
    assert [n.types[0].shape for n in copies if n.types[0]] == [(120, 480)]
    readers = [n for n in graph.nodes if n.op == "tilework.product.default" and n.args[1] == Ref(copies[0].name)]
    assert len(readers) == 14  # time steps


def _graph(*nodes: Node, read: TensorType) -> Graph:
    graph = Graph("g", ("x",), nodes, (("y", nodes[-1].name),), {"x": read, "y": nodes[-1].types[0] or read})
    graph.verify()
    return graph


def test_a_conjugate_is_not_elements_as_they_are() -> None:
    kind = TensorType.dense("complex64", (3, 2))
    turned = TensorType("complex64", (2, 3), (1, 2))
    graph = _graph(
        Node("a", "aten._conj.default", (Ref("x"),), {}, (kind,)),
        Node("b", "aten.t.default", (Ref("x"),), {}, (turned,)),
        read=kind,
    )
    assert set(find_views(graph)) == {"b"}


def test_sums_of_another_shape_stay_as_they_are() -> None:
    """Rows are summed to (1, 6), looked at as (2, 3) and added: not the sum of a bias."""
    rows, one, two = (TensorType.dense("float32", s) for s in ((4, 6), (1, 6), (2, 3)))
    nodes: list[Node] = []
    for i in range(5):
        nodes.append(Node(f"r{i}", "aten.mul.Tensor", (Ref("x"), float(i)), {}, (rows,)))
        nodes.append(Node(f"s{i}", "aten.sum.dim_IntList", (Ref(f"r{i}"), [0], True), {}, (one,)))
        nodes.append(Node(f"v{i}", "aten.view.default", (Ref(f"s{i}"), [2, 3]), {}, (two,)))
    total = "v0"
    for i in range(1, 5):
        nodes.append(Node(f"a{i}", "aten.add.Tensor", (Ref(total), Ref(f"v{i}")), {}, (two,)))
        total = f"a{i}"
    graph = _graph(*nodes, read=rows)
    assert sums(graph) is graph


def test_small_programs_stay_whole() -> None:
    assert not plan_step(step_of(nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)), torch.randn(1, 8)), FUSED).cuts


@pytest.mark.parametrize(
    ("make", "shape", "rule", "size"),
    [
        (Encoder, (2, 5, 16), torch.optim.SGD, 400),
        pytest.param(lambda: Recurrent(bidirectional=True), (3, 14, 8), torch.optim.Adam, 400, marks=pytest.mark.full),
        (lambda: Recurrent(nn.GRU), (3, 14, 8), torch.optim.RMSprop, 10),
        pytest.param(lambda: Recurrent(width=40), (3, 14, 8), torch.optim.SGD, 400, marks=pytest.mark.full),
        (Counting, (4, 8), torch.optim.AdamW, 30),
    ],
)
def test_numbers(make: object, shape: tuple[int, ...], rule: type[torch.optim.Optimizer], size: int, tmp_path: Path) -> None:
    """Beside the whole graph, operator by operator: three steps, each from the state that the one before left."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(*shape)  # type: ignore[operator]
    options = tilework.Options(programs="fused", piece_size=size)
    made = tilework.compile(step_of(model, x, rule, clip_norm=1.0), tmp_path / "pieces.pef", options=options)
    assert made.plan.cuts and not made.verification.retreats
    results = []
    for device in ("cpu", "reference"):
        with tilework.load(made.path, device=device, seed=3) as session:
            losses = [session.run(x).loss.item() for _ in range(3)]
            results.append((losses, {k: v.clone() for k, v in session.tensors().items()}))
    (losses, tensors), (expected_losses, expected) = results
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, want in expected.items():
        torch.testing.assert_close(tensors[name], want, rtol=1e-3, atol=2e-5, msg=name)
