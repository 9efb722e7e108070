"""Logistic regression on MNIST.

python logreg.py compile --pef-name="logreg" --output-folder="pef"
python logreg.py test --pef="pef/logreg/logreg.pef"
python logreg.py run --pef="pef/logreg/logreg.pef"
python logreg.py measure-performance --pef="pef/logreg/logreg.pef"
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import sambaflow.samba.utils as utils

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared import mnist_app


class LogReg(nn.Module):
    def __init__(self, num_features: int, num_classes: int, weight_norm: bool) -> None:
        super().__init__()
        self.lin_layer = nn.Linear(num_features, num_classes)
        self.criterion = nn.CrossEntropyLoss()
        if weight_norm:
            utils.weight_norm_(self.lin_layer)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.lin_layer(image)
        return self.criterion(out, label), out


def add_args(parser: argparse.ArgumentParser) -> None:
    mnist_app.add_optimizer_args(parser, lr=0.001, weight_decay=1e-4)
    parser.add_argument("--num-features", type=int, default=784, help="pixels, padded with zeros (default: 784)")
    parser.add_argument("--weight-norm", action="store_true", help="weight normalisation")


if __name__ == "__main__":
    mnist_app.main(
        "logreg",
        lambda args: LogReg(args.num_features, args.num_classes, args.weight_norm),
        lambda args: (args.num_features,),
        add_args,
    )
