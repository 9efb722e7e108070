"""Models that nobody wrote: hypothesis builds them, eager PyTorch says what is right."""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tilework
from parity import SEED, batches, relative, train_eager

FULL = os.environ.get("TILEWORK_FULL") == "1"

ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Hardswish, nn.LeakyReLU, nn.Mish]
LAYERS = st.sampled_from(["linear", "activation", "norm", "dropout", "residual", "gate"])


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Gate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 2 * width)

    def forward(self, x):
        return F.glu(self.fc(x), dim=-1)


@st.composite
def recipes(draw: st.DrawFn) -> dict:
    return {
        "width": draw(st.integers(1, 9)),
        "batch": draw(st.integers(2, 6)),
        "layers": draw(st.lists(st.tuples(LAYERS, st.integers(0, 9)), min_size=1, max_size=6)),
        "conv": draw(st.booleans()),
        "kernel": draw(st.integers(1, 3)),
        "optimizer": draw(st.sampled_from(["sgd", "momentum", "adam"])),
        "loss": draw(st.sampled_from(["mse", "l1", "huber"])),
        "micro": draw(st.sampled_from([1, 1, 2])),
        "clip": draw(st.sampled_from([None, 0.5])),
    }


def make(r: dict) -> tilework.Step:
    torch.manual_seed(1)
    width, layers = r["width"], []
    if r["conv"]:
        layers += [
            nn.Conv2d(2, 3, r["kernel"], padding=1),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(12, width),
        ]
    for kind, number in r["layers"]:
        if kind == "linear":
            layers.append(nn.Linear(width, width, bias=number % 2 == 0))
        elif kind == "activation":
            layers.append(ACTIVATIONS[number]())
        elif kind == "norm":
            layers.append(nn.LayerNorm(width) if number % 2 else nn.BatchNorm1d(width))
        elif kind == "dropout":
            layers.append(nn.Dropout(number / 12))
        elif kind == "residual":
            layers.append(Residual(nn.Sequential(nn.Linear(width, width), ACTIVATIONS[number]())))
        else:
            layers.append(Gate(width))
    layers.append(nn.Linear(width, 2))
    model = nn.Sequential(*layers)
    shape = (r["batch"], 2, 5, 4) if r["conv"] else (r["batch"], width)
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-3),  # a large eps: well conditioned
    }[r["optimizer"]](model.parameters())
    loss = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}[r["loss"]]
    return tilework.Step(model=model, loss=loss, inputs=(torch.randn(shape),), targets=(torch.randn(r["batch"], 2),),
                         optimizer=optimizer, num_micro_batches=r["micro"], clip_norm=r["clip"])  # fmt: skip


def check(recipe: dict, device: str, path) -> None:
    step, twin = make(recipe), make(recipe)
    options = tilework.Options(device=device, opt_level=1, programs="fused")
    tilework.compile(step, path, options=options, weights="inside")
    session = tilework.load(path, seed=SEED)
    micro = recipe["micro"]
    data = batches(step, 4 * micro)
    expected = train_eager(twin, data).losses
    for i in range(4):
        group = data[i * micro : (i + 1) * micro]
        found = session.run(*[torch.cat(parts) for parts in zip(*group, strict=True)]).loss
        assert math.isfinite(float(found))
        assert relative(found, expected[i]) <= (1e-5 if i == 0 else 1e-3), f"loss of step {i + 1}"
    session.close()


@settings(max_examples=150 if FULL else 25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=not FULL)
@given(recipe=recipes())
def test_on_reference(recipe: dict, tmp_path_factory) -> None:
    check(recipe, "reference", tmp_path_factory.mktemp("h") / "m.pef")


@settings(max_examples=20 if FULL else 4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=not FULL)
@given(recipe=recipes())
def test_on_cpu(recipe: dict, tmp_path_factory) -> None:
    check(recipe, "cpu", tmp_path_factory.mktemp("h") / "m.pef")
