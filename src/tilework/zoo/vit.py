"""Vision transformer (Dosovitskiy et al., 2020), as a training step.

tilework compile tilework.zoo.vit:build --set size=small -o out/vit.pef
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..step import Step
from .common import chosen, examples
from .resnet import synthetic as synthetic  # stripes, the class is their direction and width


@dataclass(frozen=True)
class Config:
    image_size: int = 224
    patch_size: int = 16
    width: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_classes: int = 1000
    batch_size: int = 256


SIZES = {
    "tiny": Config(image_size=32, patch_size=8, width=32, num_layers=2, num_heads=2, num_classes=4, batch_size=8),
    "small": Config(image_size=64, patch_size=8, width=192, num_layers=6, num_heads=3, num_classes=10, batch_size=32),
    "full": Config(),  # ViT-B/16
}


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [n, patches + 1, width]
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width)
        x = x + self.proj(attended)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        num_patches = (c.image_size // c.patch_size) ** 2
        self.patches = nn.Conv2d(3, c.width, c.patch_size, stride=c.patch_size)
        self.cls = nn.Parameter(torch.zeros(1, 1, c.width))
        self.position = nn.Parameter(0.02 * torch.randn(1, num_patches + 1, c.width))
        self.blocks = nn.ModuleList(Block(c.width, c.num_heads) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.width, eps=1e-6)
        self.head = nn.Linear(c.width, c.num_classes)

    def forward(self, x: Tensor) -> Tensor:  # [n, 3, s, s] -> logits [n, num_classes]
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def build(size: str = "tiny", batch_size: int | None = None, lr: float = 1e-3, weight_decay: float = 0.05,
          precision: Any = "float32", **changes: Any) -> Step:  # fmt: skip
    config = chosen(SIZES, size, {"batch_size": batch_size, **changes})
    torch.manual_seed(0)
    model = ViT(config)
    images, labels = synthetic(config, config.batch_size)
    return Step(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay),
        inputs=(images,),
        targets=(labels,),
        clip_norm=1.0,
        precision=precision,
        examples=examples(size),
    )
