"""Tensor by tensor: the error, the tolerance for its dtype, pass or fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Largest error, relative to the largest magnitude in the tensor, that counts as the same arithmetic in another order.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BF16_COMPUTE = 3e-2  # float32 tensors that were computed through bf16 products
TF32_COMPUTE = 4e-3  # and through products with TF32, whose numbers have as many digits as float16's
# A tensor is never judged on a scale finer than this part of the largest of its kind: a gradient that cancels to zero (a
# bias before a BatchNorm) holds the rounding noise of the terms that cancelled.
_FLOOR = 1e-2
MOST_LATER = 0.1  # a later step may be `later` times further off, up to this


@dataclass(frozen=True)
class Row:
    kind: str  # output, gradient, parameter, state, buffer
    name: str
    error: float
    tolerance: float
    ok: bool
    note: str = ""
    program: str = ""  # the program that is to blame if it is not ok
    role: str = ""  # what that program does: step, fwd, infer and so on
    share: float = float("inf")  # the error, relative to the largest magnitude among all tensors of its kind

    def __str__(self) -> str:
        if self.error == float("inf") or self.note:
            return f"{self.kind} {self.name}: {self.note or 'not a number on one side'}"
        return (
            f"{self.kind} {self.name}: off by {self.error:.1e} of its largest element, where rounding makes {self.tolerance:.0e}"
        )


def scale_of(tensors: Mapping[str, Tensor]) -> float:
    """The largest magnitude among tensors of one kind: rounding noise in any of them is a part of this."""
    values = [t.detach() for t in tensors.values() if t.is_floating_point() and t.numel()]
    return max((float(torch.where(v.isfinite(), v, 0.0).abs().max()) for v in values), default=0.0)


def _as_real(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t for k, t in tensors.items()}


def compare(
    kind: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    computed: float = 0.0,
    allowance: Mapping[str, Tensor] | None = None,
    later: float = 1.0,
    mixed: bool = False,
) -> list[Row]:
    """A row for every expected tensor. `allowance` widens the tolerance, element by element, where the arithmetic itself
    magnifies rounding noise (a normalised update of a gradient that is nearly zero); `later`, for all of them.
    `computed`: the tolerance that goes with how they were computed, where that is wider than their type's. `mixed`: float64
    tensors may have been computed through float32."""
    found, expected = _as_real(found), _as_real(expected)
    by_ending: dict[str, dict[str, Tensor]] = {}  # of optimizer state, exp_avg and exp_avg_sq have scales of their own
    for name, want in expected.items():
        by_ending.setdefault(name.rpartition("/")[2] if kind == "state" else "", {})[name] = want
    scales = {name: scale for group in by_ending.values() for scale in [scale_of(group)] for name in group}
    largest = max(scales.values(), default=0.0) or 1.0
    rows = []
    for name, want in expected.items():
        overall = scales[name] if kind in ("gradient", "state") else 0.0
        have = found.get(name)
        if have is None:
            rows.append(Row(kind, name, float("inf"), 0.0, False, "missing in the artifact's results"))
            continue
        if have.shape != want.shape:
            note = f"shape {list(have.shape)} instead of {list(want.shape)}"
            rows.append(Row(kind, name, float("inf"), 0.0, False, note))
            continue
        if not want.is_floating_point():
            wrong = int((have != want).sum())
            rows.append(Row(kind, name, float(wrong), 0.0, wrong == 0, f"{wrong} elements differ" if wrong else ""))
            continue
        tolerance = TOLERANCE.get(want.dtype, 1e-5)
        if mixed and want.dtype == torch.float64:
            tolerance = TOLERANCE[torch.float32]
        tolerance = max(tolerance, computed)
        tolerance = min(tolerance * later, max(tolerance, MOST_LATER))
        have, want = have.detach().double(), want.detach().double()
        finite = want[want.isfinite()]
        scale = max(float(finite.abs().max()) if finite.numel() else 0.0, _FLOOR * overall, 1e-30)
        difference = (have - want).abs()
        both_odd = (have == want) | (have.isnan() & want.isnan())  # equal infinities, and NaN on both sides
        difference = torch.where(both_odd, torch.zeros_like(difference), difference)
        note = ""
        if allowance and name in allowance:
            excess = (difference - allowance[name].double()).clamp(min=0)
            if float(difference.max()) / scale > tolerance >= float(excess.max()) / scale:
                note = "within what rounding noise in the gradient explains"
            difference = excess
        error = float(difference.max()) / scale if want.numel() else 0.0
        error = float("inf") if error != error else error  # NaN on one side only
        rows.append(Row(kind, name, error, tolerance, error <= tolerance, note, share=error * scale / largest))
    return rows
