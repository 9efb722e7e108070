"""Whole programs: the starters with small sizes, and a model of a public library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pop_helpers import options, twin

import poptorch

pytestmark = pytest.mark.slow

APPS = Path(__file__).parents[3] / "apps" / "graphcore"


def run(name: str, *words: str, device: str = "reference") -> str:
    env = {**os.environ, "TILEWORK_DEVICE": device}
    done = subprocess.run([sys.executable, str(APPS / name), *words], capture_output=True, text=True, timeout=250, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_mnist_learns() -> None:
    out = run("mnist/mnist_poptorch.py", "--epochs", "1", device="cpu")
    assert "TrainingModelWithLoss(\n  (model): Network(\n    (layer1): Block(" in out
    found = re.search(r"Accuracy on test set: (\d+\.\d\d)%", out)
    assert found and float(found[1]) > 90


def test_resnet_learns() -> None:
    out = run(
        "resnet50/train.py",
        "--blocks",
        "1",
        "1",
        "1",
        "1",
        "--width",
        "8",
        "--image-size",
        "32",
        "--samples",
        "48",
        "--epoch",
        "2",
    )
    losses = [float(x) for x in re.findall(r"\[INFO\] loss: (\d+\.\d+),", out)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert "[INFO] Total replicas: 1" in out and "[INFO] Global batch size: 8" in out and "[INFO] Finished training. Time:" in out


def test_gpt2_learns() -> None:
    out = run("gpt2/train_gpt2.py", "--steps", "4", "--gradient-accumulation", "7", "--max-len", "8")
    losses = [float(x) for x in re.findall(r"step \d of epoch 0, loss: (\d+\.\d+),", out)]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "Layer 1  --> IPU 1" in out


def test_gpt2_needs_enough_accumulation() -> None:
    env = {**os.environ, "TILEWORK_DEVICE": "reference"}
    command = [sys.executable, str(APPS / "gpt2/train_gpt2.py"), "--gradient-accumulation", "2", "--max-len", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)
    assert (
        done.returncode != 0
        and "gradientAccumulation must be greater than or equal to the number of pipeline stages (3)" in done.stderr
    )


def test_bert_learns() -> None:
    out = run("bert/train_bert.py", "--epochs", "2", "--width", "32")
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", out)]
    assert len(losses) == 16 and sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_a_model_of_a_library() -> None:
    """Layers of BERT in blocks, keyword arguments, an output of its own type; the update is eager's."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForMaskedLM(config).train()
    other = twin(model)
    for i, layer in enumerate(model.bert.encoder.layer):
        poptorch.BeginBlock(layer, f"layer{i}", ipu_id=i)
    opts = options(1, 4).outputMode(poptorch.OutputMode.All)
    executor = poptorch.trainingModel(model, opts, poptorch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = {"input_ids": torch.randint(50, (8, 6)), "attention_mask": torch.ones(8, 6, dtype=torch.long)}
    batch["labels"] = batch["input_ids"].clone()
    out = executor(**batch)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    losses = []
    for i in range(4):
        loss = other(**{k: v[2 * i : 2 * i + 2] for k, v in batch.items()}).loss
        losses.append(loss.detach())
        (loss / 4).backward()
    optimizer.step()
    assert type(out) is transformers.modeling_outputs.MaskedLMOutput
    torch.testing.assert_close(out.loss + 0, torch.stack(losses), rtol=1e-4, atol=1e-5)
    weights = other.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4, msg=name)
    executor.destroy()
