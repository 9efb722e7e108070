"""Attention. Graphs are captured on the host, whose fused operator they name; here it is the GPU's, or its formula where there is
none (float32, a mask, an odd head size). Both keep the same two results: the output, and the logarithm of each row's sum."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from ..to_fx import Otherwise, Translation

aten = torch.ops.aten


def by_cudnn() -> bool:
    """Faster than torch's own kernels on GPUs of 2022 and later, but its gradients are added up in no fixed order."""
    return os.environ.get("TILEWORK_DETERMINISTIC", "") in ("", "0")


def _kind(x: Any) -> torch.Tensor:
    return x.meta["val"]  # type: ignore[no-any-return]


def _fused(q: Any, k: Any, v: Any, mask: Any, causal: bool = False) -> bool:
    """The GPU's causal kernel lets the last query see the last key; the graph's means that the first sees the first. With as many
    of both they agree."""
    half = _kind(q).dtype in (torch.bfloat16, torch.float16)
    head = _kind(q).shape[-1]
    square = not causal or _kind(q).shape[-2] == _kind(k).shape[-2]
    return half and mask is None and head % 8 == 0 and head <= 256 and square and _kind(q).shape[:2] == _kind(k).shape[:2]


def _usable(mask: Any, k: Any) -> bool:
    """The GPU's kernel reads the mask 16 bytes at a time."""
    return mask is not None and _kind(mask).dim() == 4 and _kind(k).shape[-2] % 8 == 0 and _kind(mask).shape[-1] != 1


def _cudnns(q: Any, k: Any) -> bool:
    """Of the sizes that cuDNN has a backward pass for on every GPU; torch's own kernels take the others."""
    rows, head = _kind(q).shape[-2:]
    return by_cudnn() and head <= 128 and rows % 64 == 0 and _kind(k).shape[-2] == rows


def _expanded(t: Translation, mask: Any, q: Any, k: Any) -> Any:
    shape = [*_kind(q).shape[:3], _kind(k).shape[2]]
    made = t.trace(lambda m: m.to(_kind(q).dtype).contiguous(), mask)
    return t.emit(aten.expand.default, made, shape)


def _forward(t: Translation, q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *, attn_mask: Any = None,
             scale: float | None = None) -> Any:  # fmt: skip
    if _fused(q, k, v, attn_mask, causal) and _cudnns(q, k):
        made = t.emit(aten._scaled_dot_product_cudnn_attention.default, q, k, v, None, True, 0.0, causal, False, scale=scale)
        rows = t.emit(aten.squeeze.dim, made[1], -1)
        t.kept[rows] = made
        return made[0], rows
    if _fused(q, k, v, attn_mask, causal):
        made = t.emit(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, causal, False, scale=scale)
        t.kept[made[1]] = made
        return made[:2]
    if _fused(q, k, v, None) and _usable(attn_mask, k):
        bias = _expanded(t, attn_mask, q, k)
        out, row, seed, offset = t.emit(aten._scaled_dot_product_efficient_attention.default, q, k, v, bias, True, 0.0, causal,
                                        scale=scale)  # fmt: skip
        length = _kind(q).shape[-2]
        rows = row if _kind(row).shape[-1] == length else t.emit(aten.slice.Tensor, row, 2, 0, length)
        t.kept[rows] = (bias, row, seed, offset)
        return out, rows
    scale = scale or 1 / math.sqrt(_kind(q).shape[-1])

    def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _scores(q, k, scale, causal, mask)
        row = torch.logsumexp(scores, -1)
        weights = torch.softmax(scores, -1).to(q.dtype)
        return weights @ v, row

    return t.trace(formula, q, k, v, *([] if attn_mask is None else [attn_mask]))


def _backward(t: Translation, grad: Any, q: Any, k: Any, v: Any, out: Any, row: Any, dropout: float, causal: bool, *,
              attn_mask: Any = None, scale: float | None = None) -> Any:  # fmt: skip
    if row in t.kept and attn_mask is not None:
        bias, whole, seed, offset = t.kept[row]
        made = t.emit(aten._scaled_dot_product_efficient_attention_backward.default, grad, q, k, v, bias, out, whole, seed,
                      offset, 0.0, [True, True, True, False], causal, scale=scale)  # fmt: skip
        return made[:3]
    if row in t.kept and _cudnns(q, k):
        _, sums, _, _, max_q, max_k, seed, offset, _ = t.kept[row]
        return t.emit(aten._scaled_dot_product_cudnn_attention_backward.default, grad, q, k, v, out, sums, seed, offset, None,
                      None, None, max_q, max_k, 0.0, causal, scale=scale)  # fmt: skip
    if row in t.kept:
        _, _, cum_q, cum_k, max_q, max_k, seed, unused, *_ = t.kept[row]
        return t.emit(aten._scaled_dot_product_flash_attention_backward.default, grad, q, k, v, out, row, cum_q, cum_k, max_q,
                      max_k, 0.0, causal, seed, unused, scale=scale)  # fmt: skip
    scale = scale or 1 / math.sqrt(_kind(q).shape[-1])

    def formula(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, row: torch.Tensor,
                *mask: torch.Tensor) -> tuple[torch.Tensor, ...]:  # fmt: skip
        weights = torch.exp(_scores(q, k, scale, causal, mask) - row.unsqueeze(-1))
        share = (grad.float() * out.float()).sum(-1, keepdim=True)
        inner = (grad @ v.transpose(-1, -2)).float() - share
        scores = (weights * inner * scale).to(q.dtype)
        return scores @ k, scores.transpose(-1, -2) @ q, weights.to(q.dtype).transpose(-1, -2) @ grad

    return t.trace(formula, grad, q, k, v, out, row, *([] if attn_mask is None else [attn_mask]))


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, mask: tuple[torch.Tensor, ...]) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)).float() * scale
    for m in mask:
        scores = scores + m
    if causal:
        rows = torch.arange(q.shape[-2], device=q.device)[:, None]
        scores = torch.where(rows >= torch.arange(k.shape[-2], device=q.device), scores, -math.inf)
    return scores


WRITTEN: dict[str, Otherwise] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _forward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _backward,
}
