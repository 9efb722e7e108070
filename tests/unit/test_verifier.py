"""The verifier finds what a pass breaks: a planted fault of each kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tilework
from tilework.artifact.graph import Graph, Node, Ref, TensorType
from tilework.compiler.memory import unknown_form
from tilework.compiler.to_fx import to_fx, verify_order
from tilework.plan import plan as planning
from tilework.plan.verify import verify


def graph_of(**options) -> Graph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    step = tilework.Step(model=model, inputs=(torch.randn(4, 6),), targets=(torch.randn(4, 3),), loss=F.mse_loss,
                         optimizer=torch.optim.SGD(model.parameters(), lr=0.1))  # fmt: skip
    return tilework.plan_step(step, tilework.Options(programs="fused", **options)).programs["step"]


def changed(graph: Graph, which: str, **fields) -> Graph:
    """The graph with fields of its first node of that operator replaced."""
    at = next(i for i, n in enumerate(graph.nodes) if n.op == which)
    nodes = [*graph.nodes[:at], replace(graph.nodes[at], **fields), *graph.nodes[at + 1 :]]
    return replace(graph, nodes=tuple(nodes))


def complaint(graph: Graph) -> str:
    with pytest.raises(tilework.BugError) as e:
        verify(graph, "pass products")
    assert e.value.id == "verify-graph" and "pass products" in str(e.value)
    return str(e.value)


def test_a_right_graph_passes() -> None:
    verify(graph_of(), "capture")


def test_a_wrong_shape_and_a_wrong_dtype() -> None:
    graph = graph_of()
    kind = next(n for n in graph.nodes if n.op == "aten.tanh.default").types[0]
    assert kind is not None
    text = complaint(changed(graph, "aten.tanh.default", types=(TensorType.dense("float32", (4, 6)),)))
    assert "declared float32[4,6]" in text and "float32[4, 5]" in text
    assert "declared int64" in complaint(changed(graph, "aten.tanh.default", types=(replace(kind, dtype="int64"),)))


def test_arguments_that_the_operator_cannot_take() -> None:
    graph = graph_of()
    assert "cannot take its arguments" in complaint(
        changed(graph, "tilework.product.default", args=(Ref("input/input"), Ref("param/0.bias")))
    )


def test_random_numbers_that_are_not_seeded() -> None:
    assert "not seeded" in complaint(changed(graph_of(), "aten.tanh.default", op="aten.bernoulli.default"))


def test_an_operator_that_changes_its_argument() -> None:
    assert "changes its arguments" in complaint(changed(graph_of(), "aten.tanh.default", op="aten.tanh_.default"))


def test_a_name_that_is_used_before_it_is_defined() -> None:
    assert "not defined before" in complaint(changed(graph_of(), "aten.tanh.default", args=(Ref("nothing"),)))


def test_an_update_in_place_that_reads_what_changes() -> None:
    """What went wrong in matrix factorisation: an operand that is a view of another weight."""
    graph = graph_of()
    update = next(n for n in graph.nodes if n.op == "tilework.updated_by_product.default")
    other = next(b for b in graph.written if b.startswith("param/") and b != update.args[0].name and b.endswith("2.weight"))
    view = Node("view_of_other", "aten.t.default", (Ref(other),), {}, (TensorType("float32", (5, 3), (1, 5)),))
    at = graph.nodes.index(update)
    a, b = update.args[1], update.args[2]
    planted = replace(update, args=(update.args[0], Ref("view_of_other"), b, *update.args[3:]))
    text = complaint(replace(graph, nodes=(*graph.nodes[:at], view, planted, *graph.nodes[at + 1 :])))
    assert other in text and "while the step changes it" in text and a != planted.args[1]


def test_an_update_in_place_whose_result_is_used_elsewhere() -> None:
    graph = graph_of()
    update = next(n for n in graph.nodes if n.op == "tilework.updated_by_product.default")
    more = Node("more", "aten.neg.default", (Ref(update.name),), {}, update.types)
    assert "used elsewhere" in complaint(replace(graph, nodes=(*graph.nodes, more)))


def test_a_pass_that_breaks_a_rule_stops_the_compile(monkeypatch) -> None:
    def broken(programs):
        return {name: changed(g, "aten.tanh.default", op="aten.rand_like.default") for name, g in programs.items()}

    monkeypatch.setitem(planning.CHANGES, "products", broken)
    with pytest.raises(tilework.BugError, match="after pass products"):
        graph_of()


def test_a_read_after_a_write() -> None:
    """In the order in which code is generated."""
    mode = FakeTensorMode(static_shapes=True)
    fx = to_fx(graph_of(disable=("updates",)), mode).graph
    verify_order(fx, "step")
    stored = next(n for n in fx.nodes if n.target is torch.ops.aten.copy_.default and n.args[0].meta["val"].dim() == 2)
    with fx.inserting_after(stored):
        late = fx.call_function(torch.ops.aten.t.default, (stored.args[0],))
        late.meta["val"] = stored.args[0].meta["val"].t()
    with fx.inserting_after(late):
        fx.call_function(torch.ops.aten.neg.default, (late,))
    with pytest.raises(tilework.BugError, match="reads a buffer that was written before"):
        verify_order(fx, "step")


def test_generated_code_of_an_unknown_form() -> None:
    known = (
        "    auto buf2 = std::move(buf1);  // reuse\n    step_cpp_fused_add_0((float*)(buf2.data_ptr()));\n    buf2.reset();\n"
    )
    assert unknown_form(known) is None
    assert unknown_form(known + "    auto buf3 = borrow_somehow(buf2);\n") == "auto buf3 = borrow_somehow(buf2);"
