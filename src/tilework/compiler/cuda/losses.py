"""The gradient of cross entropy, straight from the scores: every score's own formula, rather than a gradient that is nearly all
zeros, its sum over each row, and the difference of the two."""

from __future__ import annotations

from typing import Any

import torch

from ..to_fx import Otherwise, Translation

aten = torch.ops.aten
_MEAN = 1  # how the losses of the rows become one


def _nll_backward(t: Translation, grad: Any, scores: Any, target: Any, weight: Any, reduction: int, ignored: int,
                  total: Any) -> Any:  # fmt: skip
    made = t.inline(aten.nll_loss_backward.default, (grad, scores, target, weight, reduction, ignored, total), {})
    if weight is None and scores.meta["val"].dim() == 2:
        t.kept["gradient of", made] = (grad, target, reduction, ignored, total)
    return made


def _log_softmax_backward(t: Translation, grad: Any, logs: Any, dim: int, dtype: torch.dtype) -> Any:
    found = t.kept.get(("gradient of", grad))
    if found is None or dim % logs.meta["val"].dim() != 1:
        return t.inline(aten._log_softmax_backward_data.default, (grad, logs, dim, dtype), {})
    above, target, reduction, ignored, total = found

    def formula(logs: torch.Tensor, above: torch.Tensor, target: torch.Tensor, total: torch.Tensor,
                classes: torch.Tensor) -> torch.Tensor:  # fmt: skip
        each = above / total if reduction == _MEAN else above
        rows = torch.where(target != ignored, each, torch.zeros_like(each)).unsqueeze(1)
        chosen = classes.unsqueeze(0) == target.unsqueeze(1)
        return (rows * (torch.exp(logs) - chosen.to(logs.dtype))).to(dtype)

    return t.trace(formula, logs, above, target, total, t.counting(logs.meta["val"].shape[1]))


WRITTEN: dict[str, Otherwise] = {
    "aten.nll_loss_backward.default": _nll_backward,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
}
