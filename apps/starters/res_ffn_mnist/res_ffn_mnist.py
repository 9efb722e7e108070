"""A feed-forward network with a residual connection, on MNIST.

python res_ffn_mnist.py compile -b 1 --pef-name="res_ffn_mnist" --output-folder="pef"
python res_ffn_mnist.py run -b 1 --pef="pef/res_ffn_mnist/res_ffn_mnist.pef"
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared import mnist_app


class ResFFNLogReg(nn.Module):
    def __init__(self, num_features: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.gemm1 = nn.Linear(num_features, hidden_size)
        self.gemm2 = nn.Linear(hidden_size, hidden_size)
        self.gemm3 = nn.Linear(hidden_size, num_classes)
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.tanh(self.norm1(self.gemm1(image)))
        second = torch.sigmoid(self.norm2(self.gemm2(first)) + first)
        out = self.gemm3(second)
        return self.criterion(out, label), out


def add_args(parser: argparse.ArgumentParser) -> None:
    mnist_app.add_optimizer_args(parser, lr=0.01, weight_decay=1e-4)
    parser.add_argument("--num-features", type=int, default=784, help="pixels, padded with zeros (default: 784)")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the hidden layers (default: 128)")


if __name__ == "__main__":
    mnist_app.main(
        "res_ffn_mnist",
        lambda args: ResFFNLogReg(args.num_features, args.hidden_size, args.num_classes),
        lambda args: (args.num_features,),
        add_args,
    )
