"""BERT pre-training (Devlin et al., 2018): masked words, and whether the second part follows the first, as a training step.

tilework compile tilework.zoo.bert:build --set size=small -o out/bert.pef.   Sizes: tiny, small, base, full (large).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..step import Step
from .common import chosen, examples, fitting, generator
from .gpt import chain, decayed

IGNORED = -100  # label of a word that was not masked


@dataclass(frozen=True)
class Config:
    vocabulary: int = 30522
    length: int = 128
    width: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    dropout: float = 0.1
    batch_size: int = 256


SIZES = {
    "tiny": Config(vocabulary=32, length=16, width=32, num_layers=2, num_heads=2, dropout=0.0, batch_size=16),
    "small": Config(vocabulary=256, length=64, width=256, num_layers=4, num_heads=4, batch_size=16),
    "base": Config(width=768, num_layers=12, num_heads=12),
    "full": Config(),
}


class Layer(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.num_heads, self.dropout = c.num_heads, c.dropout
        self.query = nn.Linear(c.width, c.width)
        self.key = nn.Linear(c.width, c.width)
        self.value = nn.Linear(c.width, c.width)
        self.attended = nn.Linear(c.width, c.width)
        self.norm1 = nn.LayerNorm(c.width, eps=1e-12)
        self.intermediate = nn.Linear(c.width, 4 * c.width)
        self.output = nn.Linear(4 * c.width, c.width)
        self.norm2 = nn.LayerNorm(c.width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [n, length, width], [n, 1, 1, length] True where there is a word
        n, length, width = x.shape
        q, k, v = (
            part(x).view(n, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        p = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p).transpose(1, 2).reshape(n, length, width)
        x = self.norm1(x + F.dropout(self.attended(attended), self.dropout, self.training))
        inner = self.output(F.gelu(self.intermediate(x)))
        return self.norm2(x + F.dropout(inner, self.dropout, self.training))


class Bert(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.words = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Embedding(c.length, c.width)
        self.segments = nn.Embedding(2, c.width)
        self.norm = nn.LayerNorm(c.width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.pooler = nn.Linear(c.width, c.width)
        self.transform = nn.Linear(c.width, c.width)
        self.transform_norm = nn.LayerNorm(c.width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(c.vocabulary))
        self.follows = nn.Linear(c.width, 2)
        self.dropout = c.dropout
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, tokens: Tensor, segments: Tensor, mask: Tensor, labels: Tensor, follows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, segments, labels [n, length]; mask [n, length], 1 where there is a word; follows [n].
        -> loss, logits of words, logits of "follows"."""
        x = self.words(tokens) + self.segments(segments) + self.positions.weight
        x = F.dropout(self.norm(x), self.dropout, self.training)
        allowed = mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, allowed)
        words = F.linear(self.transform_norm(F.gelu(self.transform(x))), self.words.weight, self.bias)
        second = self.follows(torch.tanh(self.pooler(x[:, 0])))
        loss = F.cross_entropy(words.flatten(0, 1), labels.flatten(), ignore_index=IGNORED) + F.cross_entropy(second, follows)
        return loss, words, second


def build(size: str = "tiny", batch_size: int | None = None, lr: float = 1e-3, weight_decay: float = 0.01,
          precision: Any = "float32", **changes: Any) -> Step:  # fmt: skip
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = fitting(lambda: Bert(config))
    return Step(
        model=model,
        loss=0,
        optimizer=torch.optim.AdamW(decayed(model, weight_decay), lr=lr),
        inputs=synthetic(config, config.batch_size),
        clip_norm=1.0,
        precision=precision,
        examples=examples(size),
    )


CLS, SEP, MASK, SPECIAL = 0, 1, 2, 3


def synthetic(config: Config, rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    """[CLS] part [SEP] part: chains of words with two successors each, of which 15 % are masked. In half of the rows the second
    part goes on with the chain of the first."""
    c, g = config, generator(seed)
    half = (c.length - 2) // 2
    first = chain(c.vocabulary - SPECIAL, 2 * half, rows, seed) + SPECIAL
    other = chain(c.vocabulary - SPECIAL, half, rows, seed + 7919) + SPECIAL
    follows = torch.randint(0, 2, (rows,), generator=g)
    second = torch.where(follows.bool()[:, None], first[:, half:], other)
    tokens = torch.zeros(rows, c.length, dtype=torch.int64)
    tokens[:, 0], tokens[:, half + 1] = CLS, SEP
    tokens[:, 1 : half + 1], tokens[:, half + 2 : 2 * half + 2] = first[:, :half], second
    segments = (torch.arange(c.length) > half + 1).long().expand(rows, -1).contiguous()
    mask = (torch.arange(c.length) < 2 * half + 2).long().expand(rows, -1).contiguous()
    hidden = (torch.rand(tokens.shape, generator=g) < 0.15) & (tokens >= SPECIAL) & mask.bool()
    hidden[:, 1] = True  # at least one in a row: a loss over none is not a number
    labels = tokens.masked_fill(~hidden, IGNORED)
    return tokens.masked_fill(hidden, MASK), segments, mask, labels, follows
