"""Reports of silently wrong numbers in PyTorch's tracker: whole numbers, bools, and the places of the largest and smallest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trackers import Table, check_cases

pytestmark = pytest.mark.slow

INTEGERS = Table()
case = INTEGERS.case
NAN = torch.nan
BYTES = torch.tensor([5, 1, 100, 3, 7, 8, 9, 13, 100, 120, 127, 2, 6, 4, 11, 12, 90, 80])
SIGNED = torch.tensor([-7, -6, -1, 0, 1, 5, 6, 7, -128 + 1, 100])


@case(187018, "the absolute value of bytes, negated and summed", group="bytes", inputs={"x": torch.tensor([200, 200]).byte()})
def bytes_negated(m) -> Tensor:
    y = -m.x.abs()
    return torch.cat([y, y]).sum()


@case(
    105264,
    "bytes that wrap around, seen in a wider type",
    group="bytes",
    inputs={"x": BYTES.byte() + 100, "y": BYTES.to(torch.int8)},
)
def bytes_wrap(m) -> tuple[Tensor, ...]:
    return (
        (m.x + m.x).short(), (m.x * 3).int(), (m.x - 120).long(), -m.x < 4, (m.y * m.y).int(), (m.y + m.y).neg().int(),
        (~m.x).long(),
        (m.x // 7 - 20).float(),
    )  # fmt: skip


@case(190764, "32-bit numbers that wrap around, seen in 64 bits", group="bytes",
      inputs={"x": torch.tensor([2147483647, -2147483648, 5, 65536] * 5, dtype=torch.int32)})  # fmt: skip
def wide_wrap(m) -> tuple[Tensor, ...]:
    return (m.x + m.x).long(), (m.x * m.x).long(), (m.x - 1).long(), (-m.x).long(), m.x.sum(), m.x.abs().long()


@case(156788, "negative floats as bytes", group="shifts", inputs={"x": torch.tensor([1.5, -0.3, -2.2, 0.6, -1.1, -200.7] * 5)})
def floats_as_bytes(m) -> tuple[Tensor, ...]:
    return m.x.byte(), m.x[:5].byte(), m.x.to(torch.int8), m.x.short()


@case(191499, "the smallest and largest of 18 bytes, and their places", group="bytes extremes",
      inputs={"x": BYTES.byte(), "y": BYTES.to(torch.int8), "z": -BYTES.to(torch.int8)})  # fmt: skip
def extremes_of_bytes(m) -> tuple[Tensor, ...]:
    return tuple(f(t) for t in (m.x, m.y, m.z) for f in (torch.amin, torch.amax, torch.argmin, torch.argmax))


@case(184893, "the smallest and largest of bools, with their places", group="bool extremes",
      inputs={"x": (torch.arange(224) * 7 % 5 < 2).reshape(7, 32)})  # fmt: skip
def extremes_of_bools(m) -> tuple[Tensor, ...]:
    return *m.x.min(0), *m.x.max(0), *m.x.min(1), m.x.any(0), m.x.all(1), m.x.sum(0), m.x.cumsum(1)


@case(183082, "the place of the largest in a transposed tensor that was changed in place", group="places", inputs={"x": (5, 7)})
def place_in_transposed(m) -> tuple[Tensor, ...]:
    x = m.x.clone()
    x.sin_()
    return x.t().argmax(), x.t().argmin()


@case(197739, "the place of the smallest in a transposed sum", group="transposed sum", inputs={"x": (2, 2), "y": (6, 4)})
def place_in_transposed_sum(m) -> tuple[Tensor, ...]:
    return (m.x.t() + 0.5).argmin(), m.x.t().contiguous().argmin(), (m.y.t() * 2.0).argmax(), m.y.permute(1, 0).flatten().argmin()


@case(
    178964,
    "the places of the largest in a sum with a transposed tensor",
    group="places",
    inputs={"a": (8, 8), "b": (8, 8), "c": (40, 40)},
)
def places_in_sum(m) -> tuple[Tensor, ...]:
    return *(m.a.t() + m.b).max(1), *(m.a.t() + m.b).min(0), *(m.c.t() + m.c).max(1)


@case(118266, "places of NaN and of equal numbers", group="places",
      inputs={"x": torch.tensor([[1.0, NAN, 3.0, NAN], [4.0, 4.0, 1.0, 1.0], [-torch.inf] * 4] * 5)})  # fmt: skip
def places_of_nan(m) -> tuple[Tensor, ...]:
    return (
        m.x.argmax(1), m.x.argmin(1), m.x.argmax(0), m.x.argmin(), *m.x.max(1), *m.x.min(0), m.x.amax(1), m.x.amin(0),
        (m.x - 2).log1p().argmax(),
    )  # fmt: skip


@case(143555, "shifts by as many bits as there are, and more", group="shifts", inputs={
      "x": torch.tensor([1000, -1000, 1, -1] * 5), "by": torch.tensor([64, 64, 63, 100, 2] * 4), "y": torch.tensor([1000,
      -1000] * 8).int()})  # fmt: skip
def shifts(m) -> tuple[Tensor, ...]:
    return m.x << m.by, m.x >> m.by, m.y << 32, m.y >> 32, m.y >> 3, torch.bitwise_right_shift(m.x[0], m.by[0])


@case(154420, "quotients and remainders of negative numbers", group="quotients", inputs={
      "a": SIGNED, "b": torch.tensor([2, -2, 3, -3, 7, -7, 4, 5, -6, 9])})  # fmt: skip
def quotients(m) -> tuple[Tensor, ...]:
    def of(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a % b, torch.fmod(a, b), a // b, torch.div(a, b, rounding_mode="trunc"), a / b

    return (
        *of(m.a, m.b),
        *of(m.a.int(), m.b.int()),
        *of(m.a.to(torch.int8), m.b.to(torch.int8)),
        *of(m.a / 2, m.b / 3),
        m.a % 3,
        m.a // -4,
    )


@case(143738, "an average of whole numbers, powers, products and clamps of them", group="quotients", inputs={
      "x": torch.arange(16).reshape(1, 1, 4, 4) - 5, "y": SIGNED.to(torch.int8)})  # fmt: skip
def whole_numbers(m) -> tuple[Tensor, ...]:
    return (
        m.x**3, (m.y**2).int(), m.y[3:6].prod(), m.x.clamp(-1.5, 3.5), m.y.clamp(min=-2), m.x.float().var(), m.x.sign(),
        m.x.abs().sqrt(),
        torch.gcd(m.x, m.x + 4), m.y.sum(), m.y.sum(dtype=torch.int8), m.x.bitwise_xor(5), m.x.bitwise_not(),
    )  # fmt: skip


@case(
    141559,
    "conditions over several types",
    group="bools",
    inputs={"a": torch.arange(10), "b": torch.arange(10).byte(), "x": (3, 12)},
)
def conditions(m) -> tuple[Tensor, ...]:
    return (
        (m.a > 1) & (m.b > 1), (m.a > 4) ^ (m.b % 2 == 0), m.x * (m.x >= 0).float(), (m.x > 0) * m.x, (m.x > 0).sum(1),
        ~(m.x > 0),
        torch.where(m.x > 0, m.x.double(), 0.0), (m.x > 0).float().cumsum(1), m.a.bool().logical_xor(m.b > 5),
    )  # fmt: skip


@case(113014, "padded numbers as bools, and compared", group="bools", inputs={"x": (20, 1), "y": (1, 2, 2, 1)})
def padded_and_compared(m) -> tuple[Tensor, ...]:
    y = F.pad(m.x, (46, 0), value=0.5)
    return y.bool(), torch.gt(y.mean(0), y), F.pad(m.y.double(), (1, 0)) > m.y.double()


@case(182343, "places in a sorted list that is a slice", group="sorted", inputs={
      "offsets": torch.tensor([0, 3, 7, 12]), "x": torch.arange(12), "edges": torch.tensor([-1.0, 0.0, 0.5, 2.0]),
      "y": torch.tensor([0.5, -2.0, NAN, 9.0, 0.0])})  # fmt: skip
def places_in_sorted(m) -> tuple[Tensor, ...]:
    return (
        torch.searchsorted(m.offsets[1:], m.x, right=True), torch.searchsorted(m.offsets, m.x), torch.bucketize(m.y, m.edges),
        torch.bucketize(m.y, m.edges[1:], right=True),
    )  # fmt: skip


@case(183901, "products of a long arange", group="sorted", inputs={"x": torch.tensor([1500000000])})
def products_of_arange(m) -> tuple[Tensor, ...]:
    n = torch.arange(9)
    return n * m.x, n * 1500000000 % 7, (n.int() * 1500000000).long(), F.one_hot(n % 4, 5), torch.tril(torch.ones(4, 6), 1).long()


@case(
    129966,
    "bytes of wider numbers, and bits of floats",
    group="sorted",
    inputs={"x": torch.tensor([66051, -2]).int(), "y": (16,)},
)
def bytes_of_numbers(m) -> tuple[Tensor, ...]:
    return (
        m.x.view(torch.int8),
        m.x.view(torch.int16),
        m.y.view(torch.int32) >> 2,
        (m.y.view(torch.int32) & 0x7FFFFFFF).view(torch.float32),
    )


@case(197106, "sums and products as bools", group="bools", inputs={"x": torch.tensor([[0.0, 2.0], [0.0, 0.0]])})
def sums_as_bools(m) -> tuple[Tensor, ...]:
    return torch.sum(m.x, 1, dtype=torch.bool), torch.prod(m.x, 1, dtype=torch.bool)


@pytest.mark.parametrize("cases", INTEGERS.groups())
def test_integers(cases, tmp_path) -> None:
    check_cases(cases, tmp_path)
