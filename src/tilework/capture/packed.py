"""Packed sequences, written with plain operators. Their lengths decide shapes, so they must be known: constants, or numbers that
follow from integer inputs, which are fixed in the artifact and checked in each run (reads.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACK, PAD = torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence  # type: ignore[attr-defined]
RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def is_packed(args: Sequence[Any]) -> bool:
    """Whether a recurrent function is given (data, batch_sizes, state, weights, ...), and not (input, state, weights, ...)."""
    return len(args) == 9 and isinstance(args[3], (list, tuple))


def _numbers(tensor: Tensor) -> list[int]:
    return [int(n.item()) for n in tensor.unbind()]  # one by one: each is a read of its own


def pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """(the rows that are within their sequence, time step by time step; how many there are in each)"""
    x = x.transpose(0, 1) if batch_first else x
    known = _numbers(lengths)
    sizes = [sum(n > t for n in known) for t in range(max(known))]
    return torch.cat([x[t, :size] for t, size in enumerate(sizes)]), torch.tensor(sizes)


def pad(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
    sizes = _numbers(batch_sizes)
    most, rest = sizes[0], data.shape[1:]
    rows = [torch.cat([part, part.new_full((most - len(part), *rest), value)]) for part in data.split(sizes)]
    rows += [data.new_full((most, *rest), value)] * max(0, total - len(sizes))
    lengths = torch.tensor([sum(size > i for size in sizes) for i in range(most)])
    return torch.stack(rows, dim=1 if batch_first else 0), lengths


def recurrent(  # type: ignore[no-untyped-def]
    func, data, batch_sizes, state, weights, biases, num_layers, p, train, bidirectional
):
    """torch.lstm, gru and rnn over packed rows: at each time step the sequences that are still running, which come first."""
    ways = 2 if bidirectional else 1
    each = len(weights) // (num_layers * ways)
    states = list(state) if isinstance(state, (tuple, list)) else [state]
    sizes = _numbers(batch_sizes)
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        sides = []
        for way in range(ways):
            at = layer * ways + way
            rows, last = _layer(
                func, data, sizes, [s[at] for s in states], weights[at * each : (at + 1) * each], biases, way == 1
            )
            sides.append(rows)
            for kept, end in zip(ends, last, strict=True):
                kept.append(end)
        data = torch.cat(sides, dim=1) if ways == 2 else sides[0]
        if p and train and layer + 1 < num_layers:
            data = F.dropout(data, p)
    return data, *(torch.stack(kept) for kept in ends)


def _layer(
    func: Any, data: Tensor, sizes: list[int], state: list[Tensor], weights: Sequence[Tensor], biases: bool, backwards: bool
) -> tuple[Tensor, list[Tensor]]:
    w_in, w_state, *rest = weights
    b_in, b_state = rest[:2] if biases else (None, None)
    shorter = rest[-1] if len(rest) % 2 else None  # an LSTM's projection of its output
    given = F.linear(data, w_in, b_in).split(sizes)
    rows: list[Tensor] = [data] * len(sizes)
    for t in reversed(range(len(sizes))) if backwards else range(len(sizes)):
        running = [s[: sizes[t]] for s in state]
        new = _cell(func, given[t], F.linear(running[0], w_state, b_state), running, shorter)
        rows[t] = new[0]
        state = [torch.cat([n, s[sizes[t] :]]) for n, s in zip(new, state, strict=True)]
    return torch.cat(rows), state


def _cell(func: Any, given: Tensor, own: Tensor, state: list[Tensor], shorter: Tensor | None) -> list[Tensor]:
    if func is torch.lstm:
        i, f, g, o = (given + own).chunk(4, dim=1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return [h if shorter is None else F.linear(h, shorter), c]
    if func is torch.gru:
        (r, z, n), (own_r, own_z, own_n) = given.chunk(3, dim=1), own.chunk(3, dim=1)
        new = (n + (r + own_r).sigmoid() * own_n).tanh()
        return [new + (z + own_z).sigmoid() * (state[0] - new)]
    return [(given + own).tanh() if func is torch.rnn_tanh else (given + own).relu()]
