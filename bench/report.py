"""The result as a table (Markdown) and as JSON. Written again after every row, so that a run that is ended keeps what it had."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .epochs import EPOCH_SAMPLES
from .measure import NOISY
from .worker import STEP_CONTENDERS

ORDER = [*STEP_CONTENDERS, "eager-arrays"]


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


def table(head: list[str], lines: list[list[str]], text: tuple[int, ...] = (0,)) -> str:
    """A Markdown table, padded so that it reads well as plain text too. `text` are the columns to align left."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]

    def one(cells: list[str]) -> str:
        padded = [c.ljust(w) if i in text else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 2) if i in text else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([one(head), rule, *(one(line) for line in lines)])


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us" if seconds < 1e-4 else f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def markdown(result: dict[str, Any], variants: bool = True, title: bool = True) -> str:
    """All tables; the long one with the variants only where wanted."""
    machine, settings = result["machine"], result["settings"]
    parts = ["# Tilework compared with eager PyTorch, torch.compile and JAX"] if title else []
    parts += [
        f"{result['date']} · `{result['command']}` · {settings['threads']} threads · {machine['cpu']}, {machine['cores']} cores"
        f" · torch {machine['torch']} · jax {machine['jax']} · median of {settings['rounds']} rounds",
    ]
    for section in (_steps, _epochs, _cold_start, _compile_time, _overhead, _verdicts, _regressions, _notes):
        parts += section(result)
    parts += _settings(result) if variants else []
    return "\n\n".join(parts) + "\n"


def _steps(result: dict[str, Any]) -> list[str]:
    rows = {k: r for k, r in result["rows"].items() if "contenders" in r}
    if not rows:
        return []
    columns = [c for c in ORDER if any(c in r["contenders"] for r in rows.values())]
    lines = []
    for name, row in rows.items():
        own = row["contenders"]
        cells = [duration(own[c]["median"]) if c in own else "" for c in columns]
        ratios = [f"{row[k]:.2f} x" if k in row else "" for k in ("vs_eager", "vs_best_peer")]
        lines.append([name, *cells, *ratios, row.get("best_peer", "")])
    return [
        "## Time of a training step",
        table(["row", *columns, "vs eager", "vs best peer", "best peer"], lines, (0, len(columns) + 3)),
    ]


def _epochs(result: dict[str, Any]) -> list[str]:
    own = result["rows"].get("epoch", {}).get("contenders")
    if not own:
        return []
    lines = [[c, f"{v['median'] * EPOCH_SAMPLES:.2f} s", str(v["steps_a_slice"]), v["setting"]] for c, v in own.items()]
    head = ["contender", "epoch", "samples measured", "with"]
    return [f"## An epoch of logistic regression, {EPOCH_SAMPLES} samples, batch 1", table(head, lines, (0, 3))]


def _cold_start(result: dict[str, Any]) -> list[str]:
    found = []
    for name, row in result.get("cold_start", {}).items():
        lines = [[c, f"{v['whole']['median']:.2f} s", f"{v['beyond']['median']:.3f} s"] for c, v in row["contenders"].items()]
        found += [f"## Cold start to the first step: {name}", table(["", "whole", "without importing the framework"], lines)]
    return found


def _compile_time(result: dict[str, Any]) -> list[str]:
    lines = [[k, f"{v['all']:.2f} s", f"{v['fused']:.2f} s"] for k, v in result.get("compile_time", {}).items() if "fused" in v]
    return ["## Tilework's compile time", table(["row", "default options", 'programs="fused"'], lines)] if lines else []


def _overhead(result: dict[str, Any]) -> list[str]:
    o = result.get("overhead")
    if not o:
        return []
    return [f"Tilework's overhead: {o['loop_us']:.2f} us per step in a loop, {o['call_us']:.2f} us per call from Python."]


def _verdicts(result: dict[str, Any]) -> list[str]:
    lines = [[v["what"], v["target"], f"{v['value']:.2f} {v['unit']}", "pass" if v["holds"] else "MISSED"]
             for v in result.get("must_hold", [])]  # fmt: skip
    return ["## Targets", table(["", "target", "measured", "result"], lines, (0, 3))] if lines else []


def _regressions(result: dict[str, Any]) -> list[str]:
    if "regressions" not in result:
        return []
    lines = [f"- {r['row']}: {r['now']:.2f} x compared with {r['peer']}; before: {r['kept']:.2f} x compared with {r['kept_peer']}"
             + (" (noisy)" if r["noisy"] > NOISY else "") for r in result["regressions"]]  # fmt: skip
    return ["## More than 10 % worse than the kept results", "\n".join(lines) if lines else "None."]


def _settings(result: dict[str, Any]) -> list[str]:
    lines = []
    for name, row in result["rows"].items():
        for contender, v in row.get("contenders", {}).items():
            others = {k: duration(t) if isinstance(t, float) else "failed" for k, t in v["trials"].items() if k != v["setting"]}
            tried = "; ".join(f"{k} {t}" for k, t in others.items())
            lines.append([name, contender, duration(v["median"]), f"{v['iqr'] / v['median']:.0%}", v["setting"], tried])
    head = ["row", "contender", "median", "IQR", "variant", "also tried"]
    return ["## The variant used for each contender", table(head, lines, (0, 1, 4, 5))] if lines else []


def _notes(result: dict[str, Any]) -> list[str]:
    notes = []
    cold = {f"cold-start {name}": row for name, row in result.get("cold_start", {}).items()}
    for name, row in {**result["rows"], **cold}.items():
        notes += [f"- {name}, {c}: left out: {why}" for c, why in row.get("skipped", {}).items()]
        if "error" in row:
            notes.append(f"- {name}: {row['error']}")
        if row.get("others_busy", 0.0) > NOISY:
            notes.append(f"- {name}: noisy, other processes used {row['others_busy']:.0%} of the cores while it was timed")
    notes += [f"- {text}" for text in result.get("notes", [])]
    return ["## Notes", "\n".join(notes)] if notes else []
