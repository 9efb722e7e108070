"""A decoder in the manner of Llama (Touvron et al., 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

tilework compile tilework.zoo.llama:build --set size=small -o out/llama.pef.   Sizes: tiny, small, 1b, full (7 B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..step import Step
from .common import chosen, examples, fitting
from .gpt import decayed
from .gpt import synthetic as synthetic  # sequences in which each token has two successors


@dataclass(frozen=True)
class Config:
    vocabulary: int = 32000
    length: int = 2048
    width: int = 4096
    hidden: int = 11008
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 32  # queries share keys and values where it is smaller than num_heads
    base: float = 10000.0  # of the rotary positions
    batch_size: int = 4


SIZES = {
    "tiny": Config(vocabulary=64, length=16, width=32, hidden=48, num_layers=2, num_heads=4, num_kv_heads=2, batch_size=4),
    "small": Config(vocabulary=256, length=128, width=256, hidden=688, num_layers=8, num_heads=8, num_kv_heads=2, batch_size=8),
    "1b": Config(width=2048, hidden=5632, num_layers=22, num_heads=32, num_kv_heads=4),
    "full": Config(),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        whole = x.float()
        return (whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: pairs of channels [first half, second half] are turned by an angle that grows with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.size = c.num_heads, c.num_kv_heads, c.width // c.num_heads
        self.q = nn.Linear(c.width, c.num_heads * self.size, bias=False)
        self.k = nn.Linear(c.width, c.num_kv_heads * self.size, bias=False)
        self.v = nn.Linear(c.width, c.num_kv_heads * self.size, bias=False)
        self.o = nn.Linear(c.num_heads * self.size, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, length, width = x.shape
        q = turned(self.q(x).view(n, length, self.heads, self.size).transpose(1, 2), cos, sin)
        k = turned(self.k(x).view(n, length, self.kv_heads, self.size).transpose(1, 2), cos, sin)
        v = self.v(x).view(n, length, self.kv_heads, self.size).transpose(1, 2)
        shared = self.heads // self.kv_heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.norm1, self.norm2 = RMSNorm(c.width), RMSNorm(c.width)
        self.attention = Attention(c)
        self.gate = nn.Linear(c.width, c.hidden, bias=False)
        self.up = nn.Linear(c.width, c.hidden, bias=False)
        self.down = nn.Linear(c.hidden, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        inner = self.norm2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.embedding = nn.Embedding(c.vocabulary, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.width)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False)
        size = c.width // c.num_heads
        angles = torch.outer(torch.arange(c.length).float(), c.base ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angles.cos(), persistent=False)  # [length, size / 2]
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # [n, length] each -> loss, logits
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


def build(size: str = "tiny", batch_size: int | None = None, lr: float = 3e-4, weight_decay: float = 0.1,
          precision: Any = "float32", **changes: Any) -> Step:  # fmt: skip
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = fitting(lambda: Llama(config))
    return Step(
        model=model,
        loss=0,
        optimizer=torch.optim.AdamW(decayed(model, weight_decay), lr=lr, betas=(0.9, 0.95)),
        inputs=synthetic(config, config.batch_size),
        clip_norm=1.0,
        precision=precision,
        examples=examples(size),
    )
