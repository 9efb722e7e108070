"""Small models, each with something that a capture can get wrong. Every entry makes a fresh Step with the same weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import tilework
from tilework.optim import LAMB, AdamW, RMSprop

Make = Callable[..., tilework.Step]
MODELS: dict[str, Make] = {}

OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "sgd_dampened": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, dampening=0.3, maximize=False),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3, betas=(0.8, 0.99), weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.05, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9, momentum=0.5, centered=True),
    "lamb": lambda p: LAMB(p, lr=5e-3, weight_decay=0.01),
    "adamw_uncorrected": lambda p: AdamW(p, lr=2e-3, weight_decay=0.05, bias_correction=False),
    "rmsprop_tf": lambda p: RMSprop(p, lr=1e-3, alpha=0.9, momentum=0.5, weight_decay=0.01, use_tf_variant=True),
    "lamb_limited": lambda p: LAMB(p, lr=5e-3, weight_decay=0.01, bias_correction=False, max_weight_norm=0.7),
}


def model(name: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        MODELS[name] = make
        return make

    return register


def _seeded() -> torch.Generator:
    torch.manual_seed(7)
    return torch.Generator().manual_seed(11)


def _optimizer(model: nn.Module, optimizer: str):
    return OPTIMIZERS[optimizer](model.parameters())


@model("linear")
def linear(optimizer: str = "sgd", **kwargs) -> tilework.Step:
    """Loss inside forward."""
    g = _seeded()

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 5)

        def forward(self, x, y):
            out = self.fc(x)
            return F.cross_entropy(out, y), out

    m = Linear()
    inputs = (torch.randn(6, 12, generator=g), torch.randint(0, 5, (6,), generator=g))
    return tilework.Step(model=m, inputs=inputs, optimizer=_optimizer(m, optimizer), **kwargs)


@model("mlp")
def mlp(optimizer: str = "adam", **kwargs) -> tilework.Step:
    """A separate loss module, a frozen layer, and an input that wants a gradient."""
    g = _seeded()
    m = nn.Sequential(nn.Linear(10, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    m[2].requires_grad_(False)
    x = torch.randn(8, 10, generator=g).requires_grad_()
    y = torch.randint(0, 4, (8,), generator=g)
    opt = OPTIMIZERS[optimizer]([p for p in m.parameters() if p.requires_grad])
    return tilework.Step(model=m, loss=nn.CrossEntropyLoss(), inputs=(x,), targets=(y,), optimizer=opt, **kwargs)


@model("residual")
def residual(optimizer: str = "adamw", **kwargs) -> tilework.Step:
    """LayerNorm, residual sums, a 0-dim parameter, and a constant held as a plain attribute."""
    g = _seeded()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.fc1, self.fc2 = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)
            self.gate = nn.Parameter(torch.tensor(0.5))
            self.shift = torch.linspace(-1, 1, 12)  # not registered

        def forward(self, x):
            return x + self.gate * self.fc2(F.silu(self.fc1(self.norm(x)))) + 0.1 * self.shift

    m = nn.Sequential(Block(), Block(), nn.Linear(12, 1))
    x, y = torch.randn(5, 12, generator=g), torch.randn(5, 1, generator=g)
    return tilework.Step(model=m, loss=F.mse_loss, inputs=x, targets=y, optimizer=_optimizer(m, optimizer), **kwargs)


@model("conv_bn")
def conv_bn(optimizer: str = "sgd_nesterov", **kwargs) -> tilework.Step:
    """BatchNorm changes buffers in forward; strided and grouped convolutions; average and max pooling."""
    g = _seeded()

    class ConvBn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False), nn.BatchNorm2d(8)
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
            x = F.relu(self.bn2(self.conv2(x)))
            return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))

    m = ConvBn()
    x, y = torch.randn(4, 3, 12, 12, generator=g), torch.randint(0, 4, (4,), generator=g)
    return tilework.Step(model=m, loss=F.cross_entropy, inputs=(x,), targets=(y,), optimizer=_optimizer(m, optimizer), **kwargs)


@model("unet")
def unet(optimizer: str = "lamb", **kwargs) -> tilework.Step:
    """Down, up by transposed convolution and by interpolation, skip connections by concatenation."""
    g = _seeded()

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
            self.mix, self.out = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 1, 1)

        def forward(self, x):
            a = F.leaky_relu(self.down1(x), 0.1)
            b = F.leaky_relu(self.down2(F.max_pool2d(a, 2)), 0.1)
            c = F.leaky_relu(self.mix(torch.cat([a, self.up(b)], 1)), 0.1)
            d = F.interpolate(F.avg_pool2d(c, 2), scale_factor=2, mode="nearest")
            return self.out(torch.cat([c, d], 1))

    m = UNet()
    x = torch.randn(2, 1, 8, 8, generator=g)
    y = torch.randint(0, 2, (2, 1, 8, 8), generator=g).float()
    return tilework.Step(model=m, loss=F.binary_cross_entropy_with_logits, inputs=(x,), targets=(y,),
                         optimizer=_optimizer(m, optimizer), **kwargs)  # fmt: skip


@model("lstm")
def lstm(optimizer: str = "rmsprop", **kwargs) -> tilework.Step:
    g = _seeded()

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            out, (h, _) = self.rnn(x)
            return self.fc(h[-1]) + 0.1 * out.mean(1)[:, :3]

    m = Lstm()
    x, y = torch.randn(3, 5, 6, generator=g), torch.randint(0, 3, (3,), generator=g)
    return tilework.Step(model=m, loss=F.cross_entropy, inputs=(x,), targets=(y,), optimizer=_optimizer(m, optimizer), **kwargs)


@model("gru")
def gru(optimizer: str = "sgd_nesterov", **kwargs) -> tilework.Step:
    g = _seeded()

    class Gru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc = nn.GRU(4, 6, num_layers=2, bidirectional=True), nn.Linear(12, 2)

        def forward(self, x):
            return self.fc(self.rnn(x)[0]).mean(0)

    m = Gru()
    x, y = torch.randn(4, 3, 4, generator=g), torch.randn(3, 2, generator=g)
    return tilework.Step(model=m, loss=F.smooth_l1_loss, inputs=(x,), targets=(y,), batch_dim=None,
                         optimizer=_optimizer(m, optimizer), **kwargs)  # fmt: skip


@model("attention")
def attention(optimizer: str = "sgd_nesterov", **kwargs) -> tilework.Step:
    """Causal self-attention, inputs as a dict with a mask, None among the keyword arguments."""
    g = _seeded()

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mha = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

        def forward(self, tokens, mask, bias=None):
            x = self.embed(tokens)
            y, _ = self.mha(x, x, x, attn_mask=mask, need_weights=False)
            x = self.norm(x + y)
            if bias is not None:
                x = x + bias
            return {"logits": self.head(x), "hidden": [x, None]}

    m = Attention()
    tokens = torch.randint(0, 11, (2, 6), generator=g)
    mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
    targets = torch.randint(0, 11, (2, 6), generator=g)
    return tilework.Step(
        model=m,
        loss=lambda out, t: F.cross_entropy(out["logits"].flatten(0, 1), t.flatten()),
        inputs={"tokens": tokens, "mask": mask, "bias": None}, targets=(targets,),
        optimizer=_optimizer(m, optimizer), **kwargs,
    )  # fmt: skip


@model("tied")
def tied(optimizer: str = "adam", **kwargs) -> tilework.Step:
    """The embedding is also the output layer; a sub-module is reached through a closure, another sits in a plain list."""
    g = _seeded()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mid, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
            self.head.weight = self.embed.weight
            mid = self.mid
            self.through = lambda t: torch.tanh(mid(t))

        def forward(self, tokens):
            return self.head(self.through(self.embed(tokens)))

    m = Tied()
    tokens, targets = torch.randint(0, 9, (4, 3), generator=g), torch.randint(0, 9, (4, 3), generator=g)
    return tilework.Step(model=m, loss=lambda out, t: F.cross_entropy(out.flatten(0, 1), t.flatten()), inputs=(tokens,),
                         targets=(targets,), optimizer=_optimizer(m, optimizer), **kwargs)  # fmt: skip


@model("hidden")
def hidden(optimizer: str = "sgd_nesterov", **kwargs) -> tilework.Step:
    """Layers in a plain list and a parameter tensor in a closure: the optimizer trains them, named_parameters() is blind."""
    g = _seeded()

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 6)
            self.layers = [nn.Linear(6, 6), {"last": nn.Linear(6, 2)}]
            scale = nn.Parameter(torch.ones(6))
            self.scaled = lambda t: t * scale
            self.stray = [*self.layers[0].parameters(), *self.layers[1]["last"].parameters(), scale]

        def forward(self, x):
            return self.layers[1]["last"](self.scaled(torch.tanh(self.layers[0](self.first(x)))))

    m = Hidden()
    stray, m.stray = m.stray, None
    x, y = torch.randn(4, 5, generator=g), torch.randn(4, 2, generator=g)
    return tilework.Step(model=m, loss=F.mse_loss, inputs=(x,), targets=(y,),
                         optimizer=OPTIMIZERS[optimizer]([*m.parameters(), *stray]), **kwargs)  # fmt: skip


@model("dropout")
def dropout(optimizer: str = "sgd", **kwargs) -> tilework.Step:
    """Three kinds of dropout, and noise added to the input."""
    g = _seeded()

    class Dropout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.drop2d = nn.Conv2d(1, 4, 3), nn.Dropout2d(0.25)
            self.drop, self.fc1, self.fc2 = nn.Dropout(0.4), nn.Linear(4 * 36, 16), nn.Linear(16, 3)

        def forward(self, x):
            x = x + 0.1 * torch.randn_like(x)
            x = self.drop2d(torch.relu(self.conv(x))).flatten(1)
            x = F.dropout(torch.tanh(self.fc1(self.drop(x))), 0.1, self.training)
            return self.fc2(x)

    m = Dropout()
    x, y = torch.randn(4, 1, 8, 8, generator=g), torch.randint(0, 3, (4,), generator=g)
    return tilework.Step(model=m, loss=F.cross_entropy, inputs=(x,), targets=(y,), optimizer=_optimizer(m, optimizer), **kwargs)


@model("multi_output")
def multi_output(optimizer: str = "adamw", **kwargs) -> tilework.Step:
    """Two losses among nested outputs; both count. One output takes part in no loss."""
    g = _seeded()

    class Multi(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(7, 10), nn.Linear(10, 3), nn.Linear(10, 1)

        def forward(self, x, label, value):
            h = torch.sigmoid(self.trunk(x))
            a, b = self.a(h), self.b(h)
            return {"loss": (F.cross_entropy(a, label), F.mse_loss(b, value)), "out": [a, (b, None)], "extra": a * 2}

    m = Multi()
    inputs = [torch.randn(5, 7, generator=g), torch.randint(0, 3, (5,), generator=g), torch.randn(5, 1, generator=g)]
    return tilework.Step(model=m, loss=["loss.0", "loss.1"], inputs=inputs, optimizer=_optimizer(m, optimizer), **kwargs)


@model("multi_optimizer")
def multi_optimizer(optimizer: str = "sgd", **kwargs) -> tilework.Step:
    """Two optimizers, one of them with two parameter groups of different learning rates."""
    g = _seeded()
    m = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 2))
    groups = [{"params": list(m[0].parameters()), "lr": 0.1}, {"params": list(m[2].parameters()), "weight_decay": 0.1}]
    opts = [torch.optim.SGD(groups, lr=0.01, momentum=0.5), OPTIMIZERS[optimizer](m[4].parameters())]
    x, y = torch.randn(4, 6, generator=g), torch.randn(4, 2, generator=g)
    return tilework.Step(model=m, loss=F.l1_loss, inputs=(x,), targets=(y,), optimizer=opts, **kwargs)


@model("per_element")
def per_element(optimizer: str = "adam", **kwargs) -> tilework.Step:
    """The loss keeps one value an element; backward starts from ones."""
    g = _seeded()

    class PerElement(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 7)

        def forward(self, x, y):
            logits = self.fc(x)
            return F.cross_entropy(logits, y, reduction="none"), logits

    m = PerElement()
    inputs = (torch.randn(6, 5, generator=g), torch.randint(0, 7, (6,), generator=g))
    return tilework.Step(model=m, inputs=inputs, loss=0, optimizer=_optimizer(m, optimizer), **kwargs)


@model("clipped")
def clipped(optimizer: str = "sgd_dampened", **kwargs) -> tilework.Step:
    """Gradient clipping by value and by global norm, in that order."""
    g = _seeded()
    m = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    x, y = 5 * torch.randn(6, 6, generator=g), torch.randn(6, 3, generator=g)
    return tilework.Step(model=m, loss=nn.MSELoss(reduction="sum"), inputs=(x,), targets=(y,), clip_norm=0.7, clip_value=0.3,
                         optimizer=_optimizer(m, optimizer), **kwargs)  # fmt: skip


@model("stateful")
def stateful(optimizer: str = "sgd", **kwargs) -> tilework.Step:
    """Buffers that forward re-assigns, and others that it changes in place."""
    g = _seeded()

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            self.count += 1
            return self.fc(x - self.mean) / (1 + 0.01 * self.count)

    m = Stateful()
    x, y = torch.randn(5, 4, generator=g), torch.randn(5, 4, generator=g)
    return tilework.Step(model=m, loss=F.mse_loss, inputs=(x,), targets=(y,), optimizer=_optimizer(m, optimizer), **kwargs)


@model("accumulated")
def accumulated(optimizer: str = "adam", **kwargs) -> tilework.Step:
    """Three micro-batches to one update, with BatchNorm and dropout in each."""
    g = _seeded()
    m = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    x, y = torch.randn(4, 6, generator=g), torch.randint(0, 3, (4,), generator=g)
    return tilework.Step(model=m, loss=F.cross_entropy, inputs=(x,), targets=(y,), num_micro_batches=3,
                         optimizer=_optimizer(m, optimizer), **kwargs)  # fmt: skip
