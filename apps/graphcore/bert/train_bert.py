"""BERT learns to fill in masked words of generated text: blocks on several devices, accumulation, LAMB.

python train_bert.py
python train_bert.py --layers 4 --width 256 --gradient-accumulation 16
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import poptorch


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.mlp(x))


class Bert(nn.Module):
    def __init__(self, words: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(words, width), nn.Embedding(length, width), nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Encoder(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        logits = self.head(self.layers(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        known = labels != -100
        accuracy = ((logits.argmax(-1) == labels) & known).sum() / known.sum().clamp(min=1)
        return poptorch.identity_loss(loss, reduction="none"), accuracy


class Masked(torch.utils.data.Dataset):
    """Words that count up; one in six is hidden."""

    def __init__(self, count: int, words: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        text = (torch.randint(1, words, (count, 1), generator=generator) + torch.arange(length)) % (words - 1) + 1
        hidden = torch.rand(count, length, generator=generator) < 1 / 6
        hidden[:, 0] = True
        self.tokens, self.labels = text.masked_fill(hidden, 0), text.masked_fill(~hidden, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[i], self.labels[i]


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag, default in (
        ("layers", 2),
        ("width", 64),
        ("heads", 4),
        ("words", 64),
        ("sequence-length", 16),
        ("micro-batch-size", 4),
        ("gradient-accumulation", 8),
        ("device-iterations", 2),
        ("replication-factor", 1),
        ("samples", 512),
        ("epochs", 4),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    args = parser.parse_args()

    options = poptorch.Options().randomSeed(1).deviceIterations(args.device_iterations).autoRoundNumIPUs(True)
    options.replicationFactor(args.replication_factor).outputMode(poptorch.OutputMode.Sum)
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu))

    model = Bert(args.words, args.sequence_length, args.layers, args.width, args.heads).train()
    for i, layer in enumerate(model.layers):
        poptorch.BeginBlock(layer, f"Encoder{i}", ipu_id=i + 1)
    poptorch.BeginBlock(model.words, "Embedding", ipu_id=0)
    optimizer = poptorch.optim.LAMB(model.parameters(), lr=args.learning_rate, weight_decay=0.01, bias_correction=True)
    data = Masked(args.samples, args.words, args.sequence_length)
    loader = poptorch.DataLoader(options, data, batch_size=args.micro_batch_size, shuffle=True)
    training_model = poptorch.trainingModel(model, options, optimizer)
    blocks = args.device_iterations * args.gradient_accumulation * args.replication_factor
    for epoch in range(args.epochs):
        for step, (tokens, labels) in enumerate(loader):
            loss, accuracy = training_model(tokens, labels)
            print(
                f"epoch {epoch} step {step}: loss {loss.sum().item() / blocks:.3f}, accuracy {accuracy.sum().item() / blocks:.3f}"
            )
    training_model.destroy()


if __name__ == "__main__":
    main()
