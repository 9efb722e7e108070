"""The growth chart: step time against batch size (LeNet) and against width (a feed-forward net at batch 8).

Each point is a row of its own, measured like the others but shorter, and every contender in its first variant only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .measure import measure_row
from .models import write_data
from .processes import Settings, Workers
from .rows import GROWTH_BATCHES, GROWTH_WIDTHS, row_named

Points = dict[str, dict[str, float]]
CONTENDERS = ("tilework", "eager", "compile-step", "jax-scan")
SERIES = {"batch": [f"lenet-b{n}" for n in GROWTH_BATCHES], "width": [f"ffn-w{n}" for n in GROWTH_WIDTHS]}


def measure_growth(series: str, contenders: list[str], settings: Settings, keep: Callable[[Points], None]) -> None:
    """{contender: {size: seconds a step}} of a series, given to `keep` after each point; sizes as text, as JSON has them."""
    short = replace(settings, rounds=min(settings.rounds, 3), slice_seconds=min(settings.slice_seconds, 0.25), quick=True)
    points: Points = {}
    with Workers("step", short) as workers:
        for name in SERIES[series]:
            row = row_named(name)
            write_data(row, settings.out)
            measured = measure_row(name, contenders, workers, row.rtol)
            for contender, values in measured["contenders"].items():
                points.setdefault(contender, {})[name.rsplit("-", 1)[1][1:]] = values["median"]
            keep(points)
