"""A model of Hugging Face transformers from its folder (config.json, and safetensors if there are any), as a training step.

tilework compile hf:FOLDER -o out/model.pef --set batch_size=8 --set length=128
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MachineError, UserError
from ..step import Step
from .common import generator

IGNORED = -100  # label of a token that does not count
CAUSAL, MASKED, CLASSIFIED = ("ForCausalLM", "LMHeadModel"), ("ForMaskedLM", "ForPreTraining"), ("ForSequenceClassification",)


def build(
    folder: str,
    batch_size: int = 4,
    length: int | None = None,
    lr: float = 5e-5,
    weight_decay: float = 0.01,
    clip_norm: float | None = 1.0,
    precision: Any = "float32",
    architecture: str | None = None,
) -> Step:
    """The architecture is the one that config.json names. `length` is that of a sequence, 128 at most by default."""
    model, name = opened(folder, architecture)
    longest = int(getattr(model.config, "max_position_embeddings", None) or 128)
    length = min(128, longest) if length is None else length
    if not 1 <= length <= longest:
        raise UserError("hf-folder", f"{folder}: sequences of {length} tokens", expected=f"1 to {longest}")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return Step(
        model=model,
        inputs=examples(model.config, name, batch_size, length),
        loss="loss",
        optimizer=torch.optim.AdamW([g for g in groups if g["params"]], lr=lr),
        clip_norm=clip_norm,
        precision=precision,
    )


def opened(folder: str, architecture: str | None = None) -> tuple[Any, str]:
    """The model, with the folder's weights where it has any, and the name of its class."""
    try:
        import transformers
    except ImportError as e:
        raise MachineError("hf-package", "a folder of this kind needs the package transformers", found="it is not installed",
                           fix="pip install transformers") from e  # fmt: skip
    path = Path(folder)
    try:
        said = json.loads((path / "config.json").read_text())
        name = architecture or said["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as e:
        raise UserError("hf-folder", f"{folder}: no model can be made from this folder", found=f"{type(e).__name__}: {e}",
                        expected="config.json that names an architecture", fix="or --set architecture=NAME") from e  # fmt: skip
    kind = getattr(transformers, name, None)
    if kind is None or not name.endswith((*CAUSAL, *MASKED, *CLASSIFIED)):
        raise UserError("hf-folder", f"{folder}: its architecture is {name}",
                        expected=f"a class of transformers whose name ends in {', '.join((*CAUSAL, *MASKED, *CLASSIFIED))}",
                        fix="--set architecture=NAME; or write a build function, which can use any model")  # fmt: skip
    torch.manual_seed(0)
    if any(path.glob("*.safetensors")):
        model = kind.from_pretrained(str(path), dtype=torch.float32)
    else:
        model = kind(kind.config_class.from_pretrained(str(path)))
    model.config.use_cache = False
    return model.train(), name


def examples(config: Any, name: str, rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens of the right form, by the names that the model's forward has."""
    g = generator(seed)
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=g)
    if name.endswith(CAUSAL):
        return {"input_ids": ids, "labels": ids.clone()}
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name.endswith(CLASSIFIED):
        return {**found, "labels": torch.randint(0, config.num_labels, (rows,), generator=g)}
    hidden = torch.rand(ids.shape, generator=g) < 0.15
    hidden[:, 0] = True
    found["labels"] = ids.masked_fill(~hidden, IGNORED)
    if name.endswith("ForPreTraining") and "Bert" in name:
        found["next_sentence_label"] = torch.randint(0, 2, (rows,), generator=g)
    return found
