"""A small convolutional network on MNIST, with 50 updates in each call.

python mnist_poptorch.py
python mnist_poptorch.py --batch-size 8 --device-iterations 50 --epochs 10 --data-path DIR
srun --ipus=1 python mnist_poptorch.py
"""

import argparse

import torch
from torch import nn
from tqdm import tqdm

import poptorch
from tilework.zoo import digits


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, kernel_size=3)
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.pool(self.conv(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2 = Block(1, 32), Block(32, 64)
        self.layer3, self.layer3_act, self.layer3_dropout = nn.Linear(1600, 128), nn.ReLU(), nn.Dropout(0.5)
        self.layer4, self.softmax = nn.Linear(128, 10), nn.Softmax(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(x)).flatten(1)
        x = self.layer4(self.layer3_dropout(self.layer3_act(self.layer3(x))))
        return x if self.training else self.softmax(x)


class TrainingModelWithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.model(x)
        return output, self.loss(output, labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device-iterations", type=int, default=50)
    parser.add_argument("--test-batch-size", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--data-path", help="a folder with the full MNIST files; by default the digits that Tilework carries")
    args = parser.parse_args()

    options = poptorch.Options().randomSeed(1)
    options.deviceIterations(args.device_iterations)
    train = torch.utils.data.TensorDataset(*digits.load("train", args.data_path))
    test = torch.utils.data.TensorDataset(*digits.load("test", args.data_path))
    loader = poptorch.DataLoader(options, train, batch_size=args.batch_size, shuffle=True, mode=poptorch.DataLoaderMode.Async)

    model = TrainingModelWithLoss(Network()).train()
    print(model)
    training_model = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=args.lr))
    for _ in tqdm(range(args.epochs), desc="Epochs"):
        for x, labels in loader:
            training_model(x, labels)
    training_model.detachFromDevice()
    loader.terminate()

    model.model.eval()
    inference_model = poptorch.inferenceModel(model.model)
    test_loader = poptorch.DataLoader(inference_model.options, test, batch_size=args.test_batch_size)
    correct = total = 0
    for x, labels in test_loader:
        correct += int((inference_model(x).argmax(1) == labels).sum())
        total += len(labels)
    inference_model.detachFromDevice()
    print(f"Accuracy on test set: {100 * correct / total:0.2f}%")


if __name__ == "__main__":
    main()
