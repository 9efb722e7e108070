"""How the code that is generated for a GPU lays out pictures, and what it multiplies. Nothing runs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm

import tilework
from tilework.compiler.cuda import launches, losses, products, target

BUFFER = re.compile(r"(\w+) = empty_strided_cuda\(\(([\d, ]*)\), \(([\d, ]*)\), torch\.(\w+)\)")
CONVOLUTION = re.compile(r"convolution(?:_backward\.default)?\((\w+), (\w+)(?:, (\w+))?, ")


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> object:
    """The text of Inductor's function for a step."""
    for owner, name in ((misc_patterns, "_misc_patterns_init"), (fuse_attention, "_sfdp_init"), (pad_mm, "_pad_mm_init")):
        monkeypatch.setattr(owner, name, lambda *_, **__: None)  # which ask for a GPU
    monkeypatch.setattr(launches._Recorder, "record", lambda self, source: source)

    def generate(step: tilework.Step) -> str:
        plan = tilework.plan_step(step, options=tilework.Options(device="cuda", programs="fused"))
        return str(launches.launches(plan.programs["step"], target.target_for("sm_90")))

    return generate


def buffers(source: str) -> dict[str, tuple[list[int], list[int], str]]:
    numbers = [(m[1], m[2], m[3], m[4]) for m in BUFFER.finditer(source)]
    return {
        n: ([int(x) for x in a.split(",") if x.strip()], [int(x) for x in b.split(",") if x.strip()], t) for n, a, b, t in numbers
    }


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).flatten(1)


def pictures(precision: str) -> tilework.Step:
    torch.manual_seed(0)
    model = Pictures()
    return tilework.Step(model=model, inputs=(torch.randn(4, 3, 8, 8),), targets=(torch.randn(4, 24 * 36),), loss=nn.MSELoss(),
                         optimizer=torch.optim.SGD(model.parameters(), 0.1), precision=precision)  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(("precision", "together"), [("bfloat16", True), ("float32", False)])
def test_channels_lie_together_in_16_bits(generated: object, precision: str, together: bool) -> None:
    source = generated(pictures(precision))  # type: ignore[operator]
    made = buffers(source)
    lying = [made[name] for m in CONVOLUTION.finditer(source) for name in m.groups() if name in made and len(made[name][0]) == 4]
    assert len(lying) >= (6 if together else 1)
    assert all((stride[1] == 1) is together for _, stride, _ in lying), lying


def test_what_asks_how_tensors_lie_keeps_them(generated: object) -> None:
    class Strided(Pictures):
        def forward(self, x: Tensor) -> Tensor:
            h = self.second(self.norm(self.first(x)).relu())
            return h.as_strided((4, 24 * 36), (24 * 36, 1))

    step = pictures("bfloat16")
    model = Strided()
    strided = tilework.Step(model=model, inputs=step.inputs, targets=step.targets, loss=step.loss, precision="bfloat16",
                            optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    made = buffers(generated(strided))  # type: ignore[operator]
    together = {n: b for n, b in made.items() if len(b[0]) == 4 and b[0][2] > 1 and b[1][1] == 1}
    assert not together


class Attention(nn.Module):
    def __init__(self, head: int) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(16, 3 * 2 * head), head

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, self.head).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


SIZES = [(64, 64, "0", "cudnn"), (40, 64, "0", "flash"), (64, 256, "0", "flash"), (64, 64, "1", "flash")]


@pytest.mark.parametrize(("rows", "head", "strict", "whose"), SIZES)
def test_whose_attention(
    generated: object, monkeypatch: pytest.MonkeyPatch, rows: int, head: int, strict: str, whose: str
) -> None:
    monkeypatch.setenv("TILEWORK_DETERMINISTIC", strict)
    torch.manual_seed(0)
    model = Attention(head)
    step = tilework.Step(model=model, inputs=(torch.randn(2, rows, 16),), targets=(torch.randn(2, 2, rows, head),),
                         loss=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), 0.1), precision="bfloat16")  # fmt: skip
    source = generated(step)  # type: ignore[operator]
    other = {"cudnn": "flash", "flash": "cudnn"}[whose]
    assert f"_scaled_dot_product_{whose}_attention_backward" in source and f"_{other}_attention" not in source


def test_products_of_odd_sizes_are_padded(generated: object, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 77))
    step = tilework.Step(model=model, inputs=(torch.randn(16, 40),), targets=(torch.randint(0, 77, (16,)),), precision="bfloat16",
                         loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    widths = {}
    for large in (0, 1 << 30):
        monkeypatch.setattr(products, "_LARGE", large)
        widths[large] = {n for shape, _, kind in buffers(generated(step)).values() if kind == "bfloat16" for n in shape}  # type: ignore[operator]
    assert 128 in widths[0] and 128 not in widths[1 << 30]


def test_the_gradient_of_cross_entropy_comes_from_the_scores(generated: object, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2000)
    step = tilework.Step(model=model, inputs=(torch.randn(8, 6),), targets=(torch.randint(0, 2000, (8,)),),
                         loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), 0.1))  # fmt: skip
    sparse = "-1.0"  # the gradient of each row's logarithm, where its label is
    assert sparse not in generated(step)  # type: ignore[operator]
    monkeypatch.setattr(losses, "WRITTEN", {})
    assert sparse in generated(step)  # type: ignore[operator]
