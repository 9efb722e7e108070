"""LeNet on MNIST.

python lenet.py compile -b=1 --pef-name="lenet" --output-folder="pef"
python lenet.py test --pef="pef/lenet/lenet.pef"
python lenet.py run --pef="pef/lenet/lenet.pef"
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared import mnist_app


class LeNet(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU()
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, num_classes)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.pool(self.relu(self.conv1(image)))
        x = self.pool(self.relu(self.conv2(x)))
        x = x.reshape(x.shape[0], -1)
        out = self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))
        return self.criterion(out, label), out


def add_args(parser: argparse.ArgumentParser) -> None:
    mnist_app.add_optimizer_args(parser, lr=0.01, weight_decay=0.01)


if __name__ == "__main__":
    # In float32 a weight decay of 0.01 does act (in bfloat16 most of it is lost to rounding), and a batch of one is noisy: with a
    # learning rate that goes down to zero the last steps settle.
    mnist_app.main("lenet", lambda args: LeNet(args.num_classes), lambda args: (1, 28, 28), add_args, lr_schedule="linear")
