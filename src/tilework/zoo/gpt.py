"""GPT-2 (Radford et al., 2019), as a training step.   tilework compile tilework.zoo.gpt:build --set size=small

Sizes: tiny, small (10 M parameters), gpt2 (124 M), medium (355 M), large (774 M), full (XL, 1.5 B), 13b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..step import Step
from .common import chosen, examples, fitting, generator


@dataclass(frozen=True)
class Config:
    vocabulary: int = 50257
    length: int = 1024  # tokens of a sequence
    width: int = 768
    num_layers: int = 12
    num_heads: int = 12
    dropout: float = 0.0
    batch_size: int = 8


SIZES = {
    "tiny": Config(vocabulary=64, length=16, width=32, num_layers=2, num_heads=2, batch_size=4),
    "small": Config(vocabulary=256, length=128, width=320, num_layers=8, num_heads=5, batch_size=8),  # 10 M parameters
    "gpt2": Config(),
    "medium": Config(width=1024, num_layers=24, num_heads=16),
    "large": Config(width=1280, num_layers=36, num_heads=20),
    "full": Config(vocabulary=50260, width=1600, num_layers=48, num_heads=25, batch_size=16),
    "13b": Config(width=5120, num_layers=40, num_heads=40, length=2048, batch_size=1),
}


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.num_heads, self.dropout = c.num_heads, c.dropout
        self.ln_1 = nn.LayerNorm(c.width)
        self.attn = nn.Linear(c.width, 3 * c.width)
        self.proj = nn.Linear(c.width, c.width)
        self.ln_2 = nn.LayerNorm(c.width)
        self.fc = nn.Linear(c.width, 4 * c.width)
        self.out = nn.Linear(4 * c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:  # [n, length, width]
        n, length, width = x.shape
        q, k, v = (
            part.view(n, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for part in self.attn(self.ln_1(x)).split(width, dim=2)
        )
        p = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p).transpose(1, 2).reshape(n, length, width)
        x = x + F.dropout(self.proj(attended), self.dropout, self.training)
        inner = F.gelu(self.fc(self.ln_2(x)), approximate="tanh")
        return x + F.dropout(self.out(inner), self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.wte = nn.Embedding(c.vocabulary, c.width)
        self.wpe = nn.Embedding(c.length, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.width)
        self.dropout = c.dropout
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                into_residual = name.endswith(("proj.weight", "out.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * c.num_layers) ** 0.5 if into_residual else 1))

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # [n, length] each -> loss, logits
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices and embeddings decay, biases and normalization do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def build(
    size: str = "tiny",
    batch_size: int | None = None,
    lr: float = 3e-4,
    weight_decay: float = 0.1,
    precision: Any = "float32",
    clip_norm: float | None = 1.0,
    **changes: Any,
) -> Step:
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = fitting(lambda: GPT(config))
    return Step(
        model=model,
        loss=0,
        optimizer=torch.optim.AdamW(decayed(model, weight_decay), lr=lr, betas=(0.9, 0.95)),
        inputs=synthetic(config, config.batch_size),
        clip_norm=clip_norm,
        precision=precision,
        examples=examples(size),
    )


def synthetic(config: Any, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences in which each token has 2 possible successors: a model that has learned them has a loss of ln 2 = 0.69.
    (tokens int64 [n, length], the same one later)"""
    whole = chain(config.vocabulary, config.length + 1, rows, seed)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


def chain(vocabulary: int, length: int, rows: int, seed: int) -> Tensor:
    g = generator(seed)
    followers = torch.randint(0, vocabulary, (vocabulary, 2), generator=generator(12345))  # the language: the same for all seeds
    tokens = torch.empty(rows, length, dtype=torch.int64)
    tokens[:, 0] = torch.randint(0, vocabulary, (rows,), generator=g)
    turns = torch.randint(0, 2, (rows, length), generator=g)
    for at in range(1, length):
        tokens[:, at] = followers[tokens[:, at - 1], turns[:, at]]
    return tokens
