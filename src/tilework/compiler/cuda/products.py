"""Products of matrices in 16 bits whose rows are not a multiple of 16 bytes (a vocabulary of 50 257 words, say): the GPU's units
take such rows several times slower. Their operands get columns or rows of zeros, and the result is a part of what comes out."""

from __future__ import annotations

from typing import Any

import torch

from ..to_fx import Otherwise, Translation

aten = torch.ops.aten
_ALIGNED = 8  # elements: 16 bytes
_PADDED = 64  # elements: a whole tile of the library's kernels
_LARGE = 1 << 30  # multiplications: below it the copies cost more than they bring


def _mm(t: Translation, a: Any, b: Any) -> Any:
    return _product(t, None, a, b, {})


def _addmm(t: Translation, bias: Any, a: Any, b: Any, **scales: Any) -> Any:
    return _product(t, bias, a, b, scales)


def _product(t: Translation, bias: Any, a: Any, b: Any, scales: dict[str, Any]) -> Any:
    (m, k), n = a.meta["val"].shape, b.meta["val"].shape[1]
    half = a.meta["val"].dtype in (torch.bfloat16, torch.float16)
    plain = bias is None or tuple(bias.meta["val"].shape) == (n,)
    more_m = _missing(m) if _turned(a) else 0  # rows of `a` are the columns of what lies in memory
    more_k, more_n = _missing(k), _missing(n)
    if half and plain and m * n * k >= _LARGE and (more_m or more_k or more_n):
        a, b = _padded(t, a, more_m, more_k), _padded(t, b, more_k, more_n)
        if bias is not None and more_n:
            bias = t.emit(aten.constant_pad_nd.default, bias, [0, more_n], 0.0)
    else:
        more_m = more_n = 0
    op = aten.mm.default if bias is None else aten.addmm.default
    made = t.inline(op, (a, b) if bias is None else (bias, a, b), scales)
    if more_n:
        made = t.emit(aten.slice.Tensor, made, 1, 0, n)
    return t.emit(aten.slice.Tensor, made, 0, 0, m) if more_m else made


def _missing(n: int) -> int:
    return -n % _PADDED if n % _ALIGNED else 0


def _turned(x: Any) -> bool:
    return bool(x.meta["val"].stride(0) == 1 and x.meta["val"].stride(1) != 1)


def _padded(t: Translation, x: Any, rows: int, columns: int) -> Any:
    """A matrix that lies turned is padded as it lies, so that several products share one copy."""
    if not rows and not columns:
        return x
    if _turned(x):
        turn = x.target in (aten.t.default, aten.transpose.int, aten.permute.default)
        lying = x.args[0] if turn and x.args[0].meta["val"].dim() == 2 else t.emit(aten.permute.default, x, [1, 0])
        return t.emit(aten.permute.default, _padded(t, lying, columns, rows), [1, 0])
    key = ("padded", x, rows, columns)
    if key not in t.kept:
        # Computed where it will be padded: a formula would be computed again for the padding, apart from what it belongs to.
        made = x if x.op == "placeholder" else t.emit(torch.ops.tilework.once.default, x)
        t.kept[key] = t.emit(aten.constant_pad_nd.default, made, [0, columns, 0, rows], 0.0)
    return t.kept[key]


WRITTEN: dict[str, Otherwise] = {"aten.mm.default": _mm, "aten.addmm.default": _addmm}
