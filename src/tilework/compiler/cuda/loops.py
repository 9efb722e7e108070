"""Our own operators as loops of a GPU: what lowerings.py makes calls of native kernels on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def max_pool(x: Any, shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Any:
    """The largest of each window; not a number where one of them is none."""
    from torch._inductor.ir import Pointwise
    from torch._inductor.virtualized import ops

    load = _padded(x)

    def inner(index: Sequence[Any]) -> Any:
        n, c, i, j = index
        best: Any = None
        for a in range(kernel[0]):
            for b in range(kernel[1]):
                value = load(n, c, i * stride[0] + a - padding[0], j * stride[1] + b - padding[1], padding != [0, 0])
                best = value if best is None else ops.maximum(best, value)
        return best

    return Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=inner, ranges=list(shape))


def max_pool_grad(grad: Any, x: Any, pooled: Any, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Any:
    """Windows do not overlap, so each element has at most one. It gets the gradient if it is the one that torch chooses: the
    first of the largest, or the last that is not a number."""
    from torch._inductor.ir import Pointwise
    from torch._inductor.virtualized import ops
    from torch.utils._sympy.functions import FloorDiv

    load, loaded_grad = _padded(x), grad.make_loader()
    height, width = (int(s) for s in pooled.get_size()[2:])

    def inner(index: Sequence[Any]) -> Any:
        n, c, i, j = index
        row, column = FloorDiv(i + padding[0], stride[0]), FloorDiv(j + padding[1], stride[1])
        best: Any = None
        chosen: Any = None
        for a in range(kernel[0]):
            for b in range(kernel[1]):
                y, z = row * stride[0] + a - padding[0], column * stride[1] + b - padding[1]
                value = load(n, c, y, z, True)
                number = ops.constant(a * kernel[1] + b, torch.int32)
                if best is None:
                    best, chosen = value, number
                    continue
                better = ops.logical_or(ops.gt(value, best), ops.ne(value, value))
                best, chosen = ops.where(better, value, best), ops.where(better, number, chosen)
        mine = (i + padding[0] - row * stride[0]) * kernel[1] + j + padding[1] - column * stride[1]
        here = ops.eq(chosen, ops.index_expr(mine, torch.int32))
        for position, step, size, end in (
            (i + padding[0], stride[0], kernel[0], height),
            (j + padding[1], stride[1], kernel[1], width),
        ):
            within = ops.lt(
                ops.index_expr(position - FloorDiv(position, step) * step, torch.int32), ops.constant(size, torch.int32)
            )
            here = ops.logical_and(here, within)
            before = ops.lt(ops.index_expr(FloorDiv(position, step), torch.int32), ops.constant(end, torch.int32))
            here = ops.logical_and(here, before)
        zero = ops.constant(0.0, x.get_dtype())
        return ops.where(here, ops.masked(here, lambda: loaded_grad([n, c, row, column]), 0.0), zero)

    return Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=inner, ranges=list(x.get_size()))


def _padded(x: Any) -> Any:
    """x where the index is inside, minus infinity elsewhere."""
    from torch._inductor.virtualized import ops

    loader = x.make_loader()
    height, width = (int(s) for s in x.get_size()[2:])

    def load(n: Any, c: Any, i: Any, j: Any, guarded: bool) -> Any:
        if not guarded:
            return loader([n, c, i, j])
        inside: Any = None
        for position, end in ((i, height), (j, width)):
            at = ops.index_expr(position, torch.int32)
            both = ops.logical_and(ops.ge(at, ops.constant(0, torch.int32)), ops.lt(at, ops.constant(end, torch.int32)))
            inside = both if inside is None else ops.logical_and(inside, both)
        return ops.masked(inside, lambda: loader([n, c, i, j]), float("-inf"))

    return load
