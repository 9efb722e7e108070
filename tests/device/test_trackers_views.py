"""Reports of silently wrong numbers in PyTorch's tracker: tensors that are changed in place, and views of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trackers import Table, check_cases

pytestmark = pytest.mark.slow

VIEWS = Table()
WHOLE = torch.arange(-12, 12).reshape(4, 6)


@VIEWS.case(
    198270,
    "index_put_ into a buffer, then a sum with its mirror image",
    group="put",
    params={"w": (4, 8)},
    buffers={"x": (4, 8)},
)
def put_then_add_mirrored(m) -> Tensor:
    m.x.index_put_((torch.arange(4),), m.x * 2.0)
    m.x.add_(m.x.flip(0))
    return m.x * m.w


@VIEWS.case(198270, "the same with index_copy_ and a shift by one row", group="put", params={"w": (4, 8)}, buffers={"x": (4, 8)})
def copy_then_shift(m) -> Tensor:
    m.x.index_copy_(0, torch.arange(4), m.x + 1.0)
    m.x[1:] = m.x[:-1].clone()
    return m.x * m.w


@VIEWS.case(198033, "a foreach sum of a buffer with its mirror image", params={"w": (8, 8)}, buffers={"x": (8, 8)})
def foreach_add_mirrored(m) -> Tensor:
    torch._foreach_add_([m.x], [m.x.flip(0)])
    return m.x * m.w


@VIEWS.case(198280, "matrices transposed in place", group="moved", params={"w": (6, 5, 5)}, buffers={"x": (6, 5, 5)})
def transposed_in_place(m) -> Tensor:
    m.x.copy_(m.x.transpose(-1, -2) * 1.0)
    return m.x * m.w


@VIEWS.case(197829, "rows moved by one place, both ways", params={"w": (40, 8)}, buffers={"up": (40, 8), "down": (40, 8)})
def rows_moved(m) -> tuple[Tensor, ...]:
    m.up[1:] = m.up[:-1].clone()
    m.down[:-1] = m.down[1:].clone()
    return m.up * m.w, m.down * m.w


@VIEWS.case(
    198094,
    "a slice_scatter of a buffer that is cleared afterwards",
    group="moved",
    params={"w": (4, 6)},
    buffers={"x": (4, 6), "y": (4, 4)},
)
def scatter_then_cleared(m) -> tuple[Tensor, ...]:
    sliced = torch.slice_scatter(m.x, m.x[1:3] * 2.0, dim=0, start=1, end=3)
    same = torch.diagonal_scatter(m.y, m.y.diagonal())
    m.x.zero_()
    m.y.fill_(7.0)
    return sliced * m.w, same + m.w[:, :4]


@VIEWS.case(198101, "read through another type, before a later change", group="read", params={"w": (4, 6)}, buffers={"x": WHOLE})
def read_as_another_type(m) -> tuple[Tensor, ...]:
    y = m.x.view(torch.int32) * 2
    y.sub_(-4)
    m.x[:, 2:5] = 2
    return y.view(torch.int64), m.w * 2


@VIEWS.case(198102, "windows with gaps, changed in place", params={"w": (4, 6)}, buffers={"x": (4, 6)},
            refused="verify-failed")  # fmt: skip
def windows_with_gaps(m) -> Tensor:
    v = m.x.unfold(1, 1, 5)
    v.add_(v)
    return m.x * m.w


@VIEWS.case(151156, "float bytes written as integers", group="read", params={"w": (2, 4)}, buffers={"x": (2, 4)})
def bytes_as_integers(m) -> Tensor:
    m.x.view(torch.int32).copy_(torch.arange(8).reshape(2, 4) * 100000 + 1056964608)
    return m.x * m.w


@VIEWS.case(138908, "rows added to themselves by a repeated index", group="moved", params={"w": (3, 32)}, buffers={"y": (3, 32)},
            inputs={"at": torch.tensor([[0, 0]])})  # fmt: skip
def row_added_to_itself(m) -> Tensor:
    m.y[m.at] += m.y[m.at]
    return m.y * m.w


@VIEWS.case(114464, "columns exchanged in a reshaped copy", group="moved", params={"w": (2, 4)}, buffers={"x": (8,)})
def columns_exchanged(m) -> tuple[Tensor, ...]:
    y = m.x.clone().reshape(-1, 4)
    y[:, [2, 0]] = y[:, [0, 2]]
    return y * m.w, m.x + 0.0


@VIEWS.case(133512, "a buffer with steps between its elements, changed, then read by strides", params={"w": (3,)},
            buffers={"x": lambda: torch.arange(10.0)[::2]}, refused="verify-failed")  # fmt: skip
def strided_after_change(m) -> Tensor:
    m.x.add_(1.0)
    return torch.as_strided_copy(m.x, (3,), (2,)) * m.w


@VIEWS.case(94693, "overlapping slices changed one after the other", params={"w": (3, 50)}, buffers={"x": (3, 50)})
def overlapping_slices(m) -> Tensor:
    m.x[:, 20:40].add_(1.0)
    m.x[:, 1:30].mul_(2.0)
    m.x[:, 2:25].add_(m.x[:, 1:24].clone())
    return m.x * m.w


@VIEWS.case(104463, "a diagonal changed in place", group="moved", params={"w": (4, 5)}, buffers={"x": (4, 5)})
def diagonal_changed(m) -> Tensor:
    m.x.diagonal().add_(1.0)
    m.x.diagonal(1).mul_(2.0)
    return m.x * m.w


@VIEWS.case(183575, "moving averages that are read by a later update", group="read", params={"a": (16,), "b": (16,)},
            buffers={"m1": (16,), "m2": (16,), "p1": (16,), "p2": (16,)})  # fmt: skip
def moving_averages(m) -> Tensor:
    m.m1.lerp_(m.a.detach(), 0.05)
    m.m2.lerp_(m.b.detach(), 0.05)
    m.p1.add_(m.m1, alpha=-0.01)
    m.p2.add_(m.m2, alpha=-0.01)
    return m.p1 * m.a + m.p2 * m.b


@VIEWS.case(136662, "a column of a new tensor added to twice: its gradient counts both", group="added", params={"x": (2, 3)})
def added_twice(m) -> Tensor:
    y = torch.zeros_like(m.x)
    y[:, 0] += m.x[:, 2].abs()
    y[:, 0] += m.x[:, 2].abs()
    return y.sum()


@VIEWS.case(176854, "detach_ cuts the gradient", group="added", params={"w": (4,), "v": (4,)})
def detached_in_place(m) -> Tensor:
    y = m.w * 2.0
    y.detach_()
    return (y + 1.0) * m.v


@VIEWS.case(183888, "overlapping windows of an intermediate, changed in place", params={"w": (2, 4)}, buffers={"x": (1, 7)},
            refused="capture-overlap")  # fmt: skip
def overlapping_windows(m) -> Tensor:
    z = (m.x + m.x).unfold(1, 4, 2)
    return z.abs_() * m.w


@VIEWS.case(
    None,
    "a queue of past rows, moved on by roll",
    group="read",
    params={"w": (6, 4)},
    buffers={"q": (6, 4)},
    inputs={"x": (3, 4)},
)
def queue_rolled(m) -> Tensor:
    m.q.copy_(m.q.roll(1, 0))
    m.q[0] = m.x.mean(0)
    return m.q * m.w


@VIEWS.case(
    None,
    "outputs that share memory: a view, the same twice, a part changed later",
    group="read",
    params={"w": (4, 4)},
    buffers={"x": (4, 4)},
)
def outputs_that_share(m) -> tuple[Tensor, ...]:
    before, part = m.x.clone(), m.x[1]
    m.x.mul_(2.0)
    out = m.w * before
    return out, out, out.t(), part, m.x.view(-1)


@pytest.mark.parametrize("cases", VIEWS.groups())
def test_views(cases, tmp_path) -> None:
    check_cases(cases, tmp_path)
