"""The user's own model with our random numbers: dropout and every random operator of torch draw from a seed and a site."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..artifact.manifest import Skip
from ..artifact.random import bits, keep_mask, normal, uniform
from ..errors import UserError

_SITES = 0x7117 << 40  # seed of torch's generator that stands for site 0
aten = torch.ops.aten


def current_site() -> int:
    """Where the next random number will be drawn."""
    return torch.default_generator.initial_seed() - _SITES


@dataclass(frozen=True)
class DropoutSite:
    """A dropout call of the model whose probability is a run-time input."""

    name: str  # hyperparameter name, such as "encoder.drop.p"
    p: float


def _feature_shape(func: Callable[..., Any], shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the mask: one value an element for dropout, one a channel for dropout1d, 2d and 3d."""
    if func is DROPOUTS[0]:
        return tuple(shape)
    unbatched = (func is F.dropout1d and len(shape) == 2) or (func is F.dropout3d and len(shape) == 4)
    kept = 1 if unbatched else 2
    return tuple(shape[:kept]) + (1,) * (len(shape) - kept)


DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)


_ATTENTION = F.scaled_dot_product_attention
_attending: dict[int, _Dropout] = {}  # thread -> the mode inside whose attention it is
_attending_lock = threading.Lock()
_before = (F.dropout, F.scaled_dot_product_attention)  # what was there when the first one replaced it


def _attention_inside(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):  # type: ignore[no-untyped-def]
    mode = _attending.get(threading.get_ident())
    function = mode._attention if mode is not None and dropout_p else _before[1]
    return function(query, key, value, attn_mask, dropout_p, is_causal, **rest)


def _dropout_inside(input, p=0.5, training=True, inplace=False):  # type: ignore[no-untyped-def]
    mode = _attending.get(threading.get_ident())
    if mode is None:  # somebody else's model
        return _before[0](input, p, training, inplace)
    return mode._dropout(DROPOUTS[0], input, p, training, inplace)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class _Dropout(TorchFunctionMode):
    """Replaces F.dropout and its channel-wise kin by a seeded mask with a run-time probability."""

    def __init__(self, owner: SeededRandom) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is _ATTENTION and (kwargs.get("dropout_p") or (len(args) > 4 and args[4])):
            return self._attention(*args, **kwargs)
        packed = len(args) == 9 and isinstance(args[3], (list, tuple))  # (data, batch_sizes, state, weights, ...)
        if func in _RECURRENT and len(args) == 9 and not packed and args[5] and args[6]:
            return self._recurrent(func, *args)
        if func is F.multi_head_attention_forward:
            with self._inside_attention():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _inside_attention(self) -> Iterator[None]:
        """Inside an intercepted function this mode is off; what torch's attention calls there is replaced by name, for this
        thread. Several threads may capture at once: the first one replaces, the last one puts back."""
        global _before
        own = threading.get_ident()
        with _attending_lock:
            if not _attending:
                _before = F.dropout, F.scaled_dot_product_attention
                F.dropout, F.scaled_dot_product_attention = _dropout_inside, _attention_inside  # type: ignore[assignment]
            _attending[own] = self
        try:
            yield
        finally:
            with _attending_lock:
                del _attending[own]
                if not _attending:
                    F.dropout, F.scaled_dot_product_attention = _before

    def _dropout(self, func, input, p=0.5, training=True, inplace=False):  # type: ignore[no-untyped-def]
        if not training:
            return input
        site, p_input = self.owner.dropout_site(float(p))
        keep = keep_mask(_feature_shape(func, input.shape), self.owner.seed, site, p_input)
        scale = torch.where(p_input < 1.0, 1.0 / (1.0 - p_input), 0.0).to(input.dtype)
        noise = keep.to(input.dtype) * scale
        return input.mul_(noise) if inplace else input * noise

    def _recurrent(self, func, x, hx, weights, biases, num_layers, p, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
        """Layer by layer, with our dropout between the layers."""
        each, ways = (4 if biases else 2) * (2 if bidirectional else 1), 2 if bidirectional else 1
        states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
        last: list[list[Tensor]] = [[] for _ in states]
        for layer in range(num_layers):
            now = [s[layer * ways : (layer + 1) * ways] for s in states]
            own = weights[layer * each : (layer + 1) * each]
            x, *ends = func(x, tuple(now) if len(now) > 1 else now[0], own, biases, 1, 0.0, train, bidirectional, batch_first)
            for kept, end in zip(last, ends, strict=True):
                kept.append(end)
            if layer + 1 < num_layers:
                x = self._dropout(DROPOUTS[0], x, p)
        return x, *(torch.cat(kept) for kept in last)

    def _attention(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):  # type: ignore[no-untyped-def]
        if kwargs.get("enable_gqa"):
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
        if is_causal:
            causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~causal, float("-inf"))
        elif attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self._dropout(DROPOUTS[0], torch.softmax(scores, dim=-1), dropout_p) @ value


class SeededRandom(TorchDispatchMode):
    """While active, every random operator of torch draws from (seed, site), sites being counted in program order.

    `probabilities` holds the run-time dropout probability of each dropout site (0-dim float64 tensors). Without it the
    sites are collected instead, with the probabilities that the model asks for.
    """

    def __init__(
        self,
        seed: Tensor,
        probabilities: Sequence[Tensor] | None = None,
        module_names: dict[int, str] | None = None,
        skips: Sequence[Skip] = (),
    ) -> None:
        super().__init__()
        self.seed = seed
        self.skips = skips
        self.gone: dict[int, Skip] = {}  # what is left out in this run, by its first site
        self._passed: set[int] = set()
        self.probabilities = probabilities
        self.module_names = module_names or {}
        self.sites: list[DropoutSite] = []
        self._index_of: dict[int, int] = {}  # site -> position among the dropouts

    def __enter__(self) -> SeededRandom:
        self._state = torch.get_rng_state()
        torch.default_generator.manual_seed(_SITES)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_rng_state(self._state)

    def next_site(self) -> int:
        """Counts in torch's own generator: whoever saves and restores its state (recomputation in the backward pass does) draws
        the same numbers again."""
        site = current_site()
        if not 0 <= site < 2**30:
            raise UserError(
                "random-seed",
                "the model seeds torch's random numbers itself, so every step would draw the same numbers",
                found=f"a generator with seed {site + _SITES}",
                fix="seed on the host, before the step: session.seed(...)",
            )
        while site in self.gone:
            skip = self.gone[site]
            if site not in self._passed:  # a backward pass may come here again
                self._passed.add(site)
                self.sites += [DropoutSite("", 0.0)] * skip.dropouts
            site = skip.last
        torch.default_generator.manual_seed(_SITES + site + 1)
        return site

    def leave_out(self, skip: Skip) -> None:
        """Eager PyTorch draws nothing in what it leaves out; a compiled step always does. So its sites are passed over."""
        if skip.last > skip.first:
            self.gone[skip.first] = skip

    def drawn(self, site: int, value: Tensor) -> Tensor:
        for skip in self.skips:
            if skip.site == site and bool(_TESTS[skip.test](value.reshape(-1)[skip.index], skip.limit)) != skip.called:
                self.leave_out(skip)
        return value

    def dropout_site(self, p: float) -> tuple[int, Tensor]:
        site = self.next_site()
        index = self._index_of.setdefault(site, len(self.sites))
        if index == len(self.sites):
            self.sites.append(DropoutSite(self._site_name(index), p))
        if self.probabilities is None:
            return site, torch.tensor(p, dtype=torch.float64)
        return site, self.probabilities[index]

    def _site_name(self, index: int) -> str:
        """The path of the innermost module that is running, as it is named in the user's model."""
        frame = sys._getframe(2)
        while frame is not None:
            path = self.module_names.get(id(frame.f_locals.get("self")))
            if path is not None:
                name = f"{path or 'model'}.p"
                taken = sum(site.name.split("#")[0] == name for site in self.sites)
                return f"{name}#{taken}" if taken else name
            frame = frame.f_back  # type: ignore[assignment]
        return f"dropout{index}.p"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        handler = _RANDOM_OPERATORS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, *args, **(kwargs or {}))


_TESTS = {"lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge}


def _like(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None else x.dtype


def _rand(r: SeededRandom, size, *, dtype=None, **_):  # type: ignore[no-untyped-def]
    site = r.next_site()
    return r.drawn(site, uniform(size, r.seed, site, dtype or torch.get_default_dtype()))


def _randn(r: SeededRandom, size, *, dtype=None, **_):  # type: ignore[no-untyped-def]
    return normal(size, r.seed, r.next_site(), dtype or torch.get_default_dtype())


def _rand_like(r: SeededRandom, x, *, dtype=None, **_):  # type: ignore[no-untyped-def]
    site = r.next_site()
    return r.drawn(site, uniform(x.shape, r.seed, site, _like(x, dtype)))


def _randn_like(r: SeededRandom, x, *, dtype=None, **_):  # type: ignore[no-untyped-def]
    return normal(x.shape, r.seed, r.next_site(), _like(x, dtype))


def _randint(r: SeededRandom, low, high, size, *, dtype=None, **_):  # type: ignore[no-untyped-def]
    return (bits(size, r.seed, r.next_site()) % (high - low) + low).to(dtype or torch.int64)


def _bernoulli(r: SeededRandom, x, p=None, **_):  # type: ignore[no-untyped-def]
    """aten.bernoulli(x): x holds the probabilities. aten.bernoulli.p(x, p): x only gives shape and dtype."""
    return (uniform(x.shape, r.seed, r.next_site()) < (x if p is None else p)).to(x.dtype)


def _bernoulli_(r: SeededRandom, x, p=0.5, **_):  # type: ignore[no-untyped-def]
    return x.copy_(uniform(x.shape, r.seed, r.next_site()) < p)


def _uniform_(r: SeededRandom, x, low=0.0, high=1.0, **_):  # type: ignore[no-untyped-def]
    return x.copy_(uniform(x.shape, r.seed, r.next_site(), x.dtype) * (high - low) + low)


def _normal_(r: SeededRandom, x, mean=0.0, std=1.0, **_):  # type: ignore[no-untyped-def]
    return x.copy_(normal(x.shape, r.seed, r.next_site(), x.dtype) * std + mean)


def _exponential_(r: SeededRandom, x, rate=1.0, **_):  # type: ignore[no-untyped-def]
    return x.copy_(-torch.log(1.0 - uniform(x.shape, r.seed, r.next_site(), x.dtype)) / rate)


_RANDOM_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.rand.default: _rand,
    aten.randn.default: _randn,
    aten.rand_like.default: _rand_like,
    aten.randn_like.default: _randn_like,
    aten.randint.default: lambda r, high, size, **k: _randint(r, 0, high, size, **k),
    aten.randint.low: _randint,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli_.float: _bernoulli_,
    aten.bernoulli_.Tensor: _bernoulli_,
    aten.uniform_.default: _uniform_,
    aten.normal_.default: _normal_,
    aten.exponential_.default: _exponential_,
}

RANDOM_OPERATORS = frozenset(_RANDOM_OPERATORS)


@contextmanager
def seeded(
    seed: Tensor,
    probabilities: Sequence[Tensor] | None = None,
    module_names: dict[int, str] | None = None,
    skips: Sequence[Skip] = (),
) -> Iterator[SeededRandom]:
    """Run eager PyTorch, or trace it, with seeded random numbers; yields the mode, whose `sites` fill up on the way.
    `skips`: what random numbers leave out in eager PyTorch, and never in the compiled step whose numbers these are."""
    mode = SeededRandom(seed, probabilities, module_names, skips)
    with mode, _Dropout(mode):
        yield mode
