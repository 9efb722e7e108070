"""The starters on the full MNIST compared with the same apps in eager PyTorch: accuracy and whole time of one epoch at batch 1.

    python scripts/starters_beside_eager.py --data-path DIR [--apps logreg lenet] [--write]

Each side is a process of its own, timed from its start to its end. The eager one has the same model, seed, order of the data, and
learning rates, and its data in memory. --write puts the table into docs/sambaflow.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STARTERS = ROOT / "apps" / "starters"
APPS = {  # what the starters have as defaults
    "logreg": {"lr": 0.001, "weight_decay": 1e-4, "schedule": "constant"},
    "ffn_mnist": {"lr": 0.001, "weight_decay": 1e-4, "schedule": "constant"},
    "lenet": {"lr": 0.01, "weight_decay": 0.01, "schedule": "linear"},
}
SEED, CHUNK = 256, 1000
BEGIN, END = "<!-- starters: scripts/starters_beside_eager.py -->", "<!-- end of starters -->"


def _module(app: str) -> Any:
    spec = importlib.util.spec_from_file_location(app, STARTERS / app / f"{app}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def eager(app: str, folder: str) -> None:
    """The same app, one step after the other, in this process."""
    import torch

    from tilework.zoo import digits

    module = _module(app)
    settings = APPS[app]
    torch.manual_seed(SEED)
    flat = app != "lenet"
    torch.randn(1, *((784,) if flat else (1, 28, 28))), torch.randint(10, (1,))  # the starter makes its example inputs first
    make = {"logreg": lambda: module.LogReg(784, 10, False), "ffn_mnist": lambda: module.FFNLogReg(784, 128, 10),
            "lenet": lambda: module.LeNet(10)}  # fmt: skip
    model = make[app]()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], weight_decay=settings["weight_decay"])
    x, y = digits.load("train", folder)
    x = x.reshape(len(x), -1) if flat else x
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED))
    for i, pick in enumerate(order.split(1)):
        if settings["schedule"] == "linear" and i % CHUNK == 0:
            optimizer.param_groups[0]["lr"] = settings["lr"] * (1 - i / len(y))
        optimizer.zero_grad()
        model(x[pick], y[pick])[0].backward()
        optimizer.step()
    x, y = digits.load("test", folder)
    with torch.no_grad():
        right = sum(
            int(model(a.reshape(len(a), -1) if flat else a, b)[1].argmax(1) == b)
            for a, b in zip(x.split(1), y.split(1), strict=True)
        )
    print(f"Test Accuracy: {100 * right / len(y):.2f}")


def foreign(folder: str) -> str:
    """A loop as most programs have it: a plain DataLoader, one session.run and one .item() a step; the same in eager. Both in
    this process, in turns, by the median of five."""
    import statistics

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from sambaflow import samba
    from sambaflow.samba import utils
    from tilework.zoo import digits

    module = _module("logreg")
    x, y = digits.load("test", folder)
    loader = DataLoader(TensorDataset(x.reshape(len(x), -1)[:3000], y[:3000]), batch_size=1, shuffle=True)
    host, model = module.LogReg(784, 10, False), module.LogReg(784, 10, False)
    host_optimizer = torch.optim.SGD(host.parameters(), lr=0.001, weight_decay=1e-4)
    samba.from_torch_model_(model)
    inputs = (samba.randn(1, 784, name="image", batch_dim=0), samba.randint(10, (1,), name="label", batch_dim=0))
    utils.trace_graph(model, inputs, samba.optim.SGD(model.parameters(), lr=0.001, weight_decay=1e-4))

    def device_step(image: torch.Tensor, label: torch.Tensor) -> float:
        given = [
            samba.from_torch_tensor(image, name="image", batch_dim=0),
            samba.from_torch_tensor(label, name="label", batch_dim=0),
        ]
        loss, _ = samba.session.run(input_tensors=given, output_tensors=model.output_tensors, hyperparam_dict={"lr": 0.001})
        return samba.to_torch(loss).item()

    def host_step(image: torch.Tensor, label: torch.Tensor) -> float:
        host_optimizer.zero_grad()
        loss, _ = host(image, label)
        loss.backward()
        host_optimizer.step()
        return loss.item()

    times: dict[str, list[float]] = {"device": [], "host": []}
    for _ in range(6):
        for name, step in (("device", device_step), ("host", host_step)):
            begin = time.perf_counter()
            for image, label in loader:
                step(image, label)
            times[name].append((time.perf_counter() - begin) / len(loader) * 1e6)
    ours, theirs = (statistics.median(t[1:]) for t in times.values())
    return f"{ours:.0f} us per step, eager {theirs:.0f} us: {theirs / ours:.1f} times faster"


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """(seconds, accuracy) of a command that prints a line with its accuracy."""
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    took = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("Test Accuracy"))
    return took, float(line.split()[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", required=True, help="folder with the MNIST files")
    parser.add_argument("--apps", nargs="+", choices=APPS, default=list(APPS))
    parser.add_argument("--write", action="store_true", help="put the table into docs/sambaflow.md")
    parser.add_argument("--eager", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = str(Path(args.data_path).resolve())
    if args.eager:
        eager(args.eager, folder)
        return
    lines = ["| starter | accuracy | eager's accuracy | whole `run` | eager | times faster |", "|---|---|---|---|---|---|"]
    for app in args.apps:
        with tempfile.TemporaryDirectory() as out:
            script = str(STARTERS / app / f"{app}.py")
            subprocess.run([sys.executable, script, "compile", "--pef-name", app], cwd=out, check=True, capture_output=True)
            ours = timed(
                [sys.executable, script, "run", "--pef", f"out/{app}/{app}.pef", "--data-path", folder, "--data-folder", "."],
                Path(out),
            )
            theirs = timed([sys.executable, __file__, "--eager", app, "--data-path", folder], Path(out))
        lines.append(
            f"| {app} | {ours[1]:.2f} % | {theirs[1]:.2f} % | {ours[0]:.1f} s | {theirs[0]:.1f} s | {theirs[0] / ours[0]:.1f} x |"
        )
        print(lines[-1], flush=True)
    loop = (
        f"A loop over a plain DataLoader with one `session.run` and one `.item()` per step, logreg at batch 1: {foreign(folder)}."
    )
    print(loop)
    if args.write:
        page = ROOT / "docs" / "sambaflow.md"
        head, rest = page.read_text().split(BEGIN)
        when = datetime.date.today().isoformat()
        command = "python scripts/starters_beside_eager.py --data-path DIR --write"
        note = f"One epoch of the full MNIST at batch 1, 2 cores, {when}, `{command}`:"
        page.write_text(head + BEGIN + "\n" + note + "\n\n" + "\n".join(lines) + "\n\n" + loop + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
