"""Our own operators and the passes that use them, against PyTorch: every stride, padding, dilation and group."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import tilework
from models import MODELS
from tilework.artifact.structure import flatten
from tilework.capture.capture import capture
from tilework.plan.convolutions import SMALL_BATCH

SHAPES = [
    # in, out, kernel, stride, padding, dilation, groups, (h, w)
    (3, 4, (3, 3), (1, 1), (0, 0), (1, 1), 1, (7, 6)),
    (4, 6, (3, 2), (2, 1), (1, 2), (1, 1), 2, (9, 5)),
    (2, 2, (5, 5), (1, 1), (4, 4), (1, 1), 1, (4, 4)),  # more padding than image
    (4, 4, (3, 3), (2, 3), (2, 1), (2, 2), 4, (11, 12)),
    (1, 8, (1, 1), (1, 1), (0, 0), (1, 1), 1, (5, 1)),
    (6, 3, (2, 5), (3, 2), (0, 3), (1, 2), 3, (8, 10)),
]


class Convolutions(nn.Module):
    """All shapes in one model: one native compile for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, k, s, p, d, g, bias=n % 2 == 0) for n, (i, o, k, s, p, d, g, _) in enumerate(SHAPES)
        )

    def forward(self, *images):
        return sum(conv(x).square().mean() for conv, x in zip(self.convs, images, strict=True))


def test_small_convolutions_of_every_shape(workshop) -> None:
    torch.manual_seed(0)
    model = Convolutions()
    images = tuple(torch.randn(3, s[0], *s[7], requires_grad=True) for s in SHAPES)
    step = tilework.Step(model=model, inputs=images, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    path = workshop / "convs.pef"
    tilework.compile(step, path, options=tilework.Options(opt_level=1, programs="sections"), weights="inside")
    text = tilework.read_artifact(path).graphs["bwd"].to_text()
    assert "small_conv_input_grad" in text and "small_conv_weight_grad" in text and "aten.convolution" not in text
    session = tilework.load(path)
    loss = session.run(*[i.detach() for i in images], sections=["fwd", "bwd"]).loss
    expected = model(*images)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    gradients = session.gradients()
    for name, p in model.named_parameters():
        assert torch.allclose(gradients[name], p.grad, rtol=1e-4, atol=1e-6), name
    for argument, image in zip(session.manifest.signature.inputs, images, strict=True):
        assert torch.allclose(gradients[f"input/{argument.name}"], image.grad, rtol=1e-4, atol=1e-6), argument.name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conv_bn", pytest.param("dropout", marks=pytest.mark.full)])
def test_a_pass_can_be_turned_off_and_changes_nothing(name: str, workshop) -> None:
    losses = []
    for off in ((), ("small_convolutions",), ("small_convolutions", "fuse"), ("products", "channels_last", "small_convolutions")):
        step = MODELS[name]()
        options = tilework.Options(device="cpu", opt_level=1, programs="all" if "fuse" in off else "fused", disable=off)
        path = workshop / f"{name}-{len(off)}.pef"
        tilework.compile(step, path, options=options, weights="inside")
        session = tilework.load(path)
        assert ("step" in session.manifest.programs) == ("fuse" not in off)
        text = "".join(g.to_text() for g in session.artifact.graphs.values())
        assert ("small_conv" in text) == (not off)
        assert ("tilework.product" in text) == ("products" not in off)
        inputs = [*flatten(step.inputs)[0], *flatten(step.targets)[0]]
        losses.append(torch.stack([session.run(*inputs).loss for _ in range(4)]))
    for a, b in itertools.combinations(losses, 2):
        assert torch.allclose(a, b, rtol=1e-5)


def test_large_convolutions_stay_with_the_library() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    for batch, small in ((SMALL_BATCH, True), (SMALL_BATCH + 1, False)):
        step = tilework.Step(model=model, inputs=(torch.randn(batch, 3, 8, 8),), loss=lambda out: out.sum(), targets=())
        graph = tilework.plan_step(step).programs["fwd"]
        assert any(n.op == "tilework.small_conv.default" for n in graph.nodes) == small
        assert any(n.op == "aten.convolution.default" for n in graph.nodes) != small


@pytest.mark.slow
def test_matrix_products_of_every_layout(workshop) -> None:
    """Transposed, sliced, broadcast and degenerate operands, float32 and float64, with and without a bias."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 5))
            self.b1, self.b2, self.b0 = (
                nn.Parameter(torch.randn(5)),
                nn.Parameter(torch.randn(4, 1)),
                nn.Parameter(torch.randn(1)),
            )

        def forward(self, x, cube):
            parts = [
                x @ self.w, x.t() @ x, x[:, ::2] @ self.w[::2], x[:1] @ self.w, x[:, :1] @ self.w[:1], x @ self.w[:, :1],
                torch.addmm(self.b1, x, self.w), torch.addmm(self.b2, x, self.w, beta=0.5, alpha=2),
                torch.addmm(self.b0, x, self.w),
                cube @ cube.transpose(1, 2), cube.transpose(0, 1) @ cube.permute(1, 2, 0), cube[:, :1] @ cube.mT[:, :, ::2],
                torch.bmm(cube.expand(3, 4, 6)[:, :, :1], cube[:, :1]), x.double() @ self.w.double(),
                self.w.t().contiguous().t() @ self.w.t(), x.expand(4, 6) @ self.w.flip(0),
            ]  # fmt: skip
            return sum(p.sin().mean().float() for p in parts)

    torch.manual_seed(0)
    model = Products()
    x, cube = torch.randn(4, 6, requires_grad=True), torch.randn(3, 4, 6, requires_grad=True)
    step = tilework.Step(model=model, inputs=(x, cube), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    tilework.compile(step, workshop / "mm.pef", options=tilework.Options(opt_level=1, programs="sections"), weights="inside")
    session = tilework.load(workshop / "mm.pef")
    loss = session.run(x.detach(), cube.detach(), sections=["fwd", "bwd"]).loss
    expected = model(x, cube)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-5, atol=1e-6)
    gradients = session.gradients()
    for name, p in [*model.named_parameters(), ("input/x", x), ("input/cube", cube)]:
        assert torch.allclose(gradients[name], p.grad, rtol=1e-4, atol=1e-5), name


class Pools(nn.Module):
    """Windows of every kind, on images of odd sizes, in both layouts. The square makes every gradient different."""

    WINDOWS = ((2, 2, 0), (3, 3, 1), ((2, 3), (2, 3), 0), (2, 3, 1), (1, 1, 0))

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *images):
        total = 0.0 * self.scale
        for image in images:
            for kernel, stride, padding in self.WINDOWS:
                total = total + (nn.functional.max_pool2d(image, kernel, stride, padding) ** 2).sum()
        return total


@pytest.mark.slow
def test_pooling_of_every_window_and_layout(workshop) -> None:
    torch.manual_seed(0)
    shapes = [(2, 3, 28, 28), (1, 16, 10, 9), (3, 5, 7, 13), (2, 33, 6, 8), (1, 2, 70, 66)]
    plain = [torch.randn(s).round(decimals=1) for s in shapes]  # rounded: windows with equal maxima, where the first one wins
    images = [t.clone().requires_grad_() for t in plain]
    step = tilework.Step(model=Pools(), inputs=tuple(images))
    path = workshop / "pools.pef"
    tilework.compile(step, path, options=tilework.Options(opt_level=1, programs="sections"), weights="inside")
    text = tilework.read_artifact(path).graphs["bwd"].to_text()
    assert "= tilework.max_pool_grad" in text and "= aten.max_pool2d" not in text
    session = tilework.load(path)
    loss = session.run(*plain, sections=["fwd", "bwd"]).loss
    expected = Pools()(*images)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    gradients = session.gradients()
    for argument, image in zip(session.manifest.signature.inputs, images, strict=True):
        assert torch.allclose(gradients[f"input/{argument.name}"], image.grad, rtol=1e-5, atol=1e-6), argument.name


def test_pooling_that_overlaps_or_wants_indices_is_left_alone() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            a = nn.functional.max_pool2d(x * self.scale, 3, 2)
            b, where = nn.functional.max_pool2d(x, 2, return_indices=True)
            return (a.sum() + b.square().sum()), where

    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    graph = capture(tilework.Step(model=Other(), inputs=(x,), loss=0)).sections["joint"]
    assert "tilework.max_pool" not in graph.to_text()


PRODUCTS = [(1, 7, 5), (1, 784, 10), (6, 1, 9), (9, 33, 1), (1, 1, 1), (5, 40, 17), (1, 130, 67), (64, 3, 2)]


class Products(nn.Module):
    """a @ b, with each operand as it is, turned round, and cut out of something larger."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *matrices):
        total = 0.0 * self.scale
        for a, b in zip(matrices[::2], matrices[1::2], strict=True):
            total = total + ((a @ b) ** 2).sum() + (a.t().contiguous().t() @ b).sin().sum()
            total = total + (a @ b.t().contiguous().t()).cos().sum() + (a[:, ::2] @ b[::2]).sum()
        return total


@pytest.mark.slow
def test_products_of_every_shape(workshop) -> None:
    torch.manual_seed(0)
    matrices = [m.requires_grad_() for m, k, n in PRODUCTS for m in (torch.randn(m, k), torch.randn(k, n))]
    step = tilework.Step(model=Products(), inputs=tuple(matrices))
    path = workshop / "products.pef"
    tilework.compile(step, path, options=tilework.Options(opt_level=1, programs="sections"), weights="inside")
    assert "tilework.product" in tilework.read_artifact(path).graphs["fwd"].to_text()
    session = tilework.load(path)
    loss = session.run(*[m.detach() for m in matrices], sections=["fwd", "bwd"]).loss
    expected = Products()(*matrices)
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-4)
    gradients = session.gradients()
    for argument, matrix in zip(session.manifest.signature.inputs, matrices, strict=True):
        assert torch.allclose(gradients[f"input/{argument.name}"], matrix.grad, rtol=1e-3, atol=1e-3), argument.name


def test_small_convolutions_of_many_images(workshop) -> None:
    """More than a group of images: partial sums of weight gradients, with a last group that is smaller."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 3, (5, 2)))
    x = torch.randn(19, 2, 9, 8)
    step = tilework.Step(model=model, inputs=(x,), loss=lambda out: out.square().mean(),
                         optimizer=torch.optim.SGD(model.parameters(), lr=0.1))  # fmt: skip
    path = workshop / "groups.pef"
    tilework.compile(step, path, options=tilework.Options(opt_level=1, programs="fused"), weights="inside")
    assert "small_conv_weight_grad" in tilework.read_artifact(path).graphs["step"].to_text()
    session = tilework.load(path)
    for _ in range(3):
        step.optimizer.zero_grad()
        expected = step.loss(model(x))
        expected.backward()
        step.optimizer.step()
        assert torch.allclose(session.run(x).loss, expected, rtol=1e-5)
    for name, p in model.state_dict().items():
        assert torch.allclose(session.state_dict()[name], p, rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_library_convolutions_get_weights_with_channels_last(workshop) -> None:
    """And the numbers stay the same: fused and section by section, with momentum, saved and loaded."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 40, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(1000, 4)]
    model = nn.Sequential(*first, *second)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 4, (16,))
    step = tilework.Step(model=model, inputs=(x,), targets=(y,), loss=nn.CrossEntropyLoss(),
                         optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))  # fmt: skip
    path = workshop / "last.pef"
    tilework.compile(step, path, options=tilework.Options(opt_level=1), weights="inside")
    fused, pieces = tilework.load(path), tilework.load(path)
    buffers = fused.manifest.buffers
    assert buffers["param/4.weight"].type().stride == (288, 1, 96, 32)
    assert buffers["state/4.weight/momentum_buffer"].type().stride == (288, 1, 96, 32)
    replay = tilework.load(path, device="reference")
    for _ in range(3):
        step.optimizer.zero_grad()
        expected = step.loss(model(x), y)
        expected.backward()
        step.optimizer.step()
        for session in (fused, replay):
            assert torch.allclose(session.run(x, y).loss, expected, rtol=1e-4)
        assert torch.allclose(pieces.run(x, y, sections=["fwd", "bwd", "opt"]).loss, expected, rtol=1e-4)
    fused.save(workshop / "last.safetensors")
    pieces.load(workshop / "last.safetensors")
    for name, p in model.state_dict().items():
        for session in (fused, pieces, replay):
            assert torch.allclose(session.state_dict()[name].float(), p.float(), rtol=1e-3, atol=1e-5), name


class WeightsInUse(nn.Module):
    """Weights that something else reads as well: another layer (tied), an output (the old value), the loss (a penalty)."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.tied, self.shown, self.square = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, y):
        h = torch.tanh(self.tied(torch.relu(self.plain(x))))
        h = self.square(self.shown(torch.tanh(nn.functional.linear(h, self.tied.weight))))
        return nn.functional.mse_loss(h, y) + 0.1 * self.square.weight.square().sum(), self.shown.weight * 1.0


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_updates_within_the_product(decay: float, workshop) -> None:
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    found = {}
    for off in ((), ("updates",)):
        torch.manual_seed(3)
        model = WeightsInUse()
        step = tilework.Step(
            model=model, inputs=(x, y), loss=0, optimizer=torch.optim.SGD(model.parameters(), 0.1, weight_decay=decay)
        )
        path = workshop / f"updates-{decay}-{len(off)}.pef"
        tilework.compile(step, path, options=tilework.Options(opt_level=1, disable=off), weights="inside")
        session = tilework.load(path)
        count = session.artifact.graphs["step"].to_text().count("updated_by_product")
        assert count == (0 if off else 2), "plain and shown; a tied weight's gradient is a sum, and so is one with a penalty"
        found[off] = [session.run(x, y) for _ in range(3)], session.state_dict()
    torch.manual_seed(3)
    model = WeightsInUse()
    opt = torch.optim.SGD(model.parameters(), 0.1, weight_decay=decay)
    for results in zip(*(r for r, _ in found.values()), strict=True):
        opt.zero_grad()
        loss, shown = model(x, y)
        for result in results:
            assert torch.allclose(result.loss, loss, rtol=1e-5) and torch.allclose(result.outputs[1], shown, atol=1e-6)
        loss.backward()
        opt.step()
    for _, state in found.values():
        for name, p in model.named_parameters():
            assert torch.allclose(state[name], p, rtol=1e-5, atol=1e-6), name
