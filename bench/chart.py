"""The charts: speed compared with eager PyTorch (bench.png; short: speed.png), step time against batch and width (growth.png)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import ORDER

COLOURS = {
    "tilework": "#d1495b",
    "eager": "#6c757d",
    "eager-arrays": "#adb5bd",
    "compile-model": "#9ec5e8",
    "compile-step": "#3d85c6",
    "compile-step-max": "#1b4f80",
    "jax-jit": "#a3d9a5",
    "jax-scan": "#3a9d5d",
}
BAR, GAP = 0.19, 0.22  # inches a bar, and between the groups


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _times(value: float) -> str:
    return f"{value:.0f} x" if value >= 9.95 else f"{value:.1f} x" if value >= 1.995 else f"{value:.2f} x"


def draw_speeds(result: dict[str, Any], path: Path) -> bool:
    """A group a row, a bar a contender; the length is its speed, eager = 1, on a logarithmic scale."""
    rows = {k: r["contenders"] for k, r in result["rows"].items() if "eager" in r.get("contenders", {})}
    if not rows:
        return False
    plt = _pyplot()
    bars = sum(len(own) for own in rows.values())
    height = bars * BAR + len(rows) * GAP
    figure, axes = plt.subplots(figsize=(10, height + 1.2), dpi=110)
    place, speeds, middles = 0.0, [], []
    for own in rows.values():
        names = [c for c in ORDER if c in own]
        first = place
        for name in names:
            speed = own["eager"]["median"] / own[name]["median"]
            speeds.append(speed)
            left, width = min(1.0, speed), abs(speed - 1.0)
            axes.barh(place, width, BAR * 0.9, left=left, color=COLOURS[name], zorder=3)
            strong = "bold" if name == "tilework" else "normal"
            label = "1 x" if name == "eager" else _times(speed)
            axes.annotate(f"{label}  {name}", (max(speed, 1.0), place), xytext=(4, 0), textcoords="offset points",
                          va="center", fontsize=8, fontweight=strong, zorder=4)  # fmt: skip
            place += BAR
        middles.append((first + place - BAR) / 2)
        axes.axhline(place - BAR / 2 + GAP / 2, color="#e9ecef", linewidth=0.8, zorder=1)
        place += GAP
    axes.set_yticks(middles, list(rows), fontsize=10, fontweight="bold")
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - GAP / 2, -BAR / 2 - GAP / 2)
    axes.set_xscale("log")
    axes.set_xlim(min(0.9, min(speeds) * 0.9), max(speeds) * 4)  # room for the labels
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if min(speeds) * 0.9 <= t <= max(speeds) * 1.2]
    axes.set_xticks(ticks, [f"{t:g} x" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(1.0, color="#343a40", linewidth=1, zorder=5)
    axes.grid(axis="x", color="#dee2e6", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    machine, threads = result["machine"], result["settings"]["threads"]
    axes.set_xlabel("training speed compared with eager PyTorch (longer is faster; logarithmic)")
    figure.suptitle("Training steps on a CPU", fontsize=14, fontweight="bold", x=0.02, ha="left")
    axes.set_title(f"{machine['cpu']}, {threads} threads, torch {machine['torch']}, jax {machine['jax']}, {result['date'][:10]}",
                   fontsize=9, loc="left", color="#495057")  # fmt: skip
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True


def draw_summary(result: dict[str, Any], columns: dict[str, tuple[str, ...]], labels: dict[str, str], path: Path) -> None:
    """The README's chart: a group a row, a bar for the fastest variant of each framework, its speed compared with eager."""
    plt = _pyplot()
    colours = dict(zip(columns, ("#d1495b", "#6c757d", "#3d85c6", "#3a9d5d"), strict=True))
    figure, axes = plt.subplots(figsize=(9, 4.9), dpi=110)
    rows = [name for name in labels if "tilework" in result["rows"].get(name, {}).get("contenders", {})]
    others = [column for column in columns if column != "eager PyTorch"]
    most = 1.0
    for group, name in enumerate(rows):
        times = {c: [t["median"] for n, t in result["rows"][name]["contenders"].items() if n in columns[c]] for c in columns}
        speeds = {c: min(times["eager PyTorch"]) / min(times[c]) for c in others if times[c]}
        most = max(most, *speeds.values())
        for index, column in enumerate(others):
            if column not in speeds:
                continue
            speed, place = speeds[column], group + (index - 1) * 0.27
            axes.barh(place, speed - 1, 0.25, left=1, color=colours[column], zorder=3, label=column if group == 0 else None)
            axes.annotate(_times(speed), (max(speed, 1.0), place), xytext=(4, 0), textcoords="offset points", va="center",
                          fontsize=7.5, fontweight="bold" if speed == max(speeds.values()) else "normal", zorder=4)  # fmt: skip
    axes.set_yticks(range(len(rows)), [labels[name].replace("`", "") for name in rows], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.35, most * 1.9)
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if t <= most * 1.2]
    axes.set_xticks(ticks, [f"{t:g} x" for t in ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(1.0, color="#343a40", linewidth=1, zorder=5)
    axes.grid(axis="x", color="#e9ecef", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center right", bbox_to_anchor=(1.0, 0.42))
    axes.set_xlabel("training speed compared with eager PyTorch (logarithmic)", fontsize=9)
    axes.set_title(f"{result['machine']['cpu']}, {result['settings']['threads']} threads, {result['date'][:10]}", fontsize=8,
                   loc="left", color="#495057")  # fmt: skip
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Comment": result["date"]})  # which result it shows: a test compares it with the kept one
    plt.close(figure)


def draw_growth(growth: dict[str, Any], result: dict[str, Any], path: Path) -> bool:
    if not growth:
        return False
    plt = _pyplot()
    from matplotlib.ticker import LogLocator

    labels = {"batch": "batch size (LeNet)", "width": "width of both hidden layers (feed-forward net, batch 8)"}
    figure, all_axes = plt.subplots(1, len(growth), figsize=(5.6 * len(growth), 4.4), dpi=110, squeeze=False)
    for axes, (series, contenders) in zip(all_axes[0], growth.items(), strict=True):
        sizes: set[int] = set()
        for name in [c for c in ORDER if c in contenders]:
            points = sorted((int(size), seconds * 1e6) for size, seconds in contenders[name].items())
            sizes |= {size for size, _ in points}
            axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[name], label=name, markersize=4,
                      linewidth=2.4 if name == "tilework" else 1.5)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted(sizes), [str(s) for s in sorted(sizes)])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace(",", " "))
        axes.set_yticks([], minor=True)
        axes.set(xlabel=labels[series], ylabel="microseconds per training step")
        axes.grid(color="#dee2e6")
        axes.legend(frameon=False, fontsize=9)
    machine = result["machine"]
    figure.suptitle(f"Step time as batch and model grow ({machine['cpu']}, {result['settings']['threads']} threads)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True
