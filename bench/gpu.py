"""Steps on a GPU: Tilework beside eager PyTorch, torch.compile and JAX, in one run. Everything in calls of some minutes.

    python -m bench.gpu --rows small                  # what fits into one kernel, and a little more
    python -m bench.gpu --rows gpt2,resnet50 --peers eager,compile
    python -m bench.gpu --help

Writes out/gpu.json (versions, date, every time) and out/gpu.md (the table). Contenders of a row run in processes of their own,
one after the other; a time is the median of several runs of many steps, measured on the GPU's own clock where the contender has
one stream.
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

SMALL = ("logreg-1", "ffn-1", "ffn-128", "lenet-1", "lenet-256")
TF32 = ("ffn-128", "lenet-256")  # rows of products that all contenders make with TF32, as JAX does by itself
LARGE = ("unet", "gpt2", "gpt2-xl", "bert-large", "resnet50")
# row -> (unit, what at least, what is aimed at), as the project's goals say
GOALS: dict[str, tuple[str, float, float]] = {
    "logreg-1": ("us a step", 2, 0.8), "ffn-1": ("us a step", 10, 5), "ffn-128": ("us a step", 36, 20),
    "lenet-1": ("us a step", 35, 12), "lenet-256": ("us a step", 200, 100), "unet": ("samples/s", 3200, 4500),
    "gpt2": ("tokens/s", 540_000, 620_000), "gpt2-xl": ("tokens/s", 40_000, 48_000),
    "bert-large": ("sequences/s", 1550, 1800), "resnet50": ("images/s", 6900, 8000),
}  # fmt: skip
SMALL_PEERS = ("tilework", "eager", "compile", "jax-scan")
LARGE_PEERS = ("tilework", "eager", "compile")


# ---- the rows ----


def small_row(row: str) -> tuple[Any, Any, Any, Any]:
    """model, x, y, optimizer settings"""
    import torch

    from bench.models import FFN, LogReg
    from tilework.zoo.lenet import LeNet

    kind, batch = row.rsplit("-", 1)
    torch.manual_seed(0)
    model = {"logreg": LogReg, "ffn": FFN, "lenet": LeNet}[kind]()
    shape = (1, 28, 28) if kind == "lenet" else (784,)
    n = int(batch)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, *shape, generator=generator)
    y = torch.randint(0, 10, (n,), generator=generator)
    return model, x, y, {"lr": 0.001, "momentum": 0.9 if kind == "lenet" else 0.0}


def large_row(row: str) -> tuple[Any, Callable[..., Any], tuple[Any, ...], tuple[Any, ...], str, int]:
    """model, loss, inputs, targets, optimizer, units a step"""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    if row == "unet":
        from bench.models import UNet

        n = 256
        return (UNet((32, 64, 128, 256)), lambda o, y: F.cross_entropy(o, y), (torch.randn(n, 3, 256, 256),),
                (torch.randint(0, 2, (n, 256, 256)),), "sgd", n)  # fmt: skip
    if row in ("gpt2", "gpt2-xl"):
        from bench.models import GPT, token_loss

        layers, width, heads, n = (48, 1600, 25, 8) if row == "gpt2-xl" else (12, 768, 12, 32)
        tokens = torch.randint(0, 50257, (n, 1024))
        model = GPT(layers, width, heads, 1024, 50257)
        return model, token_loss, (tokens,), (tokens.roll(-1, 1),), "adamw", n * 1024
    if row == "bert-large":
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
        tokens = torch.randint(0, config.vocab_size, (256, 128))
        return Logits(BertForMaskedLM(config)), _token_loss, (tokens,), (tokens,), "adamw", 256
    if row == "resnet50":
        from torchvision.models import resnet50

        return (resnet50(), lambda o, y: F.cross_entropy(o, y), (torch.randn(256, 3, 224, 224),),
                (torch.randint(0, 1000, (256,)),), "sgd", 256)  # fmt: skip
    raise SystemExit(f"no row {row!r}; rows: {', '.join((*SMALL, *LARGE))}")


def Loss(model: Any, loss: Any, count: int) -> Any:
    """The model with its loss: nobody asks for the scores, as in the other contenders."""
    from torch import nn

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any) -> Any:
            return loss(self.model(*args[:count]), *args[count:])

    return WithLoss()


def _logits_class() -> Any:
    from torch import nn

    class Logits(nn.Module):
        """A model of transformers that returns its scores alone."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Any) -> Any:
            return self.inner(tokens).logits

    return Logits


def Logits(inner: Any) -> Any:
    return _logits_class()(inner)


def _token_loss(scores: Any, y: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def _optimizer(kind: str, model: Any, **more: Any) -> Any:
    import torch

    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **more)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **more)


# ---- the contenders ----


def timed(run: Callable[[int], None], steps: int, repeats: int = 5) -> list[float]:
    """Seconds a step."""
    import torch

    run(steps)
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run(steps)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / steps)
    return found


def tilework_small(row: str) -> dict[str, Any]:
    import torch

    import tilework

    model, x, y, o = small_row(row)
    optimizer = torch.optim.SGD(model.parameters(), **o)
    step = tilework.Step(model=model, inputs=(x,), targets=(y,), loss=torch.nn.functional.cross_entropy, optimizer=optimizer)
    path = Path("out") / "gpu" / f"{row}.pef"
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    made = tilework.compile(step, path, options=tilework.Options(device="cuda", programs="fused", tf32=row in TF32))
    compile_s = time.perf_counter() - begin
    begin = time.perf_counter()
    session = tilework.load(path)
    first = session.run(x, y)
    first_s = time.perf_counter() - begin
    steps = 5000 if row.endswith("-1") else 500
    xs, ys = (torch.cat([t] * steps).cuda() for t in (x, y))
    # The slices lie on the GPU, as the peers' do.
    times = timed(lambda n: session.run(xs, ys, num_steps=n, outputs="loss") and None, steps)
    profile = profiled(lambda: session.run(xs[: 20 * len(x)], ys[: 20 * len(y)], num_steps=20, outputs="loss"))
    return {"times": times, "compile_s": compile_s, "first_s": first_s, "first_loss": float(first.loss),
            "verified": made.verification.note, "profile_us": profile}  # fmt: skip


def tilework_large(row: str) -> dict[str, Any]:
    import torch

    import tilework

    model, loss, inputs, targets, kind, _ = large_row(row)
    step = tilework.Step(model=Loss(model, loss, len(inputs)), inputs=(*inputs, *targets), optimizer=_optimizer(kind, model),
                         precision="bfloat16", examples="shapes")  # fmt: skip
    path = Path("out") / "gpu" / f"{row}.pef"
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()

    def report(text: str) -> None:
        print(f"  {time.perf_counter() - begin:5.1f} {text}", file=sys.stderr, flush=True)

    tilework.compile(step, path, options=tilework.Options(device="cuda", programs="fused"), verify=False, report=report)
    compile_s = time.perf_counter() - begin
    begin = time.perf_counter()
    session = tilework.load(path)
    predicted = session._device.memory.num_bytes  # type: ignore[attr-defined]
    given = [t.cuda() for t in (*inputs, *targets)]
    first = session.run(*given, outputs="loss")
    first_s = time.perf_counter() - begin
    times = timed(lambda n: [session.run(*given, outputs="loss") for _ in range(n)] and None, 10, 4)
    profile = profiled(lambda: session.run(*given, outputs="loss"))
    return {"times": times, "compile_s": compile_s, "first_s": first_s, "first_loss": float(first.loss), "predicted": predicted,
            "peak": torch.cuda.max_memory_allocated(), "profile_us": profile}  # fmt: skip


def profiled(run: Callable[[], Any]) -> dict[str, list[int]]:
    """Kernel -> microseconds in all, and how often it ran."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    with profiling(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:25]
    return {e.key[:90]: [round(e.self_device_time_total), e.count] for e in events}


def torch_small(row: str, mode: str) -> dict[str, Any]:
    import torch

    model, x, y, o = small_row(row)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = row in TF32
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    optimizer = torch.optim.SGD(model.parameters(), fused=True, **o)
    return _torch(model, torch.nn.functional.cross_entropy, (x,), (y,), optimizer, mode, 200, None)


def torch_large(row: str, mode: str) -> dict[str, Any]:
    import torch

    model, loss, inputs, targets, kind, _ = large_row(row)
    model, inputs, targets = model.cuda(), tuple(t.cuda() for t in inputs), tuple(t.cuda() for t in targets)
    if inputs[0].dim() == 4:
        model = model.to(memory_format=torch.channels_last)
        inputs = tuple(t.to(memory_format=torch.channels_last) for t in inputs)
    torch.backends.cudnn.benchmark = True
    return _torch(model, loss, inputs, targets, _optimizer(kind, model, fused=True), mode, 10, torch.bfloat16)


def _torch(model: Any, loss: Any, inputs: Any, targets: Any, optimizer: Any, mode: str, steps: int, half: Any) -> dict[str, Any]:
    import torch

    def forward(*args: Any) -> Any:
        with torch.autocast("cuda", half, enabled=half is not None):
            return loss(model(*args[: len(inputs)]), *args[len(inputs) :])

    if mode != "eager":
        forward = torch.compile(forward, mode=None if mode == "compile" else mode.removeprefix("compile-"))

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = forward(*inputs, *targets)
        value.backward()
        optimizer.step()
        return value

    begin = time.perf_counter()
    first = float(step())
    first_s = time.perf_counter() - begin
    for _ in range(3):
        step()
    times = timed(lambda n: [step() for _ in range(n)] and None, steps, 4)
    return {"times": times, "first_s": first_s, "first_loss": first, "peak": torch.cuda.max_memory_allocated()}


def jax_small(row: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    model, x, y, o = small_row(row)
    weights = {k: jnp.asarray(v.detach().numpy()) for k, v in model.named_parameters()}
    velocity = jax.tree.map(jnp.zeros_like, weights)
    kind = row.rsplit("-", 1)[0]
    names = list(weights)

    def conv(x: Any, w: Any, b: Any, pad: int) -> Any:
        made = jax.lax.conv_general_dilated(x, w, (1, 1), [(pad, pad)] * 2, dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return made + b[None, :, None, None]

    def pool(x: Any) -> Any:
        n, c, h, w = x.shape
        return x.reshape(n, c, h // 2, 2, w // 2, 2).max((3, 5))

    def scores(w: Any, x: Any) -> Any:
        if kind == "lenet":
            pads = [2, 0]
            for i in (0, 1):
                x = pool(jax.nn.relu(conv(x, w[names[2 * i]], w[names[2 * i + 1]], pads[i])))
            x = x.reshape(x.shape[0], -1)
            layers = names[4:]
        else:
            layers = names
        for i in range(0, len(layers), 2):
            x = x @ w[layers[i]].T + w[layers[i + 1]]
            x = jax.nn.relu(x) if i + 2 < len(layers) else x
        return x

    def loss(w: Any, x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(scores(w, x)), y[:, None], 1).mean()

    def step(carry: Any, data: Any) -> Any:
        w, v = carry
        value, grads = jax.value_and_grad(loss)(w, *data)
        v = jax.tree.map(lambda a, g: o["momentum"] * a + g, v, grads)
        return (jax.tree.map(lambda a, b: a - o["lr"] * b, w, v), v), value

    count = 1000 if row.endswith("-1") else 200
    xs, ys = (jnp.asarray(t.numpy())[None].repeat(count, 0) for t in (x, y))
    best: dict[str, Any] = {}
    for unroll in (1, 8):
        run = jax.jit(lambda c, a, b, u=unroll: jax.lax.scan(step, c, (a, b), unroll=u))
        carry, losses = run((weights, velocity), xs, ys)
        losses.block_until_ready()
        first = float(losses[0])
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            carry, losses = run(carry, xs, ys)
            losses.block_until_ready()
            times.append((time.perf_counter() - begin) / count)
        if not best or statistics.median(times) < statistics.median(best["times"]):
            best = {"times": times, "first_loss": first, "unroll": unroll}
    return best


def contender(row: str, name: str) -> dict[str, Any]:
    small = row in SMALL
    if name == "tilework":
        return tilework_small(row) if small else tilework_large(row)
    if name.startswith("jax"):
        return jax_small(row)
    return torch_small(row, name) if small else torch_large(row, name)


# ---- the run ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="small", help="small, large, or names with commas: " + ", ".join((*SMALL, *LARGE)))
    parser.add_argument("--peers", default="", help="contenders with commas; by default " + ", ".join(SMALL_PEERS))
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--limit", type=float, default=200, help="seconds that a contender may take")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "CONTENDER"), help="this alone, in this process; prints JSON")
    args = parser.parse_args()
    if args.one:
        print("RESULT " + json.dumps(contender(*args.one)))
        return
    rows = {"small": SMALL, "large": LARGE}.get(args.rows) or tuple(args.rows.split(","))
    results: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": machine(), "rows": {}}
    for row in rows:
        names = tuple(args.peers.split(",")) if args.peers else (SMALL_PEERS if row in SMALL else LARGE_PEERS)
        for name in names:
            found = _in_a_process(row, name, args.limit)
            results["rows"].setdefault(row, {})[name] = found
            print(f"{row:<11} {name:<10} {_said(row, found)}", flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu.json").write_text(json.dumps(results, indent=1))
    (args.out / "gpu.md").write_text(table(results))
    print(table(results))


def _in_a_process(row: str, name: str, limit: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu", "--one", row, name]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in {limit:.0f} s"}
    line = next((x for x in made.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        return {"failed": "; ".join(made.stderr.strip().splitlines()[-4:])[-600:] or f"exit code {made.returncode}"}
    return dict(json.loads(line.removeprefix("RESULT ")))


def machine() -> dict[str, str]:
    import torch

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}


def value(row: str, found: dict[str, Any]) -> float | None:
    """In the row's unit."""
    if "times" not in found:
        return None
    seconds = statistics.median(found["times"])
    return seconds * 1e6 if row in SMALL else units(row) / seconds


def units(row: str) -> int:
    return {"unet": 256, "gpt2": 32 * 1024, "gpt2-xl": 8 * 1024, "bert-large": 256, "resnet50": 256}[row]


def _said(row: str, found: dict[str, Any]) -> str:
    number = value(row, found)
    if number is None:
        return str(found["failed"])
    more = [f"{k} {found[k]:.1f}" for k in ("compile_s", "first_s") if k in found]
    more += [f"{k} {found[k] / 1e9:.2f} GB" for k in ("predicted", "peak") if k in found]
    return f"{number:12.2f} {GOALS[row][0]:<12} first loss {found['first_loss']:.5f}  {'  '.join(more)}"


def table(results: dict[str, Any]) -> str:
    names = list(dict.fromkeys(n for found in results["rows"].values() for n in found))
    lines = ["| row | unit | " + " | ".join(names) + " | at least | goal |", "|---" * (len(names) + 4) + "|"]
    for row, found in results["rows"].items():
        unit, least, goal = GOALS[row]
        numbers = [value(row, found[n]) if n in found else None for n in names]
        cells = ["-" if v is None else f"{v:.2f}" if v < 1000 else f"{v:,.0f}" for v in numbers]
        lines.append(f"| `{row}` | {unit} | " + " | ".join(cells) + f" | {least:g} | {goal:g} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
