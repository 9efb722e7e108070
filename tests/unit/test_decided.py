"""How the check of a compile tells rounding, and jumps of the model, from faults."""

from __future__ import annotations

import pytest

from tilework.check.check import _SHAKEN, _decided, _Judged
from tilework.check.compare import Row

KEY = ("step", "gradient", "w")


@pytest.mark.parametrize(
    ("error", "moves", "right"),
    [
        (5e-3, [1e-6, 5e-3, 6e-3, 5e-3, 5e-3, 6e-3], True),  # a ReLU flips as soon as it is shaken a little more
        (5e-3, [1e-6 * units / _SHAKEN[0] for units in _SHAKEN], False),  # eager moves smoothly, and not nearly so far
        (2e-5, [1e-6 * units / _SHAKEN[0] for units in _SHAKEN], True),  # rounding that the model magnifies
        (5e-3, [0.0] * len(_SHAKEN), False),
        (0.5, [2e-2] * len(_SHAKEN), False),  # chaos: nothing can be said
    ],
)
def test_decided(error: float, moves: list[float], right: bool) -> None:
    row = Row("gradient", "w", error, 1e-5, False, program="step", share=1.0)
    (judged,) = _decided([row], [{KEY: m} for m in moves], low=False)
    assert judged.ok is right


@pytest.mark.parametrize(("error", "noise", "right"), [(0.05, 0.06, True), (0.05, 0.04, False), (0.3, 0.5, False)])
def test_of_16_bits_no_more_than_eager_moves_itself(error: float, noise: float, right: bool) -> None:
    row = Row("gradient", "w", error, 0.02, False, program="step", share=1.0)
    (judged,) = _decided([row], [{KEY: noise * units / _SHAKEN[0]} for units in _SHAKEN], low=True)
    assert judged.ok is right


@pytest.mark.parametrize(("moves", "jumps"), [([1e-6, 0.11], True), ([0.2, 0.2], True), ([1e-3, 2e-2], False), ([], False)])
def test_other_weights_are_tried_where_eager_jumps_as_far(moves: list[float], jumps: bool) -> None:
    row = Row("gradient", "w", 0.12, 1e-5, False, program="step", share=1.0)
    here = _Judged("cpu", [row], [{KEY: m} for m in moves])
    assert here.jumps is jumps


def test_a_row_is_right_if_it_is_at_other_weights() -> None:
    wrong = [Row("gradient", name, 0.12, 1e-5, False, program="step", share=1.0) for name in ("w", "v")]
    there = [Row("gradient", "w", 1e-6, 1e-5, True, program="step", share=1.0), wrong[1]]
    first, second = _Judged("cpu", wrong, []).or_there(_Judged("cpu", there, [])).rows
    assert first.ok and first.note.startswith("compared roughly")
    assert second is wrong[1]
