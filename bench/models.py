"""The models in PyTorch, and what each contender of a row starts from: the same weights, the same data.

Each model is an ordinary module that takes x; the loss is a function of its output and y. JAX has the same models in
models_jax.py, under the same names of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilework.zoo.lenet import LeNet

from .rows import Row, data_file

Loss = Callable[[Tensor, Tensor], Tensor]


class LogReg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:  # [n, 784]
        return self.linear(x)


class FFN(nn.Module):
    def __init__(self, hidden: int = 512, hidden2: int = 256) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, hidden)
        self.fc2 = nn.Linear(hidden, hidden2)
        self.fc3 = nn.Linear(hidden2, 10)

    def forward(self, x: Tensor) -> Tensor:  # [n, 784]
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Double(nn.Module):
    """3 x 3 convolution, batch norm and ReLU, twice. No bias before a batch norm: the norm would take it away again."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList(Double(i, o) for i, o in zip((3, *widths), widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))  # (256, 128), (128, 64), (64, 32)
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in pairs)
        self.after = nn.ModuleList(Double(2 * o, o) for _, o in pairs)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:  # [n, 3, 64, 64] -> class scores [n, 2, 64, 64]
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for level, (up, after) in enumerate(zip(self.up, self.after, strict=True)):
            x = after(torch.cat((kept[-2 - level], up(x)), dim=1))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [n, tokens, width]
        n, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [n, heads, tokens, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, tokens, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 4, width: int = 256, heads: int = 8, tokens: int = 128, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # token numbers [n, tokens] -> scores [n, tokens, vocabulary]
        h = self.embed(x) + self.position.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class LSTM(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layer = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # [n, 50, width] -> class scores [n, 10], from the last of 50 time steps
        return self.head(self.layer(x)[0][:, -1])


def token_loss(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def class_loss(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores, y)


MODELS: dict[str, tuple[Callable[..., nn.Module], Loss]] = {
    "logreg": (LogReg, class_loss),
    "ffn": (FFN, class_loss),
    "lenet": (LeNet, class_loss),
    "unet": (UNet, class_loss),
    "lstm": (LSTM, class_loss),
    "gpt": (GPT, token_loss),
}


def build(row: Row) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    make, loss = MODELS[row.model]
    return make(**row.sizes), loss


def optimizer_for(
    row: Row, parameters: Iterable[Tensor], lr: float | Tensor | None = None, **settings: Any
) -> torch.optim.Optimizer:
    lr = row.optimizer.lr if lr is None else lr
    if row.optimizer.kind == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, **settings)
    return torch.optim.SGD(parameters, lr=lr, momentum=row.optimizer.momentum, **settings)


def make_data(row: Row) -> tuple[Tensor, Tensor]:
    """Seeded noise with random labels: the speed of a step does not depend on what is in it."""
    g = torch.Generator().manual_seed(1)
    n = row.samples
    if row.model == "gpt":
        text = torch.randint(0, 1024, (n, 129), generator=g)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()  # the next token at each place
    if row.model == "unet":
        return torch.randn(n, 3, 64, 64, generator=g), torch.randint(0, 2, (n, 64, 64), generator=g)
    shape = {"lenet": (1, 28, 28), "lstm": (50, 256)}.get(row.model, (784,))
    return torch.randn(n, *shape, generator=g), torch.randint(0, 10, (n,), generator=g)


def write_data(row: Row, out: Path) -> None:
    model, _ = build(row)
    x, y = make_data(row)
    arrays = {"x": x.numpy(), "y": y.numpy()}
    arrays |= {f"param/{k}": p.detach().numpy() for k, p in model.named_parameters()}
    arrays |= {f"buffer/{k}": b.numpy() for k, b in model.named_buffers()}
    path = data_file(out, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=False, **arrays)


def read_data(row: Row, out: Path) -> tuple[nn.Module, Loss, Tensor, Tensor]:
    """The model with the row's initial weights, its loss, and all samples."""
    model, loss = build(row)
    with np.load(data_file(out, row)) as stored:
        arrays = {k: torch.from_numpy(stored[k].copy()) for k in stored.files}
    model.load_state_dict({k.split("/", 1)[1]: t for k, t in arrays.items() if "/" in k})
    return model, loss, arrays["x"], arrays["y"]
