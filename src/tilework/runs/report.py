"""One page of HTML that compares runs: a table, and curves as SVG. It needs nothing beside it, and no network."""

from __future__ import annotations

import html
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from .checkpoints import Checkpoints
from .folder import NOTE, RunFolder

POINTS = 400  # of a curve: each is the mean of as many steps as it takes
COLORS = ("#2563a8", "#c2541b", "#3a7d34", "#8a4fa3", "#a8873a", "#b03a5b", "#3f8f8f", "#6b6b6b")
WIDTH, HEIGHT, LEFT, RIGHT, BELOW, ABOVE = 860, 300, 64, 28, 34, 12
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Summary:
    name: str
    state: str
    step: int
    steps: int
    loss: float | None
    best: float | None
    rate: float | None  # samples per second, the median of all steps
    started: str
    data: str
    artifact: str
    checkpoints: list[int]
    note: dict[str, Any]


def summary(path: Path) -> Summary:
    folder = RunFolder(path)
    note = folder.read()
    if not note:
        raise UserError("run-folder", f"{path} has no run", expected=f"a folder with {NOTE}", fix="tilework runs lists them")
    lines = list(folder.metrics())
    losses = [m["loss"] for m in lines]
    rates = sorted(m["samples_per_second"] for m in lines)
    tail = losses[-max(1, len(losses) // 50) :]
    return Summary(
        name=str(path),
        state=_state(folder, note),
        step=lines[-1]["step"] if lines else 0,
        steps=int(note.get("steps", 0)),
        loss=sum(tail) / len(tail) if tail else None,
        best=min(losses, default=None),
        rate=rates[len(rates) // 2] if rates else None,
        started=str(note.get("started", "")),
        data=str(note.get("source", "")),
        artifact=str(note.get("artifact", "")),
        checkpoints=Checkpoints(folder.checkpoints, rank=1).steps(),  # rank 1 only looks
        note=note,
    )


def _state(folder: RunFolder, note: dict[str, Any]) -> str:
    """What it says, unless it was killed and could not say how it ended."""
    state = str(note.get("state", ""))
    here = note.get("environment", {}).get("machine") == platform.node()
    return "killed" if state == "running" and here and folder.trainer() is None else state


def find(folder: Path) -> list[Path]:
    """Runs below a folder, oldest first."""
    found = [p.parent for p in folder.rglob(NOTE) if RunFolder(p.parent).read().get("started")]
    return sorted(found, key=lambda p: str(RunFolder(p).read()["started"]))


def page(paths: Sequence[Path]) -> str:
    runs = [summary(p) for p in paths]
    curves = [list(RunFolder(p).metrics()) for p in paths]
    losses = [thinned([(m["step"], m["loss"]) for m in c]) for c in curves]
    rates = [thinned([(m["step"], m["samples_per_second"]) for m in c]) for c in curves]
    names = [r.name for r in runs]
    norms = [thinned([(m["step"], m["grad_norm"]) for m in c if "grad_norm" in m]) for c in curves]
    parts = [_table(runs), "<h2>Loss</h2>", chart(names, losses)]
    parts += ["<h2>Gradient norm</h2>", chart(names, norms)] if any(norms) else []
    parts += ["<h2>Samples per second</h2>", chart(names, rates)]
    parts += [f"<h2>{html.escape(r.name)}</h2>{_facts(r)}" for r in runs]
    title = "Run " + names[0] if len(names) == 1 else f"{len(names)} runs"
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def thinned(points: Points) -> Points:
    """At most POINTS of them, each the mean of its neighbours. What is not a number is left out."""
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if len(points) <= POINTS:
        return points
    found = []
    for i in range(POINTS):
        part = points[i * len(points) // POINTS : (i + 1) * len(points) // POINTS]
        found.append((part[-1][0], sum(y for _, y in part) / len(part)))
    return found


def chart(names: Sequence[str], curves: Sequence[Points]) -> str:
    """Lines over the number of the step; with a logarithmic scale where values differ by more than a hundred times."""
    every = [p for c in curves for p in c]
    if not every:
        return "<p>Nothing was recorded.</p>"
    low, high = min(y for _, y in every), max(y for _, y in every)
    logarithmic = low > 0 and high / low > 100
    scale = math.log10 if logarithmic else float
    bottom, top = scale(low), scale(high)
    if top == bottom:
        bottom, top = bottom - 0.5, top + 0.5
    last = max(x for x, _ in every)
    first = min(x for x, _ in every)
    first = 0 if first < last / 10 or first == last else first

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        up = ABOVE + (top - scale(y)) / (top - bottom) * (HEIGHT - ABOVE - BELOW)
        return round(across, 1), round(up, 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(", ".join(names))}">']
    for i in range(5):
        value = bottom + (top - bottom) * i / 4
        value = 10**value if logarithmic else value
        y = place(first, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick(value)}</text>')
        step = first + (last - first) * i / 4
        x = place(step, low)[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{tick(step)}</text>')
    for i, points in enumerate(curves):
        line = " ".join(f"{x},{y}" for x, y in (place(*p) for p in points))
        name = html.escape(names[i])
        parts.append(f'<polyline stroke="{COLORS[i % len(COLORS)]}" points="{line}"><title>{name}</title></polyline>')
    parts.append("</svg>")
    legend = "".join(
        f'<li><i style="background:{COLORS[i % len(COLORS)]}"></i>{html.escape(n)}</li>' for i, n in enumerate(names)
    )
    return "".join(parts) + f"<ul class=legend>{legend}</ul>"


def number(value: float | None, digits: int = 4) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def tick(value: float) -> str:
    """Three digits, with k for thousands and M for millions."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1000 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _table(runs: Sequence[Summary]) -> str:
    head = "<tr><th>run<th>state<th>step<th>loss<th>best<th>samples/s<th>started<th>data</tr>"
    rows = [
        f"<tr><td>{html.escape(r.name)}<td>{html.escape(r.state)}<td>{r.step} of {r.steps}<td>{number(r.loss)}"
        f"<td>{number(r.best)}<td>{number(r.rate)}<td>{html.escape(r.started)}<td>{html.escape(r.data)}</tr>"
        for r in runs
    ]
    return f"<div class=wide><table class=runs>{head}{''.join(rows)}</table></div>"


def _facts(run: Summary) -> str:
    rows = {**run.note, "checkpoints": ", ".join(map(str, run.checkpoints)) or "none"}
    lines = "".join(f"<tr><th>{html.escape(str(k))}<td>{html.escape(_text(v))}</tr>" for k, v in rows.items())
    return f"<div class=wide><table>{lines}</table></div>"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }}
td {{ font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }}
.runs td, .runs th {{ white-space: nowrap; }}
svg {{ width: 100%; height: auto; }}
svg text {{ font-size: 12px; fill: currentColor; }}
polyline {{ fill: none; stroke-width: 2; stroke-linejoin: round; }}
.grid {{ stroke: var(--line); }}
.legend {{ list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; }}
.legend i {{ display: inline-block; width: 1.2rem; height: .25rem; margin-right: .5rem; vertical-align: middle; }}
</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""
