"""Reports of silently wrong numbers in PyTorch's tracker: NaN and infinities, very small and very large numbers, precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trackers import Table, check_cases

pytestmark = pytest.mark.slow

NUMBERS = Table()
case = NUMBERS.case
INF, NAN = torch.inf, torch.nan
ODD = torch.tensor(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 30.0, -30.0, 100.0, -100.0, INF, -INF, NAN, 1e-30, 3e38, -3e38]
)
SMALL = torch.tensor([1e-8, 1e-7, 2e-7, 5e-7, 1e-6, 1e-5, 1e-4, 1e-3, -1e-7] * 3)


@case(198183, "erf and atanh of small numbers", exact=True, rtol=1e-4, params={"x": SMALL}, group="erf of small numbers")
def erf_of_small(m) -> tuple[Tensor, ...]:
    return torch.erf(m.x), torch.atanh(m.x)


@case(189801, "expm1 of small numbers, and elu, which has it inside", exact=True, rtol=1e-4, params={"x": SMALL},
      group="expm1 of small numbers")  # fmt: skip
def expm1_of_small(m) -> tuple[Tensor, ...]:
    return m.x.expm1(), F.elu(-m.x.abs())


@case(198183, "other functions of small numbers", exact=True, rtol=1e-4, params={"x": SMALL}, group="small numbers")
def functions_of_small(m) -> tuple[Tensor, ...]:
    return (
        m.x.log1p(), m.x.sinh(), m.x.tanh(), m.x.asinh(), m.x.sin(), m.x.atan(), F.gelu(m.x), torch.special.erfinv(m.x),
    )  # fmt: skip


@case(183767, "asinh, acosh and sinh of large numbers", params={
      "x": torch.tensor([3e22, 7e25, -8e23, 1e10] * 5), "y": torch.tensor([88.9, 89.0, -89.2, 89.3] * 5)},
      group="large numbers")  # fmt: skip
def functions_of_large(m) -> tuple[Tensor, ...]:
    return (
        torch.asinh(m.x),
        torch.acosh(m.x.abs()),
        torch.sinh(m.y),
        torch.cosh(m.y),
        F.softplus(m.y * 1e3),
        F.logsigmoid(-m.y * 1e3),
    )


@case(135758, "numbers below the smallest normal one", exact=True, rtol=1e-3, params={"x": torch.tensor([0.1875, 1.0, -3.0] * 7)},
      group="small numbers")  # fmt: skip
def subnormal(m) -> tuple[Tensor, ...]:
    y = m.x * 2.0**-124 * 2.0**-3
    return y, y * 2.0**100, (m.x.double() * 1e-310) * 1e300


@case(196596, "addmm without its first term, and without its product", params={"a": (1, 4), "b": (4, 4), "x": (3, 4), "y": (4,)},
      inputs={"bad": torch.full((4,), NAN), "badm": torch.full((1, 4), NAN)})  # fmt: skip
def addmm_without_terms(m) -> tuple[Tensor, ...]:
    return (
        torch.addmm(m.bad, m.a, m.b, beta=0),
        torch.addmm(m.bad, m.x, m.b, beta=0),
        torch.addmm(m.y, m.badm, m.b.detach(), alpha=0),
    )


@case(None, "a parameter that is infinite where it must not be chosen stays so", params={
      "w": torch.tensor([[0.5, -INF, 0.1], [0.2, 0.3, -INF]])}, buffers={"x": (2, 3)})  # fmt: skip
def infinite_parameter(m) -> Tensor:
    return (m.x + m.w).softmax(1)


@case(
    186281,
    "nothing times NaN is NaN, also in a gradient",
    params={"x": (20,), "b": (4, 4), "y": (4,)},
    inputs={"bad": torch.full((20,), NAN)},
)
def nothing_times_nan(m) -> tuple[Tensor, ...]:
    return m.x * m.bad * 0, torch.addmm(m.y, m.bad[None, :4], m.b, alpha=0)


@case(143978, "roots of negative numbers, their angle, and what follows", inputs={"x": torch.tensor([0.7, -1.1, 0.5, 1.4,
      -0.3] * 5)},
      group="odd numbers")  # fmt: skip
def angle_of_nan(m) -> tuple[Tensor, ...]:
    return m.x.rsqrt().angle().atan().sin(), m.x.angle(), m.x.log().sign(), m.x.sqrt().relu(), m.x.sqrt().clamp(0, 1)


@case(93784, "NaN and infinities through functions of one number", group="odd numbers", inputs={"x": ODD, "y": ODD.double()})
def odd_through_functions(m) -> tuple[Tensor, ...]:
    def of(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.clamp(-1, 1), x.clamp_min(0.5), x.relu(), F.leaky_relu(x), F.hardtanh(x), F.relu6(x), x.sign(), x.round(),
            x.trunc(), x.floor(),
            x.frac(), x.abs(), x.nan_to_num(), x.exp(), x.expm1(), x.log1p(), x.sigmoid(), x.tanh(), F.silu(x), F.mish(x),
            F.softplus(x), F.elu(x), F.hardswish(x), F.hardsigmoid(x), x.reciprocal(), x.square(), x.sinh(), x.erf(), x.erfc(),
            torch.special.erfinv(x), torch.lgamma(x), torch.special.i0(x / 4), x.isfinite(), x.isnan(), x.logit(1e-6),
            F.logsigmoid(x), F.threshold(x, 0.1, 20.0), F.softsign(x), F.tanhshrink(x), x.deg2rad(), torch.exp2(x),
        )  # fmt: skip

    return *of(m.x), *of(m.y)


@case(93784, "NaN, infinities and zeros through functions of two numbers", group="two odd numbers",
      inputs={"x": ODD[:, None].expand(19, 19).contiguous(), "y": ODD[None].expand(19, 19).contiguous()})  # fmt: skip
def odd_pairs(m) -> tuple[Tensor, ...]:
    x, y = m.x, m.y
    return (
        torch.maximum(x, y), torch.minimum(x, y), torch.fmax(x, y), torch.fmin(x, y), torch.atan2(x, y), torch.hypot(x, y),
        x * y, x / y,
        x**y, torch.xlogy(x, y), torch.special.xlog1py(x, y), torch.copysign(x, y), torch.heaviside(x, y), x == y, x < y, x != y,
        torch.logaddexp(x, y), torch.clamp(x, min=y), torch.where(x > y, x, y), x - y,
        torch.nextafter(x, y), x.lerp(y, 0.3),
    )  # fmt: skip


@case(198057, "remainders and quotients rounded down, of infinities, zeros and very large numbers", group="remainders",
      inputs={"x": ODD[:, None].expand(19, 19).contiguous(), "y": ODD[None].expand(19, 19).contiguous()})  # fmt: skip
def odd_remainders(m) -> tuple[Tensor, ...]:
    return (
        torch.fmod(m.x, m.y),
        torch.remainder(m.x, m.y),
        torch.floor_divide(m.x, m.y),
        torch.div(m.x, m.y, rounding_mode="trunc"),
    )


@case(
    197895,
    "a quotient rounded down, by a number that is not quite a tenth",
    group="remainders",
    inputs={"x": torch.arange(1.0, 200.0)},
)
def quotient_rounded_down(m) -> tuple[Tensor, ...]:
    return m.x // 0.1, m.x % 0.1, m.x.double() // 0.1, m.x // 7


@case(187935, "the sign of zeros, as bools", group="sign of zero", inputs={"x": ODD})
def sign_as_bool(m) -> tuple[Tensor, ...]:
    return m.x.signbit(), m.x.double().signbit()


@case(189799, "a negative zero plus zero is zero: one over it is infinite", group="sign of zero",
      inputs={"x": torch.tensor([-0.5, -0.1, 0.3, -2.5] * 5)})  # fmt: skip
def negative_zero_plus_zero(m) -> tuple[Tensor, ...]:
    return (m.x.ceil() + torch.zeros_like(m.x)).reciprocal(), (m.x.ceil() + 0.0).reciprocal(), m.x.ceil().mul(1.0).reciprocal()


@case(174172, "the sign of a zero, where it can be seen", group="two odd numbers", inputs={"x": (6,)})
def sign_of_constant_zero(m) -> Tensor:
    return torch.copysign(m.x, -0.0)


@case(
    143648,
    "polygamma, digamma and others of their kind",
    group="constants",
    inputs={"x": torch.tensor([0.5, 2.0, 7.5, 1e-3] * 5)},
)
def special_functions(m) -> tuple[Tensor, ...]:
    return (
        torch.special.polygamma(0, m.x), torch.special.polygamma(1, m.x), torch.digamma(m.x), torch.lgamma(m.x),
        torch.special.i0e(m.x),
        torch.special.i1(m.x), torch.special.log_ndtr(m.x - 5), torch.special.ndtri(m.x / 8), torch.special.bessel_j0(m.x),
        torch.special.zeta(m.x + 1, m.x), torch.special.entr(m.x), torch.special.gammainc(m.x, m.x),
    )  # fmt: skip


@case(113167, "variances with too few numbers, of one number, and of many", group="variances", params={"x": (1, 3), "y": (4, 30)})
def variances(m) -> tuple[Tensor, ...]:
    return (
        m.x[0, 0].var(correction=4.9), m.x.std(0), m.x.var(0, correction=0), *torch.var_mean(m.y, 1, correction=40),
        m.y.std(1), m.y.var(),
        (m.y + 1000).var(1),
    )  # fmt: skip


@case(142839, "norms over many numbers with a large mean", params={"x": (2, 3, 96, 96), "n": lambda: nn.InstanceNorm2d(3,
      affine=True),
      "g": lambda: nn.GroupNorm(3, 3)}, rtol=1e-4)  # fmt: skip
def norms_of_many(m) -> tuple[Tensor, ...]:
    return m.n(m.x + 30.0)[:, :, ::9, ::9], m.n(m.x * 3.0 - 7.0)[:, :, ::9, ::9], m.g(m.x + 5.0)[:, :, ::9, ::9]


@case(194504, "batch norms: momentum None, without statistics, in evaluation", group="variances", params={
      "x": (6, 4), "a": lambda: nn.BatchNorm1d(4), "b": lambda: nn.BatchNorm1d(4, track_running_stats=False),
      "c": lambda: nn.BatchNorm1d(4).eval(),
      "d": lambda: nn.RMSNorm(4), "e": lambda: nn.LayerNorm(1)})  # fmt: skip
def batch_norms(m) -> tuple[Tensor, ...]:
    return m.a(m.x), m.b(m.x), m.c(m.x), m.d(m.x), F.local_response_norm(m.x[None], 3)


@case(194504, "a batch norm that averages over all batches", params={"x": (6, 4), "n": lambda: nn.BatchNorm1d(4, momentum=None)},
      refused="capture-python")  # fmt: skip
def batch_norm_without_momentum(m) -> Tensor:
    return m.n(m.x)


@case(132107, "running sums and logsumexp of infinities", group="infinite rows", params={"w": (3, 20)},
      inputs={"x": torch.tensor([[-INF] * 20, [INF] * 20, [1.0, -INF] * 10])})  # fmt: skip
def infinite_rows(m) -> tuple[Tensor, ...]:
    x = m.x + m.w
    return x.logsumexp(1), x.softmax(1), x.log_softmax(1), m.x.cumsum(1), m.x.sum(1), m.x.mean(0), m.x.amax(1), m.x.prod(1)


@case(None, "losses: nothing but ignored targets, weights, smoothing, beta of zero", group="losses", params={"x": (6, 5),
      "y": (6, 5)},
      inputs={"none": torch.full((6,), -100), "at": torch.tensor([0, 4, -100, 2, 1, -100]), "t": (6, 5)})  # fmt: skip
def losses(m) -> tuple[Tensor, ...]:
    weight = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0])
    return (
        F.cross_entropy(m.x, m.none), F.cross_entropy(m.y, m.at, weight, label_smoothing=0.1), F.nll_loss(m.y, m.at, weight),
        F.smooth_l1_loss(m.y, m.t, beta=0.0), F.huber_loss(m.y, m.t, delta=0.3), F.kl_div(m.y, m.t.softmax(1),
        reduction="batchmean"),
        F.binary_cross_entropy_with_logits(m.y * 50, m.t.sigmoid()), F.binary_cross_entropy(m.y.sigmoid(), m.t.sigmoid()),
        F.poisson_nll_loss(m.y, m.t.abs(), full=True), F.margin_ranking_loss(m.y, m.t, m.t.sign()),
        F.cosine_embedding_loss(m.y, m.t, torch.tensor([1.0, -1.0] * 3)), F.triplet_margin_loss(m.y, m.t, m.t + 1),
        F.soft_margin_loss(m.y, m.t.sign()),
    )  # fmt: skip


@case(None, "gradients past a choice: roots, quotients, powers and clamps", group="losses", params={
      "x": torch.tensor([0.0, 1.0, -1.0, 4.0] * 5), "y": torch.tensor([0.0, 2.0] * 10)})  # fmt: skip
def gradients_past_choices(m) -> tuple[Tensor, ...]:
    return (
        torch.where(m.x > 0, m.x.sqrt(), 0.0), torch.where(m.x != 0, 1 / m.x, 0.0), m.x.clamp(0, 1), m.x.abs(), m.y**2,
        m.y**0.5, m.y**0,
        torch.maximum(m.x, m.y), m.x.relu(), F.hardswish(m.x * 3), F.hardsigmoid(m.x * 3), torch.hypot(m.x, m.y),
        torch.atan2(m.x, m.y), m.x.sign() * m.x,
        m.x.nan_to_num(), torch.xlogy(m.y, m.x.abs() + 1), F.relu6(m.x * 2),
    )  # fmt: skip


@case(
    157959,
    "division by a constant, then rounded down",
    group="constants",
    inputs={"x": torch.arange(1.0, 200.0), "y": torch.arange(1.0, 200.0)},
)
def divided_and_rounded(m) -> tuple[Tensor, ...]:
    return (
        (m.x * 49 / 49).floor(),
        (m.x * 101 / 101.0).floor(),
        (m.x / 10).floor(),
        (m.x * 0.1).floor(),
        (m.y.double() * 49 / 49).floor(),
    )


@case(175966, "constants, aranges and linspaces in double precision", group="constants", params={
      "x": torch.linspace(0, 1, 20, dtype=torch.float64)})  # fmt: skip
def double_constants(m) -> tuple[Tensor, ...]:
    return (
        m.x * 0.1 + 1 / 3, torch.arange(0, 2, 0.1, dtype=torch.float64) * m.x, torch.linspace(0.1, 0.7, 20,
        dtype=torch.float64) + m.x,
        (m.x + 1e-9).log(), torch.full((20,), 0.1, dtype=torch.float64) - m.x, torch.logspace(-2, 3, 20,
        dtype=torch.float64), m.x.erf(), m.x.exp(),
        torch.arange(16777216.0, 16777236.0) + 1,
    )  # fmt: skip


@case(185337, "rounded to half precision and back", group="halves", exact=True, rtol=1e-6, inputs={"x": (5, 4)})
def rounded_to_half(m) -> tuple[Tensor, ...]:
    y, z = m.x.half().float(), m.x.bfloat16().float()
    return y, y.sum(1), z, (z - m.x).abs()


@case(185337, "arithmetic in bfloat16, which may keep more digits in between", group="halves", rtol=1e-2, inputs={"x": (5, 4)})
def computed_in_half(m) -> tuple[Tensor, ...]:
    return (m.x.bfloat16() * 3 + 1).float(), m.x.bfloat16().sum(1).float()


@case(
    182225,
    "turned by angles in bf16",
    group="constants",
    params={"q": (1, 2, 7, 16)},
    rtol=2e-2,
    inputs={"cos": (1, 7, 16), "sin": (1, 7, 16)},
)
def turned_in_bf16(m) -> Tensor:
    q, cos, sin = m.q.bfloat16(), m.cos.bfloat16()[:, None], m.sin.bfloat16()[:, None]
    return q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin


@case(None, "Fourier transforms and complex numbers inside", params={"x": (3, 16)})
def fourier(m) -> tuple[Tensor, ...]:
    f = torch.fft.rfft(m.x)
    return f.abs(), torch.fft.irfft(f * torch.complex(torch.tensor(0.0), torch.tensor(1.0)), 16), torch.view_as_real(f)


@pytest.mark.parametrize("cases", NUMBERS.groups())
def test_numbers(cases, tmp_path) -> None:
    check_cases(cases, tmp_path)
