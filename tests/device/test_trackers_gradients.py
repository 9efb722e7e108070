"""Reports of silently wrong numbers in PyTorch's tracker: gradients of what selects, scatters, pools and resamples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trackers import Table, check_cases

pytestmark = pytest.mark.slow

GRADIENTS = Table()
case = GRADIENTS.case


@case(186799, "the smallest atan2 of a row gets the gradient, for rows shorter and longer than a vector", group="smallest",
      params={"a": (2, 3), "b": (2, 3), "c": (17, 5), "d": (17, 5), "e": (3, 40), "f": (3, 40)})  # fmt: skip
def smallest_atan2(m) -> tuple[Tensor, ...]:
    return torch.atan2(m.a, m.b).amin(-1), torch.atan2(m.c, m.d).amin(-1), torch.atan2(m.e, m.f).amin(-1)


@case(186799, "the same for other functions, largest and smallest, over rows and columns", group="smallest",
      params=dict.fromkeys("abcdefg", (19, 5)))  # fmt: skip
def largest_of_functions(m) -> tuple[Tensor, ...]:
    return (
        m.a.sin().amax(1), m.b.tanh().amax(0), torch.erf(m.c).amin(1), m.d.exp().log1p().amax(1), torch.lgamma(m.e).amin(1),
        m.f.sigmoid().square().amax((0, 1)), torch.atan2(m.g.cos(), m.g).amin(1),
    )  # fmt: skip


@case(186799, "the largest of bf16 products, which are used once more", params={
      "x": torch.linspace(-2, 2, 20).reshape(1, 10, 2).bfloat16(), "u": torch.tensor([[0.3, -1.1], [0.7, 0.9]]).bfloat16(),
      "v": torch.tensor([[1.3, 0.4], [-0.2, 0.6]]).bfloat16()})  # fmt: skip
def largest_of_products(m) -> Tensor:
    y = m.x @ m.u
    y = y + y @ m.v
    return y + y.amax(1, keepdim=True).expand(-1, 10, -1)


@case(195214, "bf16 numbers compared with the largest of them, after a division", params={
      "x": torch.linspace(-3, 3, 60).reshape(3, 20).bfloat16()})  # fmt: skip
def bf16_ties(m) -> tuple[Tensor, ...]:
    y = m.x / 1.7
    tied = (y == y.amax(1, keepdim=True)).sum(1)
    return y, tied


@case(182012, "diagonal_scatter, summed", params={"x": (8, 8), "s": (8,), "y": (5, 7), "t": (5,)}, group="scatters")
def diagonal_scatter_summed(m) -> tuple[Tensor, ...]:
    return torch.diagonal_scatter(m.x, m.s).sum(), torch.diagonal_scatter(m.y, m.t, 1).sum()


@case(
    180164,
    "slice_scatter, summed",
    params={"x": (4, 13, 33), "y": (4, 6, 33), "u": (6,), "v": (3,), "p": (5,), "q": (2,)},
    group="scatters",
)
def slice_scatter_summed(m) -> tuple[Tensor, ...]:
    return (
        torch.slice_scatter(m.x, m.y, dim=1, start=0, end=6).sum(1), torch.slice_scatter(m.u, m.v, dim=0, start=1, end=4).sum(),
        torch.slice_scatter(m.p, m.q, dim=0, start=0, end=2).sum(),
    )  # fmt: skip


@case(
    None, "select_scatter and masked_scatter, summed", params={"x": (4, 5), "y": (5,), "u": (4, 5), "v": (20,)}, group="scatters"
)
def select_scatter_summed(m) -> tuple[Tensor, ...]:
    mask = torch.arange(20).reshape(4, 5) % 3 == 0
    return torch.select_scatter(m.x, m.y, 0, 2).sum(), m.u.masked_scatter(mask, m.v).sum()


@case(183986, "rows put into a tensor that was expanded from one row", group="expanded",
      params={"x": (1, 8), "y": (3, 8)}, inputs={"at": torch.tensor([0, 2, 2])})  # fmt: skip
def rows_into_expanded(m) -> tuple[Tensor, ...]:
    x = m.x.expand(5, 8)
    return (
        x.index_add(0, m.at, m.y), x.index_copy(0, m.at[:2], m.y[:2]), x.index_fill(0, m.at, 1.5), x.index_put((m.at,), m.y,
        True),
        x.index_put((m.at[:2],), m.y[:2]), x.scatter_add(0, m.at[:, None].expand(3, 8), m.y),
    )  # fmt: skip


@case(
    191571,
    "one row that others are added to, gathered again",
    group="reduced",
    params={"x": (8, 4)},
    inputs={"at": torch.zeros(8).long()},
)
def added_and_gathered(m) -> Tensor:
    row = torch.zeros(1, 4).scatter_add(0, m.at[:, None].expand(-1, 4), m.x)
    return row.index_select(0, m.at)


@case(168358, "the largest by index, without what was there", params={"x": (7,), "y": (5, 4), "z": (7,)},
      inputs={"one": torch.zeros(7).long(), "some": torch.tensor([0, 2, 2, 0, 1])})  # fmt: skip
def largest_by_index(m) -> tuple[Tensor, ...]:
    return (
        torch.full((1,), -torch.inf).index_reduce(0, m.one, m.x, "amax", include_self=False),
        torch.full((3, 4), torch.inf).index_reduce(0, m.some, m.y, "amin", include_self=False),
        torch.zeros(2).scatter_reduce(0, m.one, m.z, "amax", include_self=False),
    )  # fmt: skip


@case(None, "scatter_reduce with mean and product", params={"x": (7,), "y": (7,), "base": (4,)}, group="reduced",
      inputs={"at": torch.tensor([0, 1, 1, 3, 3, 3, 0])})  # fmt: skip
def means_by_index(m) -> tuple[Tensor, ...]:
    return (
        m.base.scatter_reduce(0, m.at, m.x, "mean", include_self=False), m.base.scatter_reduce(0, m.at, m.x, "mean"),
        m.base.scatter_reduce(0, m.at, m.y, "prod"),
    )  # fmt: skip


@case(160391, "values added by an index that is the same for a whole row", params={"x": (4, 40), "y": (4, 1)},
      inputs={"at": torch.tensor([0, 2, 1, 2])})  # fmt: skip
def one_index_for_a_row(m) -> tuple[Tensor, ...]:
    return torch.zeros(3).index_put((m.at[:, None].expand(4, 40),), m.x, True), m.y[m.at].expand(4, 40) * m.x


@case(
    198119,
    "avg_pool with ceil_mode: the last window is smaller",
    params={"x": (2, 3, 8), "y": (2, 3, 7, 8), "z": (1, 1, 4, 5, 6)},
)
def ceil_mode_average(m) -> tuple[Tensor, ...]:
    return (
        F.avg_pool1d(m.x, 3, 2, ceil_mode=True), F.avg_pool2d(m.y, 3, 2, ceil_mode=True),
        F.avg_pool3d(m.z, 2, 2, ceil_mode=True),
    )  # fmt: skip


@case(100987, "average and largest of windows with ceil_mode and padding", params={"x": (1, 1, 6, 7), "y": (2, 2, 9, 9),
      "z": (1, 2, 7, 8)},
      group="pools")  # fmt: skip
def ceil_mode_windows(m) -> tuple[Tensor, ...]:
    return (
        F.max_pool2d(m.x, 1, stride=2, ceil_mode=True), F.max_pool2d(m.y, 3, 2, padding=1, dilation=2, ceil_mode=True),
        F.avg_pool2d(m.z, 3, 2, padding=1, ceil_mode=True, count_include_pad=False),
    )  # fmt: skip


@case(160242, "the places of the largest in overlapping windows, with ties", params={
      "x": torch.tensor([1.0, 1.0, 2.0, -torch.inf, 2.0, 2.0, 0.0, 1.0] * 8).reshape(1, 1, 8, 8).clamp(min=-9), "y": (1, 2,
      8, 8)}, group="pools")  # fmt: skip
def places_of_largest(m) -> tuple[Tensor, ...]:
    found, at = F.max_pool2d(m.y, 3, 2, padding=1, return_indices=True)
    return F.max_pool2d(m.x, 3, 1, padding=1), found, at


@case(198201, "nearest neighbours along a side whose length stays", params={"x": (1, 1, 3, 4), "y": (1, 1, 1, 2)})
def nearest_same_length(m) -> tuple[Tensor, ...]:
    return F.interpolate(m.x, scale_factor=(1.3, 1.5)), F.interpolate(m.y.double(), scale_factor=1.3).float()


@case(100794, "a convolution resampled to one pixel in three ways: all three gradients arrive",
      params={"conv": lambda: nn.Conv2d(1, 1, 4), "x": (1, 1, 6, 6)})  # fmt: skip
def resampled_to_one_pixel(m) -> tuple[Tensor, ...]:
    y = m.conv(m.x)
    return tuple(F.interpolate(y, size=(1, 1), mode=mode) for mode in ("nearest", "bilinear", "bicubic"))


@case(93262, "bilinear to other sizes", params={"x": (2, 8, 7, 10)}, group="resampled")
def resampled_to_other_sizes(m) -> tuple[Tensor, ...]:
    return F.interpolate(m.x, size=(1, 1), mode="bilinear"), F.interpolate(m.x, size=(3, 15), mode="bilinear", align_corners=True)


@case(185509, "bilinear, a slice, a convolution and a pool, chosen by a mask", params={
      "conv": lambda: nn.Conv2d(2, 3, 3, padding=1), "x": (2, 2, 6, 8)}, inputs={"mask": torch.arange(252).reshape(2, 3, 6,
      7) % 3 == 0})  # fmt: skip
def chosen_by_mask(m) -> Tensor:
    y = F.interpolate(m.x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)[:, :, 1:7, 1:8]
    conv = m.conv(y)
    return torch.where(m.mask, conv, F.max_pool2d(conv, 3, stride=1, padding=1))


@case(100793, "reflected borders, one of them negative", params={"x": (2, 3, 7, 3), "y": (2, 3, 9)}, group="resampled")
def reflected_borders(m) -> tuple[Tensor, ...]:
    return F.pad(m.x, (-1, 0, 6, 6), mode="reflect"), F.pad(m.y, (3, 2), mode="replicate"), F.pad(m.y, (4, 5), mode="circular")


@case(None, "grid_sample beyond the borders", params={"x": (1, 2, 5, 5), "grid": (1, 4, 4, 2)}, group="resampled")
def sampled_beyond_borders(m) -> tuple[Tensor, ...]:
    return tuple(F.grid_sample(m.x, m.grid * 2.0, padding_mode=p, align_corners=False) for p in ("zeros", "border", "reflection"))


@case(172064, "unfold with gaps and overlaps, and fold", params={"x": (3, 12), "y": (1, 8, 9)}, group="resampled")
def windows(m) -> tuple[Tensor, ...]:
    return m.x.unfold(1, 2, 5), m.x.unfold(1, 4, 2), F.fold(m.y, (4, 4), 2), F.fold(m.y[:, :, :4], (4, 4), 2, stride=2)


@case(189895, "a long sum, padded in front", params={"x": (2, 16384)}, inputs={"mask": torch.ones(1, 16384, dtype=torch.bool)})
def long_sum_padded(m) -> tuple[Tensor, ...]:
    lengths = m.mask.sum(-1, dtype=torch.int32)
    return F.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0)), F.pad(m.x.mean(-1), (1, 2), value=3.0)


@case(193061, "two modulated norms, whose scales and shifts are rows of one table", params={
      "table": (4, 16), "x": (1, 2500, 16), "first": lambda: nn.LayerNorm(16), "second": lambda: nn.LayerNorm(16)})  # fmt: skip
def modulated_norms(m) -> Tensor:
    a, b, c, d = m.table.chunk(4)
    x = m.x + m.first(m.x) * (1 + a) + b
    return x + m.second(x) * (1 + c) + d


@case(185539, "attention: float64 and causal, keys and values of other sizes, a scale that is a tensor", group="attention",
      params={"q": torch.randn(1, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), "k": (1, 2, 5, 8),
                  "v": (1, 2, 5, 16), "p": (1, 2, 4, 8), "scale": torch.tensor(0.5)})  # fmt: skip
def attention(m) -> tuple[Tensor, ...]:
    mask = torch.triu(torch.full((4, 5), -1e9), 1)
    return (
        F.scaled_dot_product_attention(m.q, m.q, m.q, is_causal=True), F.scaled_dot_product_attention(m.p, m.k, m.v),
        F.softmax(m.p @ m.k.transpose(-2, -1) / m.scale + mask, -1) @ m.v,
    )  # fmt: skip


@case(
    None,
    "attention where a row may see nothing",
    params={"q": (1, 1, 4, 8), "k": (1, 1, 4, 8), "v": (1, 1, 4, 8)},
    group="attention",
)
def attention_without_sight(m) -> tuple[Tensor, ...]:
    mask = torch.tensor([[True] * 4, [False] * 4, [True, False] * 2, [False, True] * 2])
    scores = (m.q @ m.k.transpose(-2, -1)).masked_fill(~mask, -torch.inf)
    return F.scaled_dot_product_attention(m.q, m.k, m.v, attn_mask=mask), scores.softmax(-1) @ m.v


@case(136263, "running products with zeros, running sums, largest and logsumexp", group="running", params={
      "x": torch.tensor([[1.0, 0.0, 2.0, 0.5], [2.0, 3.0, -1.0, 4.0]]), "y": (3, 20), "z": (20, 3)})  # fmt: skip
def running(m) -> tuple[Tensor, ...]:
    return m.x.cumprod(1), m.y.cumsum(1), m.z.cumsum(0), m.y.cummax(1).values, m.z.cummin(0).indices, m.y.logcumsumexp(1)


@case(None, "padding_idx and repeated rows of an embedding", params={"table": lambda: nn.Embedding(6, 5, padding_idx=2)},
      inputs={"at": torch.tensor([[0, 2, 5], [5, 5, 2]])}, group="running")  # fmt: skip
def embeddings(m) -> Tensor:
    return m.table(m.at)


@case(146390, "weights looked up, viewed as matrices and multiplied", params={"table": lambda: nn.Embedding(3, 16), "x": (6, 4)},
      inputs={"at": torch.tensor([0, 2, 1, 1, 0, 2])}, group="running")  # fmt: skip
def matrices_looked_up(m) -> Tensor:
    return torch.bmm(m.table(m.at).view(-1, 4, 4), m.x.unsqueeze(-1)).square()


@case(None, "the largest of equals, and norms at zero", group="running", params={
      "x": torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), "y": (3, 7), "z": torch.zeros(2, 3)})  # fmt: skip
def equals_and_zeros(m) -> tuple[Tensor, ...]:
    return (
        m.x.max(1).values, m.x.amax(1), m.x.min(0).values, m.z.norm(dim=1), torch.linalg.vector_norm(m.z, 1, 1),
        F.normalize(m.z, dim=1),
        *([m.y.aminmax(dim=1).max] if torch.__version__ >= "2.12" else []),  # torch 2.11 has no derivative of it
    )  # fmt: skip


@case(174459, "sorted, selected and pooled numbers", params={"x": (3, 7), "y": (2, 3, 9)})
def sorted_numbers(m) -> tuple[Tensor, ...]:
    return m.x.sort(dim=1, stable=True).values, m.x.topk(2, 1).values, m.x.median(1).values, F.interpolate(m.y, scale_factor=1.1)


@case(None, "convolutions with strides, groups and output_padding", params={
      "a": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
      "b": lambda: nn.Conv1d(4, 8, 3, padding="same", padding_mode="circular", dilation=2),
      "c": lambda: nn.ConvTranspose1d(8, 2, 4, stride=3),
      "x": (2, 4, 5, 5), "y": (2, 4, 9)})  # fmt: skip
def convolutions(m) -> tuple[Tensor, ...]:
    return m.a(m.x), m.c(m.b(m.y))


@pytest.mark.parametrize("cases", GRADIENTS.groups())
def test_gradients(cases, tmp_path) -> None:
    check_cases(cases, tmp_path)
