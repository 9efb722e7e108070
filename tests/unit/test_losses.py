"""The joint graph for the losses, made from the one for any gradients, does what a trace of its own does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tilework
from models import MODELS
from tilework.artifact.graph import Graph
from tilework.capture import capture as capturing
from tilework.capture.losses import from_losses
from tilework.runtime.devices.reference import operator_named


def evaluate(graph: Graph, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from tilework.artifact.graph import Ref

    env: dict[str, object] = dict(given)

    def value(a: object) -> object:
        if isinstance(a, Ref):
            return env[a.name]
        if isinstance(a, (list, tuple)):
            return [value(v) for v in a]
        return a

    for node in graph.nodes:
        env[node.name] = operator_named(node.op)(*[value(a) for a in node.args], **{k: value(v) for k, v in node.kwargs.items()})
    return {buffer: env[v] for buffer, v in graph.writes}  # type: ignore[misc]


def buffers_for(graph: Graph) -> dict[str, torch.Tensor]:
    g, found = torch.Generator().manual_seed(2), {}
    for name in graph.reads:
        t = graph.types[name]
        dense = t.empty()
        found[name] = dense.copy_(torch.rand(t.shape, generator=g)) if dense.is_floating_point() else dense
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_same_as_a_trace_of_its_own(name: str) -> None:
    torch.manual_seed(0)
    derived = capturing.capture(MODELS[name]()).sections.get("joint")
    traced = capturing.capture(MODELS[name](), sections=False).sections.get("joint")
    assert (derived is None) == (traced is None)
    if derived is None or traced is None:
        return
    assert sorted(derived.reads) == sorted(traced.reads) and sorted(derived.written) == sorted(traced.written)
    assert sorted(n.op for n in derived.nodes) == sorted(n.op for n in traced.nodes)
    given = buffers_for(traced)
    a, b = evaluate(derived, given), evaluate(traced, given)
    for buffer in b:
        assert torch.equal(a[buffer].nan_to_num(7), b[buffer].nan_to_num(7)), buffer


class TwoOutputs(nn.Module):
    """The second output is differentiable and shares all but its own layer with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.body(x))
        return self.head(h).square().mean(), self.other(h)


def test_what_only_other_outputs_use_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    monkeypatch.setattr(capturing, "from_losses", lambda *a: answers.append(from_losses(*a)) or answers[-1])
    model = TwoOutputs()
    step = tilework.Step(model=model, inputs=(torch.randn(2, 3),), loss=0, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    joint = capturing.capture(step).sections["joint"]
    assert answers == [answers[0]] and answers[0] is not None
    assert not any("other" in b for b in joint.written) and "grad/body.weight" in joint.written


class Odd(torch.autograd.Function):
    """Two results, and a backward that zeros do not leave at zero."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):  # type: ignore[no-untyped-def]
        return a * 2 + (b + 1).cos()


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = Odd.apply(self.layer(x))
        return a.sum(), b


def test_a_backward_that_is_not_linear_is_traced() -> None:
    torch.manual_seed(0)
    model, x = OddModel(), torch.randn(2, 3)
    step = tilework.Step(model=model, inputs=(x,), loss=0, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    joint = capturing.capture(step).sections["joint"]
    weights = {f"param/{k}": p.detach() for k, p in model.named_parameters()}
    found = evaluate(joint, {**buffers_for(joint), **weights, "input/x": x})
    model(x)[0].backward()
    assert torch.allclose(found["grad/layer.weight"], model.layer.weight.grad)
