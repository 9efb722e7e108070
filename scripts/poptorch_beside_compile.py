"""ResNet-50-like and GPT-2 small, as the starters under apps/graphcore have them, beside torch.compile and eager PyTorch: one
process each, by turns, by median. The first losses must agree.

python scripts/poptorch_beside_compile.py --rounds 5 --write     # --write puts the lines into docs/poptorch.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- large: scripts/poptorch_beside_compile.py -->", "<!-- end of large -->"
CONTENDERS = ("poptorch", "torch.compile", "eager")
ROWS = {
    "resnet50": "ResNet-50 (23.5 million parameters), images of 64 x 64, batch 4, SGD with momentum",
    "gpt2": "GPT-2 small (124 million parameters), 128 tokens, batch 1, AdamW, no dropout",
}


def model_and_data(row: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], Callable[[Any], torch.optim.Optimizer]]:
    """A model that returns its loss last, or first, and what it is called with."""
    sys.path.insert(0, str(ROOT / "apps" / "graphcore" / row))
    torch.manual_seed(0)
    if row == "resnet50":
        from train import TrainingModelWithLoss, resnet

        model = TrainingModelWithLoss(resnet([3, 4, 6, 3], 64, 1000))
        return model, (torch.randn(4, 3, 64, 64), torch.randint(0, 1000, (4,))), sgd
    from train_gpt2 import GPT2, SIZES

    layers, width, heads, words = SIZES["gpt2"]
    model = GPT2(layers, width, heads, words, 128)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model, (torch.randint(0, words, (1, 129)),), adamw


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def loss_of(returned: Any) -> torch.Tensor:
    return next(t for t in returned if t.is_floating_point())


def step_of(row: str, contender: str) -> Callable[[], float]:
    model, data, make = model_and_data(row)
    if contender == "poptorch":
        import poptorch

        options = poptorch.Options().showCompilationProgressBar(False)
        options._Popart.set("autoRecomputation", 0)  # the others keep everything, too
        group = make(model).param_groups[0]
        optimizer = (
            poptorch.optim.SGD(model.parameters(), lr=group["lr"], momentum=group["momentum"], use_combined_accum=False)
            if "momentum" in group
            else poptorch.optim.AdamW(model.parameters(), lr=group["lr"], weight_decay=group["weight_decay"])
        )
        executor = poptorch.trainingModel(model, options, optimizer)
        return lambda: float(loss_of(executor(*data)))
    import poptorch  # the models use its ops, which do nothing outside of an executor

    optimizer = make(model)
    called = torch.compile(model) if contender == "torch.compile" else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(called(*data))
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def serve(row: str, contender: str) -> None:
    """A contender in its own process: times one step for each line that comes in."""
    step = step_of(row, contender)
    begin = time.perf_counter()
    first = step()
    print(json.dumps({"first": first, "seconds": time.perf_counter() - begin}), flush=True)
    step()
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(json.dumps({"seconds": (time.perf_counter() - begin) / int(line)}), flush=True)


def measure(rounds: int) -> str:
    day = datetime.date.today().isoformat()
    lines = [f"{torch.get_num_threads()} threads, {day}, medians of {rounds} rounds that take turns, `python "
             f"scripts/poptorch_beside_compile.py`:\n",
             f"| ms a step | {' | '.join(CONTENDERS)} | compared with the best other |",
             "|---" * (len(CONTENDERS) + 2) + "|"]  # fmt: skip
    for row, title in ROWS.items():
        running = {}
        firsts = {}
        for name in CONTENDERS:
            command = [sys.executable, __file__, "--serve", row, name]
            running[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            firsts[name] = json.loads(_line(running[name]))
            print(f"{row} {name}: first loss {firsts[name]['first']:.6f} after {firsts[name]['seconds']:.1f} s", file=sys.stderr)
        losses = [f["first"] for f in firsts.values()]
        if max(losses) - min(losses) > 1e-3 * abs(losses[-1]):
            raise SystemExit(f"{row}: the contenders do not compute the same: {losses}")
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for i in range(rounds):
            for name in CONTENDERS[i % 3 :] + CONTENDERS[: i % 3]:
                pipe = running[name].stdin
                assert pipe is not None
                pipe.write("3\n")
                pipe.flush()
                times[name].append(json.loads(_line(running[name]))["seconds"])
        for process in running.values():
            process.communicate()
        found = {name: statistics.median(t) * 1e3 for name, t in times.items()}
        best = min(t for name, t in found.items() if name != "poptorch")
        lines.append(f"| {title} | {' | '.join(f'{t:.1f}' for t in found.values())} | {best / found['poptorch']:.2f} x |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    while line and not line.startswith("{"):
        line = process.stdout.readline()
    return line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--serve", nargs=2, metavar=("ROW", "CONTENDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        raise SystemExit
    text = measure(arguments.rounds)
    print(text)
    if arguments.write:
        target = ROOT / "docs" / "poptorch.md"
        head, rest = target.read_text().split(BEGIN)
        target.write_text(head + BEGIN + "\n" + text + "\n" + END + rest.split(END)[1])
