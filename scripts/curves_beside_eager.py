"""U-Net and a GPT of 10 million parameters, trained for minutes on the same batches by Tilework and by eager PyTorch: the loss of
every step, and the time. They take turns, a few steps each.

make bench-smoke                                          # once: installs matplotlib
python scripts/curves_beside_eager.py --write             # draws docs/images/curves.png, and writes the table of docs/models.md
"""

from __future__ import annotations

import argparse
import copy
import datetime
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tilework
from tilework.artifact.structure import flatten
from tilework.zoo import gpt, unet

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "models.md", ROOT / "docs" / "images" / "curves.png"
BEGIN, END = "<!-- curves: scripts/curves_beside_eager.py -->", "<!-- end of curves -->"
ROWS = {
    "unet": ("U-Net, 64 x 64, batch 16", unet, 1200),
    "gpt": ("GPT, 10 M parameters, 128 tokens, batch 8", gpt, 600),
}
EACH = 20  # steps before the other one's turn
BATCHES = 64  # that are used again and again


@dataclass
class Side:
    losses: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)  # seconds a step


def batch(zoo: Any, config: Any, seed: int) -> tuple[torch.Tensor, ...]:
    """Inputs, then targets."""
    return tuple(flatten(zoo.synthetic(config, config.batch_size, seed=seed))[0])


def trained(name: str, steps: int) -> tuple[Side, Side, int]:
    _, zoo, _ = ROWS[name]
    config = zoo.SIZES["small"]
    step = zoo.build(size="small")
    twin = copy.deepcopy(step.model)
    optimizer = type(step.optimizer)(
        [{**{k: v for k, v in g.items() if k != "params"}, "params": [dict(twin.named_parameters())[n] for n in names]}
         for g, names in zip(step.optimizer.param_groups, _names(step), strict=True)]
    )  # fmt: skip
    inputs = len(flatten(step.inputs)[0])
    data = [batch(zoo, config, seed) for seed in range(1, BATCHES + 1)]

    def eager(i: int) -> float:
        x, y = data[i % BATCHES][:inputs], data[i % BATCHES][inputs:]
        optimizer.zero_grad(set_to_none=True)
        made = twin(*x)
        loss = step.loss(made, *y) if callable(step.loss) else made[0]
        loss.backward()
        if step.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), step.clip_norm)
        optimizer.step()
        return float(loss)

    mine, theirs = Side(), Side()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.pef"
        tilework.compile(step, path, options=tilework.Options(programs="fused"), weights="inside")
        session = tilework.load(path)
        for at in range(0, steps, EACH):
            several = [torch.cat(t) for t in zip(*(data[i % BATCHES] for i in range(at, at + EACH)), strict=True)]
            begin = time.perf_counter()
            mine.losses += session.run(*several, num_steps=EACH, outputs="loss").losses.tolist()
            between = time.perf_counter()
            theirs.losses += [eager(i) for i in range(at, at + EACH)]
            mine.turns.append((between - begin) / EACH)
            theirs.turns.append((time.perf_counter() - between) / EACH)
            if at % 200 == 0:
                print(f"{name} step {at + EACH}: {mine.losses[-1]:.4f} {theirs.losses[-1]:.4f}", flush=True)
    return mine, theirs, sum(p.numel() for p in twin.parameters())


def _names(step: tilework.Step) -> list[list[str]]:
    names = {id(p): n for n, p in step.model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in step.optimizer.param_groups]


def smooth(losses: list[float], width: int = 20) -> list[float]:
    return [sum(losses[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(losses))]


def draw(found: dict[str, tuple[Side, Side, int]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(found), figsize=(10, 6.5), layout="constrained")
    for column, (name, (mine, theirs, _)) in enumerate(found.items()):
        by_step, by_time = axes[0][column], axes[1][column]
        for side, label, color, width in ((theirs, "eager PyTorch", "#b0b6c0", 4), (mine, "Tilework", "#2563a8", 1.5)):
            style: dict[str, Any] = {"color": color, "lw": width, "label": label}
            line = smooth(side.losses)
            seconds = [s for turn in side.turns for s in [turn] * EACH]
            total = torch.tensor(seconds).cumsum(0).tolist()
            by_step.plot(range(1, len(line) + 1), line, **style)
            by_time.plot(total, line, **style)
        by_step.set(title=ROWS[name][0], xlabel="step", ylabel="loss (mean of 20 steps)", yscale="log")
        by_time.set(xlabel="seconds of training", ylabel="loss (mean of 20 steps)", yscale="log")
        for axis in (by_step, by_time):
            axis.grid(alpha=0.3)
            axis.legend(frameon=False)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def table(found: dict[str, tuple[Side, Side, int]]) -> str:
    day = datetime.date.today().isoformat()
    how = f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}, {day}"
    lines = [f"{how}; turns of {EACH} steps, median of turns:\n",
             "| | steps | loss at the end, Tilework | eager PyTorch | ms a step, Tilework | eager PyTorch | times faster |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, (mine, theirs, count) in found.items():
        a, b = (statistics.median(s.turns) * 1e3 for s in (mine, theirs))
        ends = [f"{sum(s.losses[-50:]) / 50:.4f}" for s in (mine, theirs)]
        title = f"{ROWS[name][0]} ({count / 1e6:.1f} M parameters)" if "parameters" not in ROWS[name][0] else ROWS[name][0]
        lines.append(f"| {title} | {len(mine.losses)} | {ends[0]} | {ends[1]} | {a:.1f} | {b:.1f} | {b / a:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each model; by default 1200 and 1500")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    results = {name: trained(name, arguments.steps or row[2]) for name, row in ROWS.items()}
    text = table(results)
    print(text)
    if arguments.write:
        draw(results)
        head, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(head + BEGIN + "\n" + text + "\n" + END + rest.split(END)[1])
