"""small_convolutions: a pass, on by default. Small 2-D convolutions become our own operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..artifact.graph import Graph, Node, Ref, TensorType, name_of

# Our own kernels beat the convolution library on small images with few channels: its call alone costs tens of microseconds,
# and its blocks of channels stay half empty. A whole step of LeNet on 2 threads: 0.55 against 1.12 ms at batch 16, 2.9 against
# 7.7 ms at batch 128. A residual net of 16 to 64 channels on 32 x 32 images, batch 4, on 1 thread: 4.2 against 5.3 ms. Above this
# much work an image the library is taken, which is as fast there once its layouts agree.
SMALL_FLOPS, SMALL_FLOPS_MANY = 20_000_000, 2_000_000  # up to FEW_IMAGES, and above
FEW_IMAGES, SMALL_BATCH = 12, 256
# From here on the library's blocks of channels are full: a step of ResNet-50 on 64 x 64 images, batch 4, on 2 threads, takes
# 78 ms with it and 124 ms with our own kernels (eager PyTorch: 77); a smaller residual net of up to 512 channels 9.6 and 17.8 ms.
MANY_CHANNELS = 128


def small_convolutions(graph: Graph) -> Graph:
    """Replaces small 2-D convolutions and their gradients by our own operators, which have native code of their own."""
    types: dict[str, TensorType | None] = dict(graph.types)
    nodes: list[Node] = []
    replaced: dict[tuple[str, int], str] = {}  # (convolution_backward node, result) -> node that computes it
    for node in graph.nodes:
        for i, kind in enumerate(node.types):
            types[node.name if i == 0 else f"{node.name}#{i}"] = kind
        if node.op == "aten.convolution.default" and _is_small(node.args[0], node.args[1], node.types[0], node.args[3:], types):
            nodes += _forward(node)
        elif node.op == "aten.convolution_backward.default" and _is_small(
            node.args[1], node.args[2], types.get(name_of(node.args[0])), node.args[4:10], types
        ):
            made = _backward(node, types)
            nodes += [n for n, _ in made]
            replaced |= {(node.name, i): n.name for n, i in made}
        elif node.op == "getitem" and (name_of(node.args[0]), node.args[1]) in replaced:
            source = replaced[name_of(node.args[0]), node.args[1]]
            nodes.append(replace(node, op="aten.alias.default", args=(Ref(source),)))
        else:
            nodes.append(node)
    changed = replace(graph, nodes=tuple(nodes)).prune()
    changed.verify()
    return changed


def _is_small(x: Any, weight: Any, out: TensorType | None, rest: Sequence[Any], types: dict[str, TensorType | None]) -> bool:
    """`rest` is stride, padding, dilation, transposed, output padding, groups."""
    image, kernel = types.get(name_of(x)), types.get(name_of(weight))
    if image is None or kernel is None or out is None or len(image.shape) != 4 or rest[3]:
        return False
    if {image.dtype, kernel.dtype, out.dtype} != {"float32"} or not all(len(r) == 2 for r in rest[:3]):
        return False
    if any(kind != kind.as_dense() for kind in (image, kernel, out)):
        return False  # channels last, say: what follows may rely on that layout
    if max(kernel.shape[0] // rest[5], kernel.shape[1]) >= MANY_CHANNELS:
        return False
    flops = 2 * out.numel * math.prod(kernel.shape[1:]) // max(image.shape[0], 1)
    limit = SMALL_FLOPS if image.shape[0] <= FEW_IMAGES else SMALL_FLOPS_MANY
    return 0 < image.shape[0] <= SMALL_BATCH and flops <= limit


def _forward(node: Node) -> list[Node]:
    x, weight, bias, stride, padding, dilation, _, _, groups = node.args
    kind = node.types[0]
    assert kind is not None
    made = [
        replace(node, name=f"{node.name}_small" if bias is not None else node.name, op="tilework.small_conv.default",
                args=(x, weight, stride, padding, dilation, groups), types=(kind.as_dense(),))
    ]  # fmt: skip
    if bias is not None:
        shape = (1, kind.shape[1], 1, 1)
        view = replace(node, name=f"{node.name}_bias", op="aten.view.default", args=(bias, list(shape)),
                       types=(TensorType.dense(kind.dtype, shape),))  # fmt: skip
        total = replace(node, op="aten.add.Tensor", args=(Ref(made[0].name), Ref(view.name)), types=(kind.as_dense(),))
        made += [view, total]
    return made


def _backward(node: Node, types: dict[str, TensorType | None]) -> list[tuple[Node, int]]:
    """(node, which result of convolution_backward it stands for) pairs; -1 for none of them."""
    grad, x, weight, bias_shape, stride, padding, dilation, _, _, groups, mask = node.args
    image, kernel = types[name_of(x)], types[name_of(weight)]
    assert image is not None and kernel is not None
    rest = (stride, padding, dilation, groups)
    made: list[tuple[Node, int]] = []
    if mask[0]:
        made.append((replace(node, name=f"{node.name}_input", op="tilework.small_conv_input_grad.default",
                             args=(grad, weight, list(image.shape), *rest), types=(image.as_dense(),)), 0))  # fmt: skip
    if mask[1]:
        made.append((replace(node, name=f"{node.name}_weight", op="tilework.small_conv_weight_grad.default",
                             args=(grad, x, list(kernel.shape), *rest), types=(kernel.as_dense(),)), 1))  # fmt: skip
    if mask[2]:
        kind = TensorType.dense(kernel.dtype, bias_shape)
        made.append(
            (
                replace(node, name=f"{node.name}_bias", op="aten.sum.dim_IntList", args=(grad, [0, 2, 3]), types=(kind,)),
                2,
            )
        )
    return made
