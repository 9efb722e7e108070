"""Threads of a step on cpu: as many as pay, one alone where others want the cores, and the same bits either way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import tilework


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Mixed(nn.Module):
    """Products, sums over everything, normalisations, a recurrent layer and an embedding: loops of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 96)
        self.norm = nn.LayerNorm(96)
        self.layer = nn.LSTM(96, 128, batch_first=True)
        self.batch = nn.BatchNorm1d(128)
        self.head = nn.Linear(128, 300)

    def forward(self, tokens: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, _ = self.layer(self.norm(self.embedding(tokens)))
        x = self.batch(x.reshape(-1, 128))
        scores = self.head(x).log_softmax(-1)
        return -scores.gather(1, y.reshape(-1, 1)).mean() + scores.exp().var() + x.abs().sum() * 1e-4


def images() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1),
                         nn.Flatten(0))  # fmt: skip


def steps() -> dict[str, tilework.Step]:
    torch.manual_seed(0)
    mixed, pictures = Mixed(), images()
    tokens, labels = torch.randint(0, 50, (32, 12)), torch.randint(0, 300, (32, 12))
    return {
        "mixed": tilework.Step(
            model=mixed, inputs=(tokens, labels), loss=0, clip_norm=0.5,
            optimizer=torch.optim.AdamW(mixed.parameters(), 1e-3),
        ),
        "images": tilework.Step(
            model=pictures, inputs=(torch.randn(48, 3, 32, 32),), targets=(torch.rand(48),), loss=nn.MSELoss(),
            optimizer=torch.optim.SGD(pictures.parameters(), 1e-3, momentum=0.9),
        ),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "images"])
@pytest.mark.parametrize("count", [2, 3])
def test_one_thread_alone_has_the_bits_of_many(tmp_path: Path, name: str, count: int) -> None:
    step = steps()[name]
    with threads(count):
        tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(programs="fused"), weights="inside")
        found = []
        for alone in (0, count):
            with tilework.load(tmp_path / "m.pef") as session:
                session._device.driver.tilework_look_for_neighbours(0)
                assert any(p.parallel for p in session.manifest.programs.values())  # several threads pay for it
                for library in session._device.libraries.values():
                    library.tilework_alone(alone)
                losses = [session.run(*step.inputs, *step.targets).loss.item() for _ in range(3)]
                for library in session._device.libraries.values():
                    library.tilework_alone(0)
                found.append((losses, session.tensors()))
    (losses, tensors), (other_losses, others) = found
    assert losses == other_losses
    assert all(torch.equal(tensors[k], others[k]) for k in tensors)


BURN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def test_a_crowded_machine_is_noticed(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("needs two cores and a kernel that counts how long threads wait for one")
    step = steps()["images"]
    with threads(len(cores)):
        tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(programs="fused"), weights="inside")
        session = tilework.load(tmp_path / "m.pef")
        others = [subprocess.Popen([sys.executable, "-c", BURN, str(core)]) for core in cores for _ in range(2)]
        try:
            many = [t.repeat(20, *[1] * (t.dim() - 1)) for t in (*step.inputs, *step.targets)]
            crowded = False
            for _ in range(2000):  # it takes two looks of 10 ms, and gives all threads another try now and then
                session.run(*many, num_steps=20, outputs="loss")
                crowded = crowded or bool(session._device.driver.tilework_crowded())
                if crowded:
                    break
            assert crowded
        finally:
            for other in others:
                other.kill()
                other.wait()
        fixed = tilework.load(tmp_path / "m.pef", num_threads=len(cores))  # a number that was asked for is kept
        assert not fixed._device.driver.tilework_crowded()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_products_of_any_shape(tmp_path: Path, count: int) -> None:
    """Every shape takes another way through kernels/gemm.cpp or BLAS: edges of panels, few rows, deep sums, turned operands."""
    torch.manual_seed(count)
    shapes = [
        (4, 300, 129),
        (13, 64, 257),
        (14, 600, 33),
        (29, 17, 520),
        (64, 784, 10),
        (150, 40, 70),
        (141, 1030, 31),
        (33, 256, 1024),
    ]

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.randn(n, k) / k**0.5) for _, k, n in shapes])

        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for x, w in zip(inputs, self.weights, strict=True):
                total = total + (x @ w.t()).square().mean() + (x.t() @ (x @ w.t())).square().mean()
            return total

    model = Products()
    inputs = tuple(torch.randn(m, k) for m, k, _ in shapes)
    step = tilework.Step(model=model, inputs=inputs, loss=0, optimizer=torch.optim.SGD(model.parameters(), 1e-2))
    with threads(count):
        done = tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(programs="fused"), weights="inside")
        assert not done.verification.retreats
        session = tilework.load(tmp_path / "m.pef", num_threads=count)
        loss = session.run(*inputs).loss
    exact = Products().double()
    exact.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    wanted = exact(*(x.double() for x in inputs))
    wanted.backward()
    torch.testing.assert_close(loss.double(), wanted.detach(), rtol=1e-5, atol=0)
    after = session.state_dict()
    for name, parameter in exact.named_parameters():
        update = (parameter.detach() - after[name].double()) / 1e-2
        scale = parameter.grad.abs().max()
        # the update is the difference of two float32 numbers: what their rounding allows, and 1e-5 of the gradient
        allowed = 1e-5 * scale + 2e-7 * parameter.detach().abs().max() / 1e-2
        assert (update - parameter.grad).abs().max() < allowed, name
