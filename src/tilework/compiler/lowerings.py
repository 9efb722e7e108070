"""Teaches Inductor our own operators: some become part of its loops, others calls of our kernels (compiler/kernels/).

A call passes plain pointers, sizes and strides, all known when the code is written: no tensor objects are made, nothing is
dispatched, and the result lies in memory that the program has already."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..artifact import operators
from ..artifact.random import mix_bits
from .cuda import loops


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
    from torch._inductor import ir
    from torch._inductor.ir import ExternKernel, FixedLayout, Pointwise, TensorBox, as_storage_and_layout
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V, ops
    from torch.utils._ordered_set import OrderedSet

    class NativeCall(ir.ExternKernelOut):
        """out = function(inputs, constants), written as one line of C++ over pointers."""

        def __init__(
            self, function: str, shape: Sequence[int], inputs: Sequence[Any], constants: Sequence[str], last: bool
        ) -> None:
            like, shape = inputs[0], [int(s) for s in shape]
            stride = [shape[1] * shape[2] * shape[3], 1, shape[3] * shape[1], shape[1]] if last else None
            layout = FixedLayout(like.get_device(), like.get_dtype(), shape, stride)
            super().__init__(layout, list(inputs), python_kernel_name=f"tilework.{function}")
            self.function, self.constants, self.cast = function, constants, ""  # pointers are to floats, unless cast

        def codegen(self, wrapper: Any) -> None:
            pointers = [self.cast + p for p in (f"tilework::pointer({self.get_name()})", *map(_pointer, self.inputs))]
            wrapper.writeline(f"tilework::{self.function}({', '.join([*pointers, *self.constants])});")

    class DispatcherCall(ir.ExternKernelOut):
        """out = a result of an operator that is called through torch's dispatcher (compiler/calls.cpp)."""

        def __init__(
            self, call: str, inputs: Sequence[Any], shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
        ) -> None:
            layout = FixedLayout(torch.device("cpu"), dtype, list(shape), list(stride))
            super().__init__(layout, list(inputs), python_kernel_name="tilework.call")
            self.call = call

        def codegen(self, wrapper: Any) -> None:
            given: Sequence[Any] = self.inputs if self.call.startswith("call_with") else ()
            inputs = "".join(f", {x.codegen_reference()}" for x in given)
            wrapper.writeline(f"tilework::{self.call}, {self.get_name()}{inputs});")

    class NativeUpdate(ir.ExternKernel):
        """function(target, inputs, constants), which changes the target."""

        def __init__(self, function: str, target: Any, inputs: Sequence[Any], constants: Sequence[str]) -> None:
            layout = ir.NoneLayout(device=target.get_device())
            super().__init__(None, layout, self.unwrap_storage([target, *inputs]), python_kernel_name=f"tilework.{function}")
            self.function, self.constants = function, constants
            V.graph.mark_buffer_mutated(target.get_name())
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def codegen(self, wrapper: Any) -> None:
            wrapper.writeline(f"tilework::{self.function}({', '.join([*map(_pointer, self.inputs), *self.constants])});")

        def should_allocate(self) -> bool:
            return False

        def get_mutation_names(self) -> Sequence[str]:
            return [self.input_name(0)]

        def get_unbacked_symbol_defs(self) -> Any:
            return OrderedSet()

    class Store(NativeUpdate):
        """target = value, in a call of its own, which no loop is fused with."""

        def codegen(self, wrapper: Any) -> None:
            target, value = (x.codegen_reference() for x in self.inputs)  # type: ignore[union-attr]
            if not V.graph.cpp_wrapper:
                wrapper.writeline(f"{target}.copy_({value})")
                return
            wrapper.writeline(f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_({target}, {value}, 0));")

    def _pointer(x: Any) -> str:
        storage, layout = as_storage_and_layout(x)
        name = storage.get_name()
        return f"tilework::pointer({name})" + (f" + {int(layout.offset)}" if layout.offset else "")

    def call(function: str, shape: Sequence[int], inputs: Sequence[Any], *constants: Any, last: bool = False) -> Any:
        text = [str(c).lower() if isinstance(c, bool) else str(int(c)) for c in constants]
        return TensorBox.create(NativeCall(function, shape, inputs, text, last))

    def dense(x: Any) -> Any:
        return ExternKernel.require_contiguous(ExternKernel.realize_input(x))

    def matrix(x: Any) -> tuple[Any, list[int], bool]:
        """A matrix (or several) that BLAS can take: the node, (step between matrices, leading dimension), transposed."""
        x = ExternKernel.realize_input(x)
        _, layout = as_storage_and_layout(x)
        *_, rows, columns = (int(s) for s in layout.size)
        *step, row, column = (int(s) for s in layout.stride)
        if (column == 1 or columns == 1) and (row >= max(columns, 1) or rows == 1):
            return x, [*step, max(row, columns)], False
        if (row == 1 or rows == 1) and (column >= max(rows, 1) or columns == 1):
            return x, [*step, max(column, rows)], True
        x = ExternKernel.require_contiguous(ExternKernel.copy_input(x))
        return x, [*([rows * columns] * len(step)), columns], False

    def on_gpu(x: Any) -> bool:
        return x.get_device().type != "cpu"  # type: ignore[no-any-return]

    def sizes(x: Any) -> list[int]:
        return [int(s) for s in x.get_size()]

    tilework = torch.ops.tilework

    def bits(shape: Sequence[int], seed: Any, site: Callable[[], Any]) -> Any:
        load = seed.make_loader()
        shape = [int(s) for s in shape]

        def inner(index: Sequence[Any]) -> Any:
            flat: Any = 0
            for i, size in zip(index, shape, strict=True):
                flat = flat * size + i
            whole = _Value(load([]))
            mixed = mix_bits(_Value(ops.index_expr(flat, torch.int64)), whole & 0xFFFFFFFF, (whole >> 32) & 0xFFFFFFFF, site())
            return mixed.value

        return Pointwise.create(device=seed.get_device(), dtype=torch.int64, inner_fn=inner, ranges=shape)

    @register_lowering(tilework.random_bits.default, type_promotion_kind=None)
    def random_bits(shape: Sequence[int], seed: Any, site: int) -> Any:
        return bits(shape, seed, lambda: site)

    @register_lowering(tilework.random_bits_at.default, type_promotion_kind=None)
    def random_bits_at(shape: Sequence[int], seed: Any, site: Any) -> Any:
        load = site.make_loader()
        return bits(shape, seed, lambda: _Value(load([])))

    @register_lowering(tilework.once.default, type_promotion_kind=None)
    def once(x: Any) -> Any:
        x.realize()
        return x

    @register_lowering(tilework.store.default, type_promotion_kind=None)
    def store(target: Any, value: Any) -> None:
        Store("store", target, [ExternKernel.realize_input(value)], [])

    @register_lowering(tilework.kept.default, type_promotion_kind=None)
    def kept(x: Any) -> Any:
        copy = Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=x.make_loader(), ranges=list(x.get_size()))
        copy.realize()
        return copy

    @register_lowering(tilework.after.default, type_promotion_kind=None)
    def after(x: Any, other: Any) -> Any:
        copy = kept(x)
        name = ExternKernel.realize_input(other).get_name()
        if name in V.graph.name_to_buffer:  # made in this program, not given to it
            V.graph.additional_buffer_deps[copy.get_name()].add(name)
        return copy

    @register_lowering(tilework.over_replicas.default, type_promotion_kind=None)
    def over_replicas(x: Any) -> Any:
        if on_gpu(x):  # Device.sum_over says that it has none
            return kept(x)
        kind = {torch.float32: "float", torch.float64: "double"}[x.get_dtype()]
        made = NativeCall("over_replicas", sizes(x), [dense(x)], [str(math.prod(sizes(x)))], last=False)
        made.cast = f"({kind}*)"
        return TensorBox.create(made)

    @register_lowering(tilework.called.default, type_promotion_kind=None)
    def called(inputs: Sequence[Any], index: int, output: int, *kind: Any) -> Any:
        realized = [ExternKernel.realize_input(x) for x in inputs]
        return TensorBox.create(DispatcherCall(f"call_with(calls(), {index}, {output}", realized, *kind))

    @register_lowering(tilework.called_result.default, type_promotion_kind=None)
    def called_result(first: Any, index: int, output: int, *kind: Any) -> Any:
        after = [ExternKernel.realize_input(first)]  # made by the call: nothing is read of it, but it comes before
        return TensorBox.create(DispatcherCall(f"result(calls(), {index}, {output}", after, *kind))

    @register_lowering(tilework.product.default, type_promotion_kind=None)
    def product(a: Any, b: Any) -> Any:
        (m, k), (_, n) = sizes(a), sizes(b)
        if k == 1:  # an outer product: part of whatever loop uses it. Its operands are computed once, before.
            a.realize()
            b.realize()
            load_a, load_b = a.make_loader(), b.make_loader()
            return Pointwise.create(
                device=a.get_device(), dtype=a.get_dtype(), ranges=[m, n],
                inner_fn=lambda index: ops.mul(load_a([index[0], 0]), load_b([0, index[1]])),
            )  # fmt: skip
        (x, a_at, a_turned), (y, b_at, b_turned) = matrix(a), matrix(b)
        if m == 1 and (k == 1 or not a_turned or a_at[-1] == 1):
            return call("vector_product", [m, n], [x, y], k, n, b_at[-1], b_turned)
        if n == 1 and (k == 1 or b_turned or b_at[-1] == 1):  # the same, turned round
            return call("vector_product", [m, n], [y, x], k, m, a_at[-1], not a_turned)
        return call("product", [m, n], [x, y], m, k, n, *a_at, a_turned, *b_at, b_turned)

    @register_lowering(tilework.update_by_product.default, type_promotion_kind=None)
    def update_by_product(weight: Any, a: Any, b: Any, lr: Any, keep: Any) -> None:
        (m, k), (_, n) = sizes(a), sizes(b)
        (x, a_at, a_turned), (y, b_at, b_turned) = matrix(a), matrix(b)
        scalars = [ExternKernel.realize_input(s) for s in (lr, keep)]
        numbers = [m, k, n, *a_at, a_turned, *b_at, b_turned]
        NativeUpdate("update_by_product", weight, [x, y, *scalars], [str(c).lower() for c in numbers])

    @register_lowering(tilework.batch_product.default, type_promotion_kind=None)
    def batch_product(a: Any, b: Any) -> Any:
        (count, m, k), (_, _, n) = sizes(a), sizes(b)
        (x, a_at, a_turned), (y, b_at, b_turned) = matrix(a), matrix(b)
        return call("batch_product", [count, m, n], [x, y], count, m, k, n, *a_at, a_turned, *b_at, b_turned)

    def conv(x: list[int], w: list[int], out: list[int], rest: Sequence[Any]) -> str:
        """The fields of kernels/convolutions.h's struct Conv: a template argument, so each shape gets code of its own."""
        (stride, padding, dilation, groups) = rest
        fields = [*x, w[0], w[2], w[3], out[2], out[3], groups, *stride, *padding, *dilation]
        return f"tilework::Conv{{{', '.join(str(int(f)) for f in fields)}}}"

    @register_lowering(tilework.small_conv.default, type_promotion_kind=None)
    def small_conv(x: Any, weight: Any, *rest: Any) -> Any:
        shape = operators.conv_shape(sizes(x), sizes(weight), *rest[:3])
        return call(f"small_conv<{conv(sizes(x), sizes(weight), shape, rest)}>", shape, [dense(x), dense(weight)])

    @register_lowering(tilework.small_conv_input_grad.default, type_promotion_kind=None)
    def small_conv_input_grad(grad: Any, weight: Any, shape: Sequence[int], *rest: Any) -> Any:
        it = conv(list(shape), sizes(weight), sizes(grad), rest)
        return call(f"small_conv_input_grad<{it}>", shape, [dense(grad), dense(weight)])

    @register_lowering(tilework.small_conv_weight_grad.default, type_promotion_kind=None)
    def small_conv_weight_grad(grad: Any, x: Any, shape: Sequence[int], *rest: Any) -> Any:
        it = conv(sizes(x), list(shape), sizes(grad), rest)
        return call(f"small_conv_weight_grad<{it}>", shape, [dense(grad), dense(x)])

    def pool(function: str, shape: list[int], inputs: Sequence[Any], x: list[int], out: list[int], rest: Sequence[Any]) -> Any:
        """Planes one after the other, or channels last: as the layout was when the operators were traced."""
        (kernel, stride, padding) = rest
        numbers = [x[2], x[3], out[2], out[3], *kernel, *stride, *padding]
        if operators.is_channels_last(V.graph.current_node.meta["val"]):
            turned = [ExternKernel.require_channels_last(ExternKernel.realize_input(i)) for i in inputs]
            return call(f"{function}_last", shape, turned, x[0], x[1], *numbers, last=True)
        return call(function, shape, [dense(i) for i in inputs], x[0] * x[1], *numbers)

    @register_lowering(tilework.max_pool.default, type_promotion_kind=None)
    def max_pool(x: Any, *rest: Any) -> Any:
        shape = operators.pool_shape(sizes(x), *rest)
        if on_gpu(x):
            return loops.max_pool(x, shape, *map(list, rest))
        return pool("max_pool", shape, [x], sizes(x), shape, rest)

    @register_lowering(tilework.max_pool_grad.default, type_promotion_kind=None)
    def max_pool_grad(grad: Any, x: Any, pooled: Any, *rest: Any) -> Any:
        if on_gpu(x):
            return loops.max_pool_grad(grad, x, pooled, *map(list, rest))
        return pool("max_pool_grad", sizes(x), [grad, x, pooled], sizes(x), sizes(pooled), rest)
