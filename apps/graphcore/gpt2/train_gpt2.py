"""GPT-2 on generated text, its layers in blocks of several devices.

python train_gpt2.py --model tiny --gradient-accumulation 8 --layers-per-ipu 1 1
python train_gpt2.py --model gpt2 --gradient-accumulation 64 --layers-per-ipu 0 4 4 4 --max-len 1024
"""

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import nn

import poptorch

SIZES = {"tiny": (2, 64, 4, 512), "gpt2": (12, 768, 12, 50272)}  # layers, width, heads, vocabulary


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.drop(self.project(y.transpose(1, 2).reshape(rows, length, width)))
        return poptorch.recomputationCheckpoint(x + self.drop(self.mlp(self.norm2(x))))


class GPT2(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.words(inputs) + self.places(torch.arange(inputs.shape[1]))
        logits = self.head(self.norm(self.layers(x)))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        accuracy = (logits.argmax(-1) == targets).float().mean()
        return poptorch.identity_loss(loss, reduction="none"), accuracy


def place(model: GPT2, per_ipu: list[int]) -> None:
    """Layers begin blocks where another device begins, and the table that users know is printed."""
    print("-------------------- Device Allocation --------------------")
    print("Embedding  --> IPU 0")
    poptorch.BeginBlock(model.words, "Embedding", ipu_id=0)
    devices = [ipu for ipu, count in enumerate(per_ipu) for _ in range(count)]
    for i, (layer, ipu) in enumerate(zip(model.layers, devices, strict=True)):
        print(f"Layer {i:<2} --> IPU {ipu}")
        poptorch.BeginBlock(layer, f"Layer{i}", ipu_id=ipu)
    print("LM_head --> IPU 0")
    poptorch.BeginBlock(model.head, "LM_head", ipu_id=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--layers-per-ipu", type=int, nargs="+", default=[1, 1])
    parser.add_argument("--replication-factor", type=int, default=1)
    parser.add_argument("--gradient-accumulation", type=int, default=8)
    parser.add_argument("--device-iterations", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-len", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--lr-warmup", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    layers, width, heads, words = SIZES[args.model]

    options = poptorch.Options().randomSeed(42).autoRoundNumIPUs(True).deviceIterations(args.device_iterations)
    options.replicationFactor(args.replication_factor).outputMode(poptorch.OutputMode.Sum)
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu))
    options.setAvailableMemoryProportion({f"IPU{i}": 0.15 for i in range(len(args.layers_per_ipu))})
    options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))

    print("Model initializing")
    model = GPT2(layers, width, heads, words, args.max_len).train()
    place(model, args.layers_per_ipu)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = poptorch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.999), eps=1e-6, bias_correction=False,
                                     loss_scaling=50000, accum_type=torch.float16)  # fmt: skip
    total = args.steps * args.epochs
    warm = max(1, int(total * args.lr_warmup))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: (i + 1) / warm if i < warm else 0.5 * (1 + math.cos(math.pi * (i - warm) / max(1, total - warm)))
    )

    print("------------------- Data Loading Started ------------------")
    begin = time.time()
    blocks = args.device_iterations * args.gradient_accumulation * args.replication_factor
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(words, (args.steps * blocks * args.batch_size, 1), generator=generator)
    text = (first + 3 * torch.arange(args.max_len + 1)) % words  # each word follows from the one before it
    loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(text), batch_size=args.batch_size)
    print(f"Samples per epoch: {len(text)}\nSteps per epoch: {len(loader)}\nData loaded in {time.time() - begin} secs")
    print(
        "-----------------------------------------------------------\n--------------------- Training Started --------------------"
    )
    training_model = poptorch.trainingModel(model, options, optimizer)
    for epoch in range(args.epochs):
        for step, (tokens,) in enumerate(loader):
            begin = time.time()
            loss, accuracy = training_model(tokens)
            schedule.step()
            training_model.setOptimizer(optimizer)
            print(f"step {step} of epoch {epoch}, loss: {loss.sum().item() / blocks}, acc: {accuracy.sum().item() / blocks}, "
                  f"lr: {schedule.get_last_lr()[0]}, throughput: {len(tokens) / (time.time() - begin)} samples/sec")  # fmt: skip
    training_model.destroy()


if __name__ == "__main__":
    main()
