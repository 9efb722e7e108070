"""A feed-forward network on MNIST.

python ffn_mnist.py compile -b 1 --pef-name="ffn_mnist" --mac-v2
python ffn_mnist.py run -b 1 -p out/ffn_mnist/ffn_mnist.pef
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared import mnist_app


class FFNLogReg(nn.Module):
    def __init__(self, num_features: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.gemm1 = nn.Linear(num_features, hidden_size, bias=False)
        self.norm = nn.LayerNorm(hidden_size)
        self.relu = nn.ReLU()
        self.gemm2 = nn.Linear(hidden_size, num_classes, bias=False)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.gemm2(self.relu(self.norm(self.gemm1(image))))
        return self.criterion(out, label), out


def add_args(parser: argparse.ArgumentParser) -> None:
    mnist_app.add_optimizer_args(parser, lr=0.001, weight_decay=1e-4)
    parser.add_argument("--num-features", type=int, default=784, help="pixels, padded with zeros (default: 784)")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the hidden layer (default: 128)")


if __name__ == "__main__":
    mnist_app.main(
        "ffn_mnist",
        lambda args: FFNLogReg(args.num_features, args.hidden_size, args.num_classes),
        lambda args: (args.num_features,),
        add_args,
    )
