"""The demo: compile LeNet, train it on digits, test it, and compare it with eager PyTorch and torch.compile.

    make demo                                   # the 6 000 + 1 000 digits that the package carries
    make demo ARGS="--data-path DIR"            # the full MNIST files, in DIR or DIR/MNIST/raw
    make demo ARGS="--download"                 # fetch the full MNIST first, where there is a network

Everything in the closing table is measured in this run. Each contender trains in a process of its own, which gives the
test accuracy and the seconds from process start to the first finished step; then all three take turns in one process,
which gives the steps per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

START = time.time()
CONTENDERS = ("Tilework", "eager PyTorch", "torch.compile")
BATCH_SIZE, LR, SEED = 8, 0.005, 1


def training_step(contender: str, artifact: Path):
    """(run, evaluate): run(x, y) makes one training step and returns the loss; evaluate(x) gives class scores."""
    import torch

    from tilework.zoo.lenet import build

    if contender == "Tilework":
        import tilework

        session = tilework.load(artifact)
        return (lambda x, y: session.run(x, y).loss), session.infer
    step = build(batch_size=BATCH_SIZE, lr=LR)
    model = torch.compile(step.model) if contender == "torch.compile" else step.model

    def run(x, y):
        step.optimizer.zero_grad()
        loss = step.loss(model(x), y)
        loss.backward()
        step.optimizer.step()
        return loss.detach()

    def evaluate(x):
        with torch.no_grad():
            return step.model(x)

    return run, evaluate


def worker(contender: str, out: Path, epochs: int, folder: Path | None) -> None:
    """Train in this process; the last line printed is the result as JSON."""
    import torch

    from tilework.zoo import digits

    run, evaluate = training_step(contender, out / "lenet.pef")
    x, y = digits.load("train", folder)
    losses, first = [], 0.0
    for epoch in range(epochs):
        for a, b in digits.batches(x, y, BATCH_SIZE, SEED + epoch):
            losses.append(float(run(a, b)))
            if not first:
                first = time.time() - START
            if len(losses) % 500 == 0:
                print(
                    f"  {contender}: epoch {epoch + 1}/{epochs}, step {len(losses)}, loss {losses[-1]:.4f}",
                    file=sys.stderr,
                )
    x, y = digits.load("test", folder)
    right = sum(int((evaluate(a).argmax(1) == b).sum()) for a, b in digits.batches(x, y, BATCH_SIZE, None))
    accuracy = right / (len(x) // BATCH_SIZE * BATCH_SIZE)
    print(json.dumps({"accuracy": accuracy, "first_step": first, "losses": losses, "threads": torch.get_num_threads()}))


def speeds(out: Path, rounds: int = 7, num_steps: int = 60) -> dict[str, float]:
    """Steps per second by median over interleaved rounds, on batches that are in memory."""
    from tilework.zoo import digits

    x, y = digits.load("train")
    batches = [next(digits.batches(x, y, BATCH_SIZE, seed)) for seed in range(num_steps)]
    steps = {c: training_step(c, out / "lenet.pef")[0] for c in CONTENDERS}
    for run in steps.values():
        run(*batches[0])
        run(*batches[1])
    times: dict[str, list[float]] = {c: [] for c in CONTENDERS}
    for _ in range(rounds):
        for c, run in steps.items():
            begin = time.perf_counter()
            for a, b in batches:
                run(a, b)
            times[c].append((time.perf_counter() - begin) / num_steps)
    return {c: 1 / statistics.median(t) for c, t in times.items()}


def plot(results: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    styles = {"Tilework": ("-", 2.0), "eager PyTorch": ("--", 1.5), "torch.compile": (":", 1.5)}
    for contender, result in results.items():
        losses = np.array(result["losses"])
        window = max(1, len(losses) // 60)
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        line, width = styles[contender]
        axes.plot(np.arange(len(smooth)) + window, smooth, line, linewidth=width, label=contender)
    axes.set(xlabel="step", ylabel=f"training loss (mean of {window} steps)", title="LeNet on digits", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile, train and test LeNet; compare with PyTorch.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--data-path", type=Path, help="a folder with the full MNIST files")
    parser.add_argument("--download", action="store_true", help="download the full MNIST to --data-path (data/mnist)")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.out, args.epochs, args.data_path)
        return
    from rich.console import Console
    from rich.table import Table

    import tilework
    from tilework.check.check import check
    from tilework.zoo import digits
    from tilework.zoo.lenet import build

    console = Console(highlight=False, soft_wrap=True)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.download:
        args.data_path = digits.download(args.data_path or Path("data/mnist"), lambda t: console.print(f"  {t}"))
    data = f"MNIST from {args.data_path}" if args.data_path else "the built-in digits (6 000 + 1 000 of MNIST)"

    console.print(f"[1/4] compiling LeNet, batch {BATCH_SIZE}, into {args.out / 'lenet.pef'}")
    begin = time.perf_counter()

    def report(text: str) -> None:
        console.print(f"  [{time.perf_counter() - begin:5.1f} s] {text}", markup=False)

    tilework.compile(build(batch_size=BATCH_SIZE, lr=LR), args.out / "lenet.pef", report=report)

    console.print("[2/4] test: comparing the artifact with the untouched module, tensor by tensor")
    result = check(args.out / "lenet.pef", build(batch_size=BATCH_SIZE, lr=LR))
    worst = max(result.rows, key=lambda r: r.error / r.tolerance)
    console.print(f"  {'pass' if result.ok else 'FAIL'}: {len(result.rows)} tensors; worst {worst.kind} {worst.name}, "
                  f"error {worst.error:.1e}, tolerance {worst.tolerance:.0e}")  # fmt: skip
    if not result.ok:
        sys.exit(1)

    console.print(f"[3/4] training {args.epochs} epochs on {data}, each contender in a new process")
    results = {}
    for contender in CONTENDERS:
        command = [
            sys.executable,
            __file__,
            "--worker",
            contender,
            "--out",
            str(args.out),
            "--epochs",
            str(args.epochs),
        ]
        command += ["--data-path", str(args.data_path)] if args.data_path else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"the {contender} process failed with {done.returncode}")
        results[contender] = json.loads(done.stdout.splitlines()[-1])
    with open(args.out / "log.jsonl", "w") as log:
        for contender, r in results.items():
            for i, loss in enumerate(r["losses"]):
                log.write(json.dumps({"contender": contender, "step": i + 1, "loss": loss}) + "\n")
    plot(results, args.out / "loss.png")

    console.print("[4/4] timing: all three take turns in one process")
    speed = speeds(args.out)
    table = Table(title=f"LeNet, batch {BATCH_SIZE}, {results['Tilework']['threads']} threads, {data}", title_justify="left")
    for column in ("", "test accuracy", "steps/s", "compared with eager", "seconds to first step"):
        table.add_column(column, justify="left" if not column else "right")
    for c in CONTENDERS:
        table.add_row(c, f"{results[c]['accuracy']:.2%}", f"{speed[c]:.0f}", f"{speed[c] / speed['eager PyTorch']:.2f} x",
                      f"{results[c]['first_step']:.2f}")  # fmt: skip
    console.print(table)
    summary = {c: {"accuracy": results[c]["accuracy"], "steps_per_second": speed[c], "first_step": results[c]["first_step"]}
               for c in CONTENDERS}  # fmt: skip
    (args.out / "result.json").write_text(json.dumps(summary, indent=1))
    for what, name in (
        ("artifact", "lenet.pef"),
        ("log", "log.jsonl"),
        ("loss curve", "loss.png"),
        ("figures", "result.json"),
    ):
        console.print(f"{what:<10} {args.out / name}")


if __name__ == "__main__":
    main()
