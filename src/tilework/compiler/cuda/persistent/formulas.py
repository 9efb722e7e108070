"""Products and convolutions as sums of products: Inductor makes them loops like all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...to_fx import Otherwise, Translation
from .. import losses


class NotSmall(Exception):
    """Why a program is no single kernel."""


def _product(t: Translation, a: Any, b: Any) -> Any:
    return t.trace(lambda a, b: (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2), a, b)


def _added_product(t: Translation, c: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    def formula(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
        made = (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
        return (made if alpha == 1 else made * alpha) + (c if beta == 1 else c * beta)

    return _written(t, t.trace(formula, c, a, b))


def _written(t: Translation, made: Any) -> Any:
    """Computed once: whoever needs it later neither computes it again for each element of its own, nor reads a bias that changes
    meanwhile."""
    return t.emit(torch.ops.tilework.once.default, made)


def _windows(x: Tensor, size: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """[n, c, h, w] -> [n, c, rows, columns, *size]: what each output element sees."""
    x = pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    for dim in (0, 1):
        x = x.unfold(2 + dim, (size[dim] - 1) * dilation[dim] + 1, stride[dim])
        if dilation[dim] > 1:
            x = torch.ops.aten.slice.Tensor(x, -1, 0, x.shape[-1], dilation[dim])
    return x


def _set_apart(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x[:, None, ...]: new dimensions of size 1 at these places of the result, in ascending order."""
    for dim in dims:
        x = x.unsqueeze(dim)
    return x


def _checked(x: Any, transposed: bool, groups: int) -> None:
    if transposed or groups != 1 or x.meta["val"].dim() != 4:
        raise NotSmall("a convolution with groups, of other than two dimensions, or transposed")


def _convolution(t: Translation, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
                 output_padding: Any, groups: int) -> Any:  # fmt: skip
    _checked(x, transposed, groups)

    def formula(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        seen = _windows(x, list(weight.shape[2:]), list(stride), list(padding), list(dilation))
        made = (seen.unsqueeze(1) * _set_apart(weight, (0, 3, 4))).sum((2, 5, 6))
        return made + _set_apart(bias[0], (1, 2)) if bias else made

    made = t.trace(formula, x, weight, *([] if bias is None else [bias]))
    return made if bias is None else _written(t, made)


def _convolution_backward(
    t: Translation, grad: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, wanted: Any,
) -> Any:  # fmt: skip
    _checked(x, transposed, groups)
    stride, padding, dilation = list(stride), list(padding), list(dilation)
    size = list(weight.meta["val"].shape[2:])
    results: list[Any] = [None, None, None]
    if wanted[0]:
        if stride != [1, 1] or dilation != [1, 1]:
            raise NotSmall("the gradient of a convolution with a stride")
        around = [size[i] - 1 - padding[i] for i in (0, 1)]
        if min(around) < 0:
            raise NotSmall("the gradient of a convolution with much padding")

        def by_input(grad: Tensor, weight: Tensor) -> Tensor:
            seen = _windows(grad, size, [1, 1], around, [1, 1])  # [n, o, h, w, kh, kw]
            return (seen.unsqueeze(2) * _set_apart(weight.flip(2, 3), (0, 3, 4))).sum((1, 5, 6))

        results[0] = t.trace(by_input, grad, weight)
    if wanted[1]:

        def by_weight(grad: Tensor, x: Tensor) -> Tensor:
            rows, columns = grad.shape[2:]
            seen = _windows(x, size, stride, padding, dilation).narrow(2, 0, rows).narrow(3, 0, columns)
            return (_set_apart(grad, (2, 5, 6)) * seen.unsqueeze(1)).sum((0, 3, 4))

        results[1] = t.trace(by_weight, grad, x)
    if wanted[2]:
        results[2] = t.trace(lambda grad: grad.sum((0, 2, 3)), grad)
    return results


def _log_softmax_backward(t: Translation, *args: Any) -> Any:
    return _written(t, losses.WRITTEN["aten._log_softmax_backward_data.default"](t, *args))


WRITTEN: dict[str, Otherwise] = {
    **losses.WRITTEN,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten.mm.default": _product,
    "aten.bmm.default": _product,
    "aten.addmm.default": _added_product,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
}
