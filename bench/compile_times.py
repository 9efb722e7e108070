"""What a compile costs, from capture to the file: python -m bench.compile_times [--models bert-2,lstm] [--programs all] [--json]

Each model is compiled in a process of its own that has compiled a tiny model before (so that what is made once a machine is
there: the compiler's headers, and the code that calls operators), with a cache that knows nothing else. Seconds of wall clock,
and of CPU over all cores. The BERTs need transformers, which `make coverage` installs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGETS = {"bert-2": 6, "bert-12": 12, "gru": 6, "lstm": 6, "unet": 15}  # seconds on 2 quiet cores, with programs="fused"


def _bert(layers: int) -> tuple[Any, Any]:
    import torch
    from torch import nn
    from transformers import BertConfig, BertForSequenceClassification

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}
            self.bert = BertForSequenceClassification(BertConfig(vocab_size=100, num_hidden_layers=layers, **sizes))

        def forward(self, ids: Any, labels: Any) -> Any:
            return self.bert(input_ids=ids, labels=labels).loss

    return Classifier(), (torch.randint(0, 100, (4, 16)), torch.randint(0, 2, (4,)))


def _recurrent(kind: str) -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = getattr(nn, kind)(16, 32, batch_first=True)
            self.head = nn.Linear(32, 4)

        def forward(self, x: Any, y: Any) -> Any:
            return nn.functional.cross_entropy(self.head(self.layer(x)[0][:, -1]), y)

    return Classifier(), (torch.randn(4, 20, 16), torch.randint(0, 4, (4,)))


def _unet() -> tuple[Any, Any]:
    import torch
    from torch import nn

    from .models import build
    from .rows import row_named

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = build(row_named("unet-4"))

        def forward(self, x: Any, y: Any) -> Any:
            return self.loss(self.net(x), y)

    return Trained(), (torch.randn(4, 3, 64, 64), torch.randint(0, 2, (4, 64, 64)))


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "bert-2": lambda: _bert(2),
    "bert-12": lambda: _bert(12),
    "gru": lambda: _recurrent("GRU"),
    "lstm": lambda: _recurrent("LSTM"),
    "unet": _unet,
}


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _child(name: str, programs: Any, folder: Path) -> None:
    import torch

    import tilework

    def compiled(model: Any, inputs: Any, file: str) -> Any:
        step = tilework.Step(model=model, inputs=inputs, loss=0, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
        return tilework.compile(step, folder / file, options=tilework.Options(programs=programs))

    torch.manual_seed(0)
    # with an operator that is called, and a product
    tiny = torch.nn.Sequential(torch.nn.Embedding(2, 2), torch.nn.Linear(2, 2), torch.nn.Flatten(0), torch.nn.Linear(4, 1))
    compiled(tiny, (torch.tensor([0, 1]),), "first.pef")
    model, inputs = MODELS[name]()
    wall, cpu = time.perf_counter(), _cpu()
    made = compiled(model, inputs, "model.pef")
    wall, cpu = time.perf_counter() - wall, _cpu() - cpu
    retreats = made.verification.retreats
    print(
        json.dumps({"model": name, "wall": wall, "cpu": cpu, "parts": made.seconds, "plan": str(made.plan), "retreats": retreats})
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--programs", default="fused", choices=("all", "fused", "sections"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return _child(args.models, args.programs, Path(args.child))
    found = []
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TILEWORK_CACHE": f"{folder}/cache", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
            command = [
                sys.executable,
                "-m",
                "bench.compile_times",
                "--models",
                name,
                "--programs",
                args.programs,
                "--child",
                folder,
            ]
            done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
        one = found[-1]
        parts = ", ".join(f"{k} {v:.1f}" for k, v in one["parts"].items())
        if not args.json:
            target = f"  (at most {TARGETS[name]})" if args.programs == "fused" else ""
            print(f"{name:<8} {one['wall']:5.1f} s  cpu {one['cpu']:5.1f} s{target}  {parts}", *one["retreats"], flush=True)
    if args.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
