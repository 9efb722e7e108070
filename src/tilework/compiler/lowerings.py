"""Teaches Inductor our own operators, so that they become part of its loops."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import operators  # noqa: F401  (defines torch.ops.tilework.small_conv and its gradients)
from ..random import mix_bits

_PAIRS = "const int64_t* stride, int64_t, const int64_t* padding, int64_t, const int64_t* dilation, int64_t, int64_t groups"
_TENSORS = "AtenTensorHandle a, AtenTensorHandle b"


def native_operators() -> dict[Any, list[str]]:
    """Operators that the generated code calls by a plain C name; kernels.h has them."""
    ops = torch.ops.tilework
    shape = "const int64_t* shape, int64_t"
    return {
        ops.small_conv.default: [f"AOTITorchError aoti_torch_cpu_small_conv({_TENSORS}, {_PAIRS}, AtenTensorHandle* ret)"],
        ops.small_conv_input_grad.default: [
            f"AOTITorchError aoti_torch_cpu_small_conv_input_grad({_TENSORS}, {shape}, {_PAIRS}, AtenTensorHandle* ret)"
        ],
        ops.small_conv_weight_grad.default: [
            f"AOTITorchError aoti_torch_cpu_small_conv_weight_grad({_TENSORS}, {shape}, {_PAIRS}, AtenTensorHandle* ret)"
        ],
    }


class _Value:
    """A value inside a generated loop, with Python's integer operators: lets mix_bits write the loop's code."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @staticmethod
    def _of(other: Any) -> Any:
        from torch._inductor.virtualized import ops

        return other.value if isinstance(other, _Value) else ops.constant(other, torch.int64)

    def _apply(self, name: str, other: Any) -> _Value:
        from torch._inductor.virtualized import ops

        return _Value(getattr(ops, name)(self.value, self._of(other)))

    def __xor__(self, other: Any) -> _Value:
        return self._apply("bitwise_xor", other)

    def __and__(self, other: Any) -> _Value:
        return self._apply("bitwise_and", other)

    def __rshift__(self, other: Any) -> _Value:
        return self._apply("bitwise_right_shift", other)

    def __mul__(self, other: Any) -> _Value:
        return self._apply("mul", other)

    def __add__(self, other: Any) -> _Value:
        return self._apply("add", other)


@functools.cache
def register() -> None:
    """Once a process. Inductor is imported here, on the compile side only."""
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    @register_lowering(torch.ops.tilework.random_bits.default, type_promotion_kind=None)
    def random_bits(shape: Sequence[int], seed: Any, site: int) -> Any:
        load = seed.make_loader()
        shape = [int(s) for s in shape]

        def inner(index: Sequence[Any]) -> Any:
            flat: Any = 0
            for i, size in zip(index, shape, strict=True):
                flat = flat * size + i
            whole = _Value(load([]))
            mixed = mix_bits(_Value(ops.index_expr(flat, torch.int64)), whole & 0xFFFFFFFF, (whole >> 32) & 0xFFFFFFFF, site)
            return mixed.value

        return Pointwise.create(device=seed.get_device(), dtype=torch.int64, inner_fn=inner, ranges=shape)
