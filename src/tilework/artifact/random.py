"""Random numbers as a pure function of (seed, site, index): the same on every device, and in eager PyTorch.

A training step must be able to draw a dropout mask inside compiled code, draw the very same mask again in the backward
section, and let `test` give the user's untouched module that mask too (capture/seeded.py). So nothing here has hidden state: a
number is a hash of the step's seed, of which random call of the step this is (its site), and of the element's index.

The hash is two rounds of a 32-bit mixer, written with int64 tensors whose values stay below 2**63, so no operation
overflows and every backend gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF


def _mix(x: Any) -> Any:
    """A bijection of 32-bit values with near-ideal avalanche. Works on ints and on int64 tensors in [0, 2**32)."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK32
    return x ^ (x >> 15)


def mix_bits(index: Any, low: Any, high: Any, site: Any) -> Any:
    """The hash itself, for tensors, for plain integers, and for the values that a code generator passes through it."""
    key1 = _mix(low ^ _mix(site + 1))
    key2 = _mix(high ^ key1)
    return _mix((_mix(index ^ key1) + key2) & MASK32)


def _drawn(shape: Sequence[int], seed: Tensor, site: Any) -> Tensor:
    index = torch.arange(math.prod(shape), dtype=torch.int64, device=seed.device)
    return mix_bits(index, seed & MASK32, (seed >> 32) & MASK32, site).reshape(tuple(shape))


@torch.library.custom_op("tilework::random_bits", mutates_args=())
def _random_bits(shape: Sequence[int], seed: Tensor, site: int) -> Tensor:
    return _drawn(shape, seed, site)


@_random_bits.register_fake
def _(shape: Sequence[int], seed: Tensor, site: int) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.int64, device=seed.device)


@torch.library.custom_op("tilework::random_bits_at", mutates_args=())
def _random_bits_at(shape: Sequence[int], seed: Tensor, site: Tensor) -> Tensor:
    """The same where the site is only known when the program runs: one piece of code serves several sites."""
    return _drawn(shape, seed, site)


@_random_bits_at.register_fake
def _(shape: Sequence[int], seed: Tensor, site: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.int64, device=seed.device)


def bits(shape: Sequence[int], seed: Tensor, site: int) -> Tensor:
    """int64 values, uniform in [0, 2**32). `seed` is a 0-dim int64 tensor, not negative.

    One operator, so that a graph shows it as one and a backend can write the hash into its loops."""
    return torch.ops.tilework.random_bits(list(shape), seed, site)


def uniform(shape: Sequence[int], seed: Tensor, site: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform in [0, 1): 24 random bits, which float32 holds exactly."""
    return ((bits(shape, seed, site) >> 8).to(torch.float32) * 2.0**-24).to(dtype)


def normal(shape: Sequence[int], seed: Tensor, site: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal, by Box and Muller from two uniforms. Uses sites `site` and `site` with the top bit set."""
    u1, u2 = uniform(shape, seed, site), uniform(shape, seed, site | 0x40000000)
    return (torch.sqrt(-2.0 * torch.log(1.0 - u1)) * torch.cos((2.0 * math.pi) * u2)).to(dtype)


def keep_mask(shape: Sequence[int], seed: Tensor, site: int, p: Tensor) -> Tensor:
    """True where dropout keeps an element. `p`, the probability to drop, is a 0-dim float64 tensor."""
    threshold = (p * 2.0**32).to(torch.int64)
    return bits(shape, seed, site) >= threshold


def next_seed(base: int, counter: int) -> int:
    """The seed of the counter-th micro-batch: splitmix64, without its sign bit. The native driver has the same function."""
    z = (base + (counter + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & 0x7FFFFFFFFFFFFFFF
