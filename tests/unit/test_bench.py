"""The benchmark's own judgement: targets and the guard against getting worse, on made-up numbers; and its kept results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench import readme, rows, verdict  # noqa: E402


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
        "logreg-1: compared with eager": True,
        "logreg-1: compared with the best peer (jax-scan)": False,  # 1.5 where 2 is wanted
        "ffn-64: compared with the best peer (eager)": True,  # 0.98: within the noise that is allowed
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
    assert {"logreg-1", "ffn-1", "ffn-64", "lenet-1", "lenet-64", "unet-4", "lstm-32", "gpt-4"} <= set(rows.ROWS)
    assert rows.row_named("lenet-b16").batch == 16
    with pytest.raises(KeyError):
        rows.row_named("lenet-16")


def test_the_kept_results_are_whole() -> None:
    kept = json.loads((ROOT / "bench/results.json").read_text())
    assert set(rows.ROWS) | {"epoch", "call-item"} <= set(kept["rows"])
    for name, found in kept["rows"].items():
        assert {"tilework", "eager"} <= set(found["contenders"]), name


@pytest.mark.parametrize("page", [readme.README, readme.PAGE], ids=lambda p: p.name)
def test_the_pages_show_the_kept_results(page: Path) -> None:
    kept = json.loads(readme.KEPT.read_text())
    assert readme.pages(kept)[page] == page.read_text(), "run python -m bench.readme"


def test_the_chart_is_of_the_kept_results() -> None:
    from PIL import Image

    assert Image.open(readme.CHARTS["speed"]).text["Comment"] == json.loads(readme.KEPT.read_text())["date"]


def test_only_the_fastest_is_bold_and_every_time_has_its_spread() -> None:
    def timed(**medians: float) -> dict:
        return {name.replace("_", "-"): {"median": m, "iqr": m / 5} for name, m in medians.items()}

    won = readme._line("a", timed(tilework=1e-3, eager=4e-3, jax_jit=2e-3, jax_scan=3e-3))
    assert won == ["a", "**1 ms ± 10 %**", "4 ms ± 10 %", "", "2 ms ± 10 %", "4.00 x", "2.00 x"]
    lost = readme._line("b", timed(tilework=2.0, eager=4.0, compile_step=1.0), seconds=True)
    assert lost == ["b", "2.00 s ± 10 %", "4.00 s ± 10 %", "**1.00 s ± 10 %**", "", "2.00 x", "0.50 x"]


def test_the_markers_must_be_there() -> None:
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    assert readme.between_markers(text, "new") == f"before\n{readme.BEGIN}\nnew\n{readme.END}\nafter\n"
    with pytest.raises(SystemExit, match="markers"):
        readme.between_markers("no markers", "new")
