"""Expressions of one line, by kind. {x} and {o} are earlier values ({o} broadcasts to {x}), {s} is x's shape, {d} one of its
dimensions, {k} a number from 1 to the extent of that dimension, {m} any number, {keep} may ask for keepdim, NEW is the new value.
"""

from __future__ import annotations


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


VIEWS = _lines("""
    {x}[:, {column}:]
    {x}.transpose(0, 1)
    {x}[..., ::2]
    {x}.flip(-1)
    {x}.flip(0, 1)
    {x}[..., :1].expand({s}) * {x}
    {x}.unsqueeze({third}) * 0.5
    {x}.diagonal() * 2
    {x}.flatten().reshape({last}, -1)
    {x}.mT.reshape({s})
    {x}.unfold(-1, {part}, 1).mean(-1)
    {x}.diagonal(offset={column}, dim1=0, dim2=1) * {x}.flatten()[0]
    {x}.narrow(0, {row}, 1).expand_as({x}) + {x}
    torch.diag_embed({x}[0])
    {x}[..., None, :] - {x}[..., None]
    {x}.as_strided(({rows}, {columns}), (1, {rows}))
    {x}.movedim(0, -1).contiguous()
    {x}.unbind(-1)[0]
""")

TOGETHER = _lines("""
    torch.cat([{x}, {o}.expand({s})], {d})
    torch.stack([{x}, {o}.expand({s})], {d})
    torch.cat([{x}.flip({d}), {x}], {d})
    {x}.repeat_interleave(2, {d})
    torch.roll({x}, {m}, {d})
    torch.stack([{x}, {x}], {d}).amax({d})
    torch.cat({x}.chunk(2, {d})[::-1], {d})
    {x}.repeat({twice})
    F.pad({x}, ({third}, 1), value=0.5)
    {x}.split({part}, {d})[0] * 1.5
    torch.where({x} > {o}, {x}, {o} * 2)
""")

IN_PLACE = _lines("""
    NEW.add_({o}, alpha=0.5)
    NEW.mul_(0.5).add_(1)
    NEW.masked_fill_(NEW.detach() > 0.3, 0.25)
    NEW[..., {i}:] = 0.5
    NEW[..., {i}] += {x}[..., 0]
    NEW[:, {column}].mul_(2)
    NEW[..., {chosen}] = {x}[..., :{count}] * 0.5
    NEW.mT[..., 0].add_(1)
    NEW.clamp_(-0.5, 0.5)
    NEW.index_add_(0, torch.tensor({rows}), {x}[{rows}])
    NEW[::2].copy_({x}[::2].cos())
    NEW.scatter_(-1, NEW.detach().argmax(-1, keepdim=True), 0.5)
    NEW.neg_().relu_()
    NEW[NEW.detach() < 0] = 0.125
    NEW.diagonal().add_(1)
    NEW.addcmul_({x}, {o}, value=0.5)
""")

REDUCTIONS = _lines("""
    {x}.amax({d}{keep})
    {x}.max({d}{keep}).values
    {x}.min({d}{keep})[0]
    {x}.topk({k}, {d}).values
    {x}.sort({d}, descending=True).values
    {x}.median({d}{keep}).values
    {x}.sum({d}{keep}) * 0.3
    {x}.mean({d}{keep})
    {x}.var({d}, unbiased=False{keep})
    {x}.norm(dim={d}{keep})
    {x}.logsumexp({d}{keep})
    {x}.cumsum({d}) * 0.3
    (1 + {x} * 0.1).cumprod({d})
    {x}.softmax({d})
    {x}.log_softmax({d}) * 0.2
    {x}.clamp(-1, 1).round(decimals=1).amax({d}{keep})
    {x}.cummax({d}).values
    (1 + {x} * 0.1).prod({d}{keep})
    {x}.relu().amax({d}{keep})
    torch.logcumsumexp({x}, {d})
    {x}.amin()
    {x}.sort({d}).values.diff(dim={d})
    {x}.gather({d}, {x}.max({d}, keepdim=True).indices)
    F.normalize({x}, dim={d}, eps=0.1)
    {x} - {x}.mean({d}, keepdim=True)
    ({x} - {x}.amax({d}, keepdim=True)).exp()
    {x}.std({d}, unbiased=False, keepdim=True) + {x}
    F.softmin({x}, {d})
    {x}.kthvalue({k}, {d}).values
    ({x} == {x}.amax({d}, keepdim=True)) * {x}
    torch.cat([{x}, {x}], {d}).topk({k}, {d}).values
""")

ARITHMETIC = _lines("""
    {x} + {o}
    {x} * {o}
    {x} / (1 + {o}.abs())
    torch.where({x} > {o}, {x}, {o})
    {x}.clamp({o} - 1, {o} + 1)
    {x}.abs() - {o}
    {x} * {o}.sign()
    torch.maximum({x}, {o})
    ({x}.square() + 0.1).sqrt()
    torch.lerp({x}, {o}.expand_as({x}), 0.3)
    ({x} > 0) * {o}
    torch.addcdiv({x}, {o}, 2 + {o}.abs())
    {x}.fmod(0.7) + {o}
    {x}.abs().add(0.1).log()
    torch.atan2({x}, 1.5 + {o}.abs())
    {x}.abs().add(0.2).pow({power})
    torch.hypot({x}, 1 + {o}.abs())
    {x}.expm1() * 0.3
    {x}.erf() * {o}
    torch.minimum({x}.relu(), 0 * {o})
    {x}.clamp(-0.5, 0.7)
    {x}.detach() * {o}
    {x}.masked_fill({o} > 0, 0.5)
    {x}.tril() - {x}.triu(1)
    ({x} * 4).floor() * 0.25 + {x}
    torch.sinc({x})
    {x}.logaddexp({o})
    ({x} + {o}).sigmoid().logit(0.1)
    {x}.trunc() + {x}.frac()
    torch.copysign({x}, {o})
    {x}.xlogy(1 + {o}.abs())
    {x}.remainder(0.7)
""")

OTHER_TYPES = _lines("""
    {x}.double()
    {x}.double().cumsum(-1).float() * 0.3
    ({x}.double() @ {x}.double().mT).float() * 0.2
    ({x} > 0).sum(-1).float() * {x}.mean(-1)
    {x}.argmax(-1)
    ({x} * 3).long()
    ({x} > 0) & ({x} < 0.5)
    {x} * {w}.sum()
    {x} + ({x} > 0).any(-1, keepdim=True)
    {x}.half().float()
    {x}.to(torch.bfloat16).to({x}.dtype)
    ({x} > 0).long().cumsum(-1) * {x}
    {w}.float().mean() * {x} * 0.2
    torch.arange({x}.shape[-1]) * {x} * 0.1
    ({x} * 3).int() // 2 * {x}
    torch.bucketize({x}.detach(), torch.tensor([-1.0, 0.0, 1.0])) * {x} * 0.3
    {x}.isfinite().all() * {x}
    ({x} * 5).round().to(torch.int8).to({x}.dtype) * 0.2 + {x}
""")

# {n} is 1 or 2: the dimensions of an image
POOLING = _lines("""
    F.max_pool{n}d({x}, {k}, stride=1)
    F.avg_pool{n}d({x}, {k}, ceil_mode=True)
    F.adaptive_avg_pool{n}d({x}, {fourth})
    F.max_pool{n}d({x}, {k}, padding={half}, stride=2)
    F.interpolate({x}, scale_factor=2)
    F.interpolate({x}, scale_factor=2, mode='{linear}')[..., ::2]
    F.adaptive_max_pool{n}d({x}, {k})
    F.avg_pool{n}d({x}, {k}, stride=1, padding={half}, count_include_pad=False)
    F.interpolate({x}, size={size}, mode='{linear}', align_corners=True)
    F.pad({x}, {margins}, mode='replicate')
    {x}.unfold(2, {k}, 1).amax(-1)
    F.max_pool{n}d(torch.cat([{x}, {x}], -1).relu(), 2, stride=1)
    F.lp_pool{n}d({x}, 2, {k}) * 0.3
    F.max_pool{n}d({x}.round(decimals=1), {k}, ceil_mode=True)
""")

CHANCE = _lines("""
    F.dropout({x}, 0.3)
    self.drop({x})
    {x} + torch.randn_like({x}) * 0.1
    {x} * (torch.rand({last}) > 0.3)
    F.dropout({x}, 0.2) + F.dropout({x}, 0.5)
    F.dropout1d({x3}, 0.3)
    {x} * torch.bernoulli(torch.full_like({x}, 0.7))
""")

CRITERIA = _lines("""
    F.cross_entropy({x}, torch.arange({b}) % {k})
    F.binary_cross_entropy_with_logits({x}, ({x} > 0).float())
    F.smooth_l1_loss({x}, {x}.detach().flip(0))
    F.huber_loss({x}, {x}.flip(1), delta=0.4)
    F.kl_div({x}.log_softmax(-1), {x}.detach().softmax(-1).flip(0), reduction='batchmean')
    F.cosine_similarity({x}, {x}.flip(0) + 1, dim=-1)
    F.nll_loss({x}.log_softmax(-1), torch.arange({b}) % {k}, reduction='none')
    F.multi_margin_loss({x}, torch.arange({b}) % {k})
    F.cross_entropy({x}, {x}.detach().softmax(-1), label_smoothing=0.1)
    F.l1_loss({x}, torch.zeros_like({x}))
    F.mse_loss({x}, {x}.mean(0, keepdim=True).expand_as({x}))
    F.triplet_margin_loss({x}, {x}.flip(0), {x} + 1)
    F.gaussian_nll_loss({x}, {x}.flip(0).detach(), {x}.square() + 0.3)
    F.cross_entropy({x}, torch.arange({b}) % {k}, ignore_index=0, reduction='sum') * 0.1
""")
