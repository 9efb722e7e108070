"""The kept results (bench/results.json) as they stand in README.md and docs/benchmark.md.

    python -m bench.readme     writes the table between the markers in both pages, the page's other tables, and the charts

`python -m bench --keep` does the same with what it has just measured. A test compares the pages with the kept results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .report import duration, markdown, table
from .verdict import must_hold

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "bench" / "results.json"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmark.md"
CHARTS = {
    "speed": ROOT / "docs" / "images" / "speed.png",
    "all": ROOT / "docs" / "benchmark.png",
    "growth": ROOT / "docs" / "growth.png",
}
BEGIN, END = "<!-- benchmark: written by python -m bench.readme -->", "<!-- end of benchmark -->"
COLUMNS = {  # of the short table: the fastest of these contenders
    "Tilework": ("tilework",),
    "eager PyTorch": ("eager", "eager-arrays"),
    "torch.compile": ("compile-model", "compile-step", "compile-step-max"),
    "JAX": ("jax-jit", "jax-scan", "jax-cache", "jax-export"),
}
LABELS = {
    "logreg-1": "logistic regression, batch 1",
    "ffn-1": "784-512-256-10, batch 1",
    "ffn-64": "784-512-256-10, batch 64",
    "lenet-1": "LeNet, batch 1",
    "lenet-64": "LeNet, batch 64",
    "unet-4": "U-Net 64 x 64, batch 4",
    "lstm-32": "LSTM 256 wide, 50 time steps, batch 32",
    "gpt-4": "GPT, 4 layers of 256, batch 4",
    "epoch": "epoch of 60 000 samples with its loader, per step",
    "call-item": "one call and one `.item()` per step",
}


def summary(result: dict[str, Any]) -> str:
    """One table: a row a model, the fastest variant of each framework, the fastest of all in bold."""
    lines = []
    for name, label in LABELS.items():
        if name in result["rows"] and "tilework" in result["rows"][name].get("contenders", {}):
            lines.append(_line(label, result["rows"][name]["contenders"]))
    for name, row in result.get("cold_start", {}).items():
        model = LABELS[name].split(",")[0]
        for part, words in (("whole", "new process to first step"), ("beyond", "that, after importing the framework")):
            own = {contender: times[part] for contender, times in row["contenders"].items()}
            if "tilework" in own:
                lines.append(_line(f"{words}: {model}", own, seconds=True))
    head = ["", *COLUMNS, "compared with eager", "compared with the best other"]
    return "\n\n".join([_caption(result), table(head, lines), _rest(result)])


def _times(ratio: float) -> str:
    return f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.3g} x"


def _line(label: str, contenders: dict[str, Any], seconds: bool = False) -> list[str]:
    best = {}
    for column, names in COLUMNS.items():
        measured = [contenders[n] for n in names if n in contenders]
        if measured:
            best[column] = min(measured, key=lambda times: times["median"])
    fastest = min(best, key=lambda column: best[column]["median"])
    cells = []
    for column in COLUMNS:
        if column not in best:
            cells.append("")
            continue
        median, iqr = best[column]["median"], best[column]["iqr"]
        text = f"{f'{median:.2f} s' if seconds else duration(median)} ± {iqr / 2 / median * 100:.0f} %"
        cells.append(f"**{text}**" if column == fastest else text)
    own = best["Tilework"]["median"]
    others = [times["median"] for column, times in best.items() if column != "Tilework"]
    eager = _times(best["eager PyTorch"]["median"] / own) if "eager PyTorch" in best else ""
    return [label, *cells, eager, _times(min(others) / own) if others else ""]


def _caption(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    days = sorted({row.get("date", result["date"])[:10] for row in result["rows"].values()} | {result["date"][:10]})
    return (
        f"Time per training step: median ± half the interquartile range of {settings['rounds']} rounds (5 for the large models). "
        f"The fastest is in bold. {machine['cpu']}, {settings['threads']} threads, float32, torch {machine['torch']}, "
        f"jax {machine['jax']}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, commit {machine['commit']}."
    )


def _rest(result: dict[str, Any]) -> str:
    parts = []
    compiled = {
        LABELS[name].split(",")[0]: times["all"] for name, times in result.get("compile_time", {}).items() if "all" in times
    }
    if compiled:
        times = ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in compiled.items())
        parts.append(f"A compile takes {times}.")
    if "overhead" in result:
        parts.append(f"Tilework's own overhead is {result['overhead']['call_us']:.1f} us per call from Python and "
                     f"{result['overhead']['loop_us']:.2f} us per step in a loop.")  # fmt: skip
    return " ".join(parts)


def _growth(result: dict[str, Any]) -> str:
    """Where in the growth charts another contender is faster."""
    models = {"batch": "LeNet, batch", "width": "feed-forward net at batch 8, width"}
    lost = []
    for series, contenders in result.get("growth", {}).items():
        sizes = []
        for size, seconds in contenders.get("tilework", {}).items():
            others = {c: points[size] for c, points in contenders.items() if c != "tilework" and size in points}
            best = min(others, key=others.__getitem__, default=None)
            if best is not None and others[best] < seconds:
                sizes.append(f"{size} ({best}, {seconds / others[best]:.2f} x as fast)")
        lost += [f"{models[series]} {', '.join(sizes)}"] if sizes else []
    return f"In the growth charts below, another contender is faster at: {'; '.join(lost) or 'no size'}."


def between_markers(text: str, content: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the markers are missing: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{content}\n{END}{after}"


def pages(result: dict[str, Any]) -> dict[Path, str]:
    """What README.md and docs/benchmark.md must be."""
    short = summary(result)
    result = result | {"must_hold": must_hold(result)}
    full = f"{short} {_growth(result)}\n\n{markdown(result, title=False)}".rstrip()
    return {README: between_markers(README.read_text(), short), PAGE: between_markers(PAGE.read_text(), full)}


def write(result: dict[str, Any]) -> list[Path]:
    from .chart import draw_growth, draw_speeds, draw_summary

    for path, text in pages(result).items():
        path.write_text(text)
    draw_summary(result, COLUMNS, LABELS, CHARTS["speed"])
    draw_speeds(result, CHARTS["all"])
    draw_growth(result.get("growth", {}), result, CHARTS["growth"])
    return [README, PAGE, *CHARTS.values()]


if __name__ == "__main__":
    for written in write(json.loads(KEPT.read_text())):
        print(f"written: {written.relative_to(ROOT)}")
