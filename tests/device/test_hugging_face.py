"""Folders of transformers: compiled from the command line, trained, and back again under their public names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import tilework
from tilework.runs.folder import RunFolder
from tilework.zoo.pretrained import examples

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
ROWS, LENGTH = 2, 12
LAYERS = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
          "max_position_embeddings": 16}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0,
                                                     embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2)),
    "bert": lambda: hf.BertForPreTraining(hf.BertConfig(**LAYERS, **STILL)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LAYERS, num_key_value_heads=2)),
    "bert_classes": lambda: hf.BertForSequenceClassification(hf.BertConfig(**LAYERS, **STILL, num_labels=3)),
}  # fmt: skip


def command(place: Path, *words: str) -> str:
    done = subprocess.run([str(BIN / "tilework"), *words], cwd=place, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logits(output: Any) -> torch.Tensor:
    return output["logits"] if "logits" in output else output["prediction_logits"]


@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.full] if m.startswith("bert_") else []) for m in MODELS])
def test_round_trip(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    model.save_pretrained(tmp_path / "from")
    command(tmp_path, "compile", "hf:from", "-o", "m.pef", "--set", f"batch_size={ROWS}", "--set", f"length={LENGTH}",
            "--programs", "fused", "--opt-level", "1")  # fmt: skip
    batch = examples(model.config, type(model).__name__, ROWS, LENGTH, seed=5)
    session = tilework.load(tmp_path / "m.pef")
    with torch.no_grad():
        torch.testing.assert_close(logits(session.infer(**batch)), logits(model(**batch)), rtol=1e-4, atol=1e-5)
    losses = [float(session.run(**batch).loss) for _ in range(10)]
    assert losses[-1] < losses[0]
    session.save(tmp_path / "trained.safetensors")
    command(tmp_path, "export", "m.pef", "--weights", "trained.safetensors", "--like", "from", "-o", "to")
    again, info = type(model).from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    trained = session.state_dict()
    theirs = again.state_dict()
    assert all(torch.equal(theirs[k], t) for k, t in trained.items()) and set(theirs) == set(trained)
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(logits(session.infer(**batch)), logits(again.eval()(**batch)), rtol=1e-4, atol=1e-5)


def test_from_a_configuration_alone(tmp_path: Path) -> None:
    """A folder without weights: a fresh model. Trained in a run's folder from a file of tokens, exported from its checkpoint."""
    import numpy as np

    MODELS["gpt2"]().config.save_pretrained(tmp_path / "from")
    config = json.loads((tmp_path / "from" / "config.json").read_text())
    config["architectures"] = ["GPT2LMHeadModel"]
    (tmp_path / "from" / "config.json").write_text(json.dumps(config))
    np.tile(np.arange(64, dtype=np.uint16), 40).tofile(tmp_path / "t.bin")
    command(tmp_path, "compile", "hf:from", "-o", "m.pef", "--set", "length=16", "--set", "lr=0.01", "--opt-level", "1")
    command(tmp_path, "run", "m.pef", "--data", "tokens:t.bin:16:same", "--epochs", "3", "--run-dir", "r")
    losses = [m["loss"] for m in RunFolder(tmp_path / "r").metrics()]
    assert losses[0] > 3.5 and losses[-1] < 1.0
    command(tmp_path, "export", "m.pef", "--run", "r", "--like", "from", "-o", "to")
    model = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "to").eval()
    assert model(torch.arange(10, 20)[None]).logits[0, -1].argmax() == 20


@pytest.mark.parametrize(("config", "words"), [
    (None, "config.json"),
    ('{"architectures": ["ViTModel"], "model_type": "vit"}', "its architecture is ViTModel"),
    ('{"model_type": "gpt2"}', "--set architecture=NAME"),
])  # fmt: skip
def test_folders_that_cannot_be_compiled(config: str | None, words: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    done = subprocess.run([str(BIN / "tilework"), "compile", f"hf:{tmp_path}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and "[hf-folder]" in done.stderr
