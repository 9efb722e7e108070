"""What programs may do here and plain torch refuses, function by function: on the host, and in a PEF."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import tilework
from sambaflow import samba
from sambaflow.samba.graph import FwdGraph
from sambaflow.samba.utils import trace_multigraph

X = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
P = X.sigmoid()
SQUARE = (X[0], X[1])
PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (F.linear, (X, X[0], X[0, 0])),
    "conv1d": (F.conv1d, (X, X)),
    "conv2d": (F.conv2d, (X[None], X[:, :, None, :2].expand(2, 4, 2, 2)[:, :2])),
    "conv3d": (F.conv3d, (X[None, None], X[None, None, :1, :2, :2])),
    "conv_transpose1d": (F.conv_transpose1d, (X, X.transpose(0, 1).reshape(4, 2, 4))),
    "conv_transpose2d": (F.conv_transpose2d, (X[None], X[:, :2, None, :2].reshape(2, 1, 2, 2))),
    "conv_transpose3d": (F.conv_transpose3d, (X[None, None], X[None, None, :1, :2, :2])),
    "matmul": (torch.matmul, (X, X[0])),
    "at": (lambda a, b: a @ b, (X, X[0])),
    "mm": (torch.mm, SQUARE),
    "method": (lambda a, b: a.mm(b), SQUARE),
    "bmm": (torch.bmm, (X, X)),
    "mv": (torch.mv, (X[0], X[0, 0])),
    "addmm": (torch.addmm, (X[0, 0], *SQUARE)),
    "baddbmm": (torch.baddbmm, (X, X, X)),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bik", a, b), (X, X[0])),
    "attention": (F.scaled_dot_product_attention, (X, X, X)),
    "mse": (F.mse_loss, (X, P)),
    "l1": (F.l1_loss, (X, P)),
    "smooth_l1": (F.smooth_l1_loss, (X, P)),
    "huber": (F.huber_loss, (X, P)),
    "bce": (F.binary_cross_entropy, (P, P.flip(0))),
    "bce_logits": (F.binary_cross_entropy_with_logits, (X, P)),
    "kl_div": (F.kl_div, (P.log(), P.flip(0))),
    "poisson": (F.poisson_nll_loss, (X, P)),
    "probabilities": (F.cross_entropy, (X[0], P[0])),
    "class weights": (lambda a, w: F.cross_entropy(a, torch.tensor([0, 1, 2, 3]), w.detach()) + w.sum(), (X[0], P[0, 0])),
    "nll weights": (lambda a, w: F.nll_loss(a, torch.tensor([0, 1, 2, 3]), weight=w.detach()) + w.sum(), (X[0], P[0, 0])),
    "cosine": (lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(4)), SQUARE),
}


class Calls(nn.Module):
    """One function of two or three tensors; the first is an input in half the width, the others are float32 parameters."""

    def __init__(self, function: Callable[..., Tensor], rest: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.function, self.rest = function, nn.ParameterList([nn.Parameter(t.clone()) for t in rest])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.rest)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_of_different_types(name: str, half: torch.dtype) -> None:
    function, (first, *rest) = PRODUCTS[name]
    model = Calls(function, tuple(rest))
    plain = copy.deepcopy(model)
    samba.from_torch_model_(model)
    found, expected = model(first.to(half)), plain(first.to(half).float())
    assert isinstance(found, samba.SambaTensor) and found.dtype == torch.float32
    torch.testing.assert_close(found.torch(), expected)
    found.sum().backward()
    expected.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_all_of_them_in_a_pef() -> None:
    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Calls(f, tuple(rest)) for f, (_, *rest) in PRODUCTS.values()])

        def forward(self, *firsts: Tensor) -> Tensor:
            return torch.stack([part(x).float().sum() for part, x in zip(self.parts, firsts, strict=True)])

    model = All()
    plain = copy.deepcopy(model)
    samba.from_torch_model_(model)
    given = [first.bfloat16().contiguous() for _, (first, *_) in PRODUCTS.values()]
    inputs = tuple(samba.from_torch_tensor(g, name=f"x{i}") for i, g in enumerate(given))
    samba.utils.trace_graph(model, inputs, samba.optim.SGD(model.parameters(), lr=0.1))
    (found,) = samba.session.run(given, section_types=["fwd", "bckwd"], grad_of_outputs=[torch.ones(len(given))])
    expected = plain(*[g.float() for g in given])
    torch.testing.assert_close(found.torch(), expected.detach(), rtol=1e-4, atol=1e-5)
    expected.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.sn_grad, q.grad, rtol=1e-4, atol=1e-5)


def test_parts_that_run_again_in_the_backward_pass() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(self.fc(t)), x, use_reentrant=False).sum()

    model = Again()
    samba.from_torch_model_(model)
    x = X[0].bfloat16()
    samba.utils.trace_graph(model, (samba.from_torch_tensor(x, name="x"),), samba.optim.SGD(model.parameters(), lr=0.1))
    (found,) = samba.session.run([x], section_types=["fwd", "bckwd"])
    expected = torch.tanh(F.linear(x.float(), model.fc.weight, model.fc.bias)).sum()
    expected.backward()
    torch.testing.assert_close(found.torch(), expected.detach())
    torch.testing.assert_close(model.fc.weight.sn_grad, model.fc.weight.grad)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
            rows = i[:, None]
            subscript = x[i.long()] if dtype == torch.uint8 else x[i]  # a mask in torch
            return (F.embedding(i, x), x.gather(1, rows), x.index_select(0, i), subscript, F.one_hot(i, 4),
                    x.scatter(1, rows, x), x.index_add(0, i, x), torch.take_along_dim(x, rows, 1), F.cross_entropy(x, i),
                    F.nll_loss(x, target=i), F.multi_margin_loss(x, i))  # fmt: skip

    model = Looks()
    expected = model(X[0], torch.tensor([3, 0, 2, 2]))
    samba.from_torch_model_(model)
    for a, b in zip(model(X[0], torch.tensor([3, 0, 2, 2], dtype=dtype)), expected, strict=True):
        assert torch.equal(a.torch(), b)


def test_nothing_of_it_is_left_outside() -> None:
    """After forward, also after one that fails; and in other threads."""
    x, w = X[0].bfloat16(), X[1]

    class Inside(nn.Module):
        def forward(self, fails: bool) -> Tensor:
            def other() -> None:
                try:
                    F.linear(x, w)
                except RuntimeError as e:
                    raised.append(e)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            if fails:
                raise ValueError("on purpose")
            return F.linear(x, w)

    raised: list[Exception] = []
    model = Inside()
    samba.from_torch_model_(samba.from_torch_model_(model))
    assert model(False).dtype == torch.float32 and len(raised) == 1
    with pytest.raises(ValueError, match="on purpose"):
        model(True)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, w)
    assert not torch.overrides._get_current_function_mode_stack()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def test_graphs_that_share_storage_are_refused() -> None:
    model = Net()
    samba.from_torch_model_(model)
    x = samba.randn(2, 4, name="x")
    out = trace_multigraph(model, (x,), trace_prefix="a")
    x.sn_region_name = out.sn_region_name = "cache"
    with pytest.raises(tilework.UserError, match="region 'cache'"):
        samba.session.add_graph(FwdGraph((x,), out, name="a"))
    with pytest.raises(tilework.UserError, match="not traced"):
        samba.session.add_graph(FwdGraph((x,), samba.randn(2, 4), name="b"))
    out.sn_region_name = None
    samba.session.add_graph(FwdGraph((x,), out, name="a"))
    with pytest.raises(tilework.UserError, match="that train"):
        samba.session.compile_multigraph(name="m", inference=False)


def test_graphs_of_the_same_shape_are_told_apart_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, twice: bool = False) -> tuple[Tensor, Tensor]:
            out = self.fc(x)
            return (self.fc(out) if twice else out), x * 2

    model = Two()
    samba.from_torch_model_(model)
    x = samba.randn(2, 4, name="x")
    for name, call in (("once", (x,)), ("twice", (x, True))):
        outputs = trace_multigraph(model, call, trace_prefix=name)
        samba.session.add_graph(FwdGraph(call, outputs[0], name=name))
    samba.session.compile_multigraph(name="m")
    samba.session.init_multigraph_runtime()
    given = torch.randn(2, 4)
    for name, twice in (("once", False), ("twice", True)):
        (found,) = samba.session.run([given], graph_name=name)
        torch.testing.assert_close(found.torch(), model(given, twice)[0].torch())
    with pytest.raises(tilework.UserError, match="no graph 'thrice'"):
        samba.session.run([given], graph_name="thrice")
    with torch.no_grad():
        model.fc.weight.zero_()
    samba.session.to_device(model)
    assert torch.equal(samba.session.run([given], graph_name="twice")[0].torch(), model.fc.bias.detach().expand(2, 4))


def test_integers_that_do_not_fit() -> None:
    class Labels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(8, 4)

        def forward(self, i: Tensor) -> Tensor:
            return self.e(i).sum()

    model = Labels()
    samba.from_torch_model_(model)
    inputs = (samba.randint(8, (3,), name="i").short(),)
    samba.utils.trace_graph(model, inputs, samba.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(tilework.UserError, match="cannot hold"):
        samba.session.run([torch.tensor([0, 1, 2**16 + 1])])  # 1 in 16 bits
