"""What only a GPU's programs do: pictures with their channels together, padded products, products with TF32."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework

pytestmark = pytest.mark.gpu


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.down, self.up = nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ConvTranspose2d(24, 16, 2, stride=2)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm(self.first(x)).relu()
        b = self.up(torch.nn.functional.max_pool2d(self.down(a), 1).relu())
        return self.last(torch.cat([a, b], 1).mean((2, 3)).flatten(1))


class Words(nn.Module):
    """As many words, and as wide, as no unit of the GPU likes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixed, self.scores = nn.Embedding(77, 24), nn.Linear(24, 29), nn.Linear(29, 77)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.mixed(self.words(x)).relu()).flatten(0, 1)


def trained(model: nn.Module, x: Tensor, y: Tensor, path: Path) -> tuple[list[float], list[float], float]:
    """Losses of ours, of eager PyTorch with autocast on the GPU, and how far the weights are apart, as a part of their change."""
    torch.manual_seed(1)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    loss = nn.CrossEntropyLoss(ignore_index=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    tilework.compile(tilework.Step(model=model, inputs=(x,), targets=(y,), loss=loss, optimizer=optimizer, precision="bfloat16"),
                     path, options=tilework.Options(device="cuda", programs="fused"))  # fmt: skip
    with tilework.load(path) as session:
        ours = [float(session.run(x, y).loss) for _ in range(4)]
        found = session.state_dict()
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    theirs = []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(model(x.cuda()), y.cuda())
        value.backward()
        optimizer.step()
        theirs.append(float(value.detach()))
    apart = max(
        float((found[k].float().cpu() - p.detach().cpu()).norm() / (p.detach().cpu() - before[k]).norm().clamp(min=1e-6))
        for k, p in model.named_parameters()
    )
    return ours, theirs, apart


def calls(path: Path) -> list[dict[str, Any]]:
    with zipfile.ZipFile(path) as file:
        return [s for s in json.loads(file.read("native/step.plan"))["steps"] if "call" in s]


def test_channels_lie_together(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))
    ours, theirs, apart = trained(Pictures(), x, y, tmp_path / "pictures.pef")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-2, atol=2e-2)
    assert apart < 0.1
    convolutions = [s for s in calls(tmp_path / "pictures.pef") if "convolution" in s["call"]]
    assert len(convolutions) == 6
    for step in convolutions:
        pictures = [a["tensor"] for a in step["args"] if isinstance(a, dict) and len(a.get("tensor", {}).get("shape", ())) == 4]
        assert all(p["stride"][1] == 1 for p in pictures), step


def test_products_are_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilework.compiler.cuda import products

    monkeypatch.setattr(products, "_LARGE", 0)
    monkeypatch.setenv("TILEWORK_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    x = torch.randint(0, 77, (4, 9))
    ours, theirs, apart = trained(Words(), x, x.flatten().roll(1), tmp_path / "words.pef")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-2, atol=2e-2)
    assert apart < 0.1
    sizes = {n for s in calls(tmp_path / "words.pef") if "mm" in s["call"] for a in s["args"] for n in a["tensor"]["shape"]}
    assert {64, 128} <= sizes and not sizes & {29, 77}


def test_conjugates(tmp_path: Path) -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :5], self.w).abs().square().mean()

    torch.manual_seed(0)
    x = torch.randn(2, 3, 12)
    model = Spectrum()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    step = tilework.Step(model=model, inputs=(x,), optimizer=optimizer)
    tilework.compile(step, tmp_path / "s.pef", options=tilework.Options(device="cuda", programs="fused"))
    with tilework.load(tmp_path / "s.pef") as session:
        ours = [float(session.run(x).loss) for _ in range(3)]
    theirs = []
    for _ in range(3):
        optimizer.zero_grad()
        value = model(x)
        value.backward()
        optimizer.step()
        theirs.append(float(value.detach()))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)


def test_products_with_tf32_pass_the_check(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    step = tilework.Step(model=model, inputs=(torch.randn(128, 784),), targets=(torch.randint(0, 10, (128,)),),
                         loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    made = tilework.compile(step, tmp_path / "t.pef", options=tilework.Options(device="cuda", programs="fused", tf32=True))
    assert made.verification.compared


def test_a_long_loop_is_several_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilework.runtime.cuda import whole

    torch.manual_seed(0)
    model = nn.Linear(12, 5)
    step = tilework.Step(model=model, inputs=(torch.randn(3, 12),), targets=(torch.randint(0, 5, (3,)),),
                         loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    tilework.compile(step, tmp_path / "l.pef", options=tilework.Options(device="cuda", programs="fused"))
    x, y = torch.randn(21, 12), torch.randint(0, 5, (21,))
    found = []
    for longest in (whole.LONGEST, 1.0):
        monkeypatch.setattr(whole, "LONGEST", longest)
        with tilework.load(tmp_path / "l.pef") as session:
            losses = session.run(x, y, num_steps=7).losses
            assert session._device._whole, "not one kernel"  # type: ignore[attr-defined]
            found.append(
                (losses.cpu(), session.run(x, y, num_steps=7, outputs="last").losses.cpu(), session.state_dict()["weight"].cpu())
            )
    for one, several in zip(*found, strict=True):
        assert torch.equal(one, several)
