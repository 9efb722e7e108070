"""ResNet-50 on synthetic images, with as many replicas as poprun is asked for.

poprun -vv --num-instances=1 --num-replicas=4 --executable-cache-path=$PYTORCH_CACHE_DIR python3 train.py --epoch 2
python3 train.py --blocks 1 1 1 1 --width 16 --image-size 32 --samples 64      # a small one, in seconds
"""

import argparse
import time
from datetime import datetime, timedelta

import torch
from torch import nn
from tqdm import tqdm

import popdist
import popdist.poptorch
import poptorch


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        plain = stride == 1 and num_in == out
        self.skip = nn.Identity() if plain else nn.Sequential(nn.Conv2d(num_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet(blocks: list[int], width: int, classes: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for i, count in enumerate(blocks):
        for j in range(count):
            layers.append(Bottleneck(channels, width * 2**i, 2 if i and not j else 1))
            channels = 4 * width * 2**i
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class TrainingModelWithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.model(x)
        return output.argmax(1), self.loss(output, labels)


class Synthetic(torch.utils.data.Dataset):
    """Images of a class are noise around one pattern of it, so that there is something to learn."""

    def __init__(self, count: int, size: int, classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.randint(classes, (count,), generator=generator)
        self.images = (
            torch.randn(count, 3, size, size, generator=generator)
            + torch.randn(classes, 3, 1, 1, generator=generator)[self.labels]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[i], self.labels[i]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, nargs=4, default=[3, 4, 6, 3])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--gradient-accumulation", type=int, default=2)
    parser.add_argument("--device-iterations", type=int, default=1)
    parser.add_argument("--epoch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    start = time.time()

    options = popdist.poptorch.Options() if popdist.isPopdistEnvSet() else poptorch.Options()
    if popdist.isPopdistEnvSet():
        popdist.init()
    options.randomSeed(0).deviceIterations(args.device_iterations).broadcastBuffers(False)
    options.outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.Precision.setPartialsType(torch.half)
    replicas = popdist.getNumTotalReplicas()
    print(f"[INFO] Total replicas: {replicas}")
    print(f"[INFO] Global batch size: {args.micro_batch_size * args.gradient_accumulation * replicas}")
    print(f"[INFO] Number of IPUs required: {replicas * popdist.getNumIpusPerReplica()}")
    print("[INFO] Loading the data")
    loader = poptorch.DataLoader(
        options,
        Synthetic(args.samples, args.image_size, args.classes),
        batch_size=args.micro_batch_size,
        shuffle=True,
        mode=poptorch.DataLoaderMode.Async,
    )

    model = TrainingModelWithLoss(resnet(args.blocks, args.width, args.classes)).train()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, use_combined_accum=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epoch)
    training_model = poptorch.trainingModel(model, options, optimizer)
    for epoch in range(1, args.epoch + 1):
        print(f"[INFO] Epoch {epoch}/{args.epoch}")
        begin, losses, right, seen = time.time(), [], 0, 0
        with tqdm(loader, total=len(loader)) as bar:
            for images, labels in bar:
                predicted, loss = training_model(images, labels)
                losses.append(loss.mean().item())
                right, seen = right + int((predicted == labels).sum()), seen + len(labels)
                bar.set_description(f"Loss:{sum(losses) / len(losses):0.4f} | Accuracy:{100 * right / seen:0.2f}%")
        print(f"[INFO] Epoch {epoch}")
        print(f"[INFO] loss: {sum(losses) / len(losses):0.4f},")
        print(f"[INFO] accuracy: {100 * right / seen:0.2f} %")
        print(f"[INFO] throughput: {seen * popdist.getNumInstances() / (time.time() - begin):0.1f} samples/sec")
        schedule.step()
        training_model.setOptimizer(optimizer)
    loader.terminate()
    training_model.destroy()
    print(f"[INFO] Finished training. Time: {datetime.now()}. It took: {timedelta(seconds=time.time() - start)}")


if __name__ == "__main__":
    main()
