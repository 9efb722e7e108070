"""The benchmark's own judgement: targets and the guard against getting worse, on made-up numbers; and its kept results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench import rows, verdict  # noqa: E402


def row(**medians: float) -> dict:
    contenders = {name.replace("_", "-"): {"median": m} for name, m in medians.items()}
    return {"contenders": contenders, **verdict.ratios({"contenders": contenders})}


def test_ratios_are_against_the_fastest_peer() -> None:
    found = row(tilework=2.0, eager=100.0, jax_scan=5.0, compile_step=50.0)
    assert found["best_peer"] == "jax-scan" and found["vs_best_peer"] == 2.5 and found["vs_eager"] == 50


def test_targets_hold_or_fall_short() -> None:
    result = {"rows": {"logreg-1": row(tilework=2.0, eager=100.0, jax_scan=3.0), "ffn-64": row(tilework=1.0, eager=0.98)}}
    judged = {v["what"]: v["holds"] for v in verdict.must_hold(result)}
    assert judged == {
        "logreg-1: beside eager": True,
        "logreg-1: beside the best peer (jax-scan)": False,  # 1.5 where 2 is wanted
        "ffn-64: beside the best peer (eager)": True,  # 0.98: within the noise that is allowed
    }


def test_the_guard_names_rows_that_got_worse_by_a_tenth() -> None:
    kept = {"rows": {"a": row(tilework=1.0, eager=10.0), "b": row(tilework=1.0, eager=10.0), "c": row(tilework=1.0, eager=2.0)}}
    now = {"rows": {"a": row(tilework=1.0, eager=8.9), "b": row(tilework=1.0, eager=9.1), "new": row(tilework=9.0, eager=1.0)}}
    assert [w["row"] for w in verdict.regressions(now, kept)] == ["a"]


def test_only_peers_of_both_runs_count() -> None:
    kept = {"rows": {"a": row(tilework=1.0, eager=10.0, jax_scan=2.0)}}
    without = {"rows": {"a": row(tilework=1.0, eager=10.0)}}
    assert verdict.regressions(without, kept) == [], "a peer that was not measured is not an improvement or a loss"


def test_rows() -> None:
    assert {"logreg-1", "ffn-1", "ffn-64", "lenet-1", "lenet-64", "unet-4", "gpt-4"} <= set(rows.ROWS)
    assert rows.row_named("lenet-b16").batch == 16
    with pytest.raises(KeyError):
        rows.row_named("lenet-16")


def test_the_kept_results_are_whole() -> None:
    kept = json.loads((ROOT / "bench/results.json").read_text())
    assert set(rows.ROWS) | {"epoch", "call-item"} <= set(kept["rows"])
    for name, found in kept["rows"].items():
        assert {"tilework", "eager"} <= set(found["contenders"]), name
