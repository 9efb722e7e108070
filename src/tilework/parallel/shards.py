"""Sharded optimizer state: each rank updates some of the parameters and keeps only their state, then all exchange the parameters.

The artifact has the update in parts (plan/shards.py); parts are dealt to ranks by turns. State of parts that are somebody else's
takes no memory: its pages are given back to the system."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from ..artifact.manifest import Manifest, Signature
from ..artifact.names import Kind, is_kind
from ..errors import UserError
from .group import Group

_PAGE, _DONTNEED = mmap.PAGESIZE, 4  # MADV_DONTNEED
REST = "opt_rest"


class Shards:
    def __init__(self, group: Group, manifest: Manifest, signature: Signature, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: the session's buffers, in host memory."""
        self.group, self._tensors = group, tensors
        roles = sorted((r for r in signature.programs if r.startswith("opt_") and r != REST), key=lambda r: int(r[4:]))
        if not roles:
            raise UserError(
                "run-shards", "this artifact's update is not in parts", fix="compile with --shards 8 (Options(num_shards=8))"
            )
        self.rest = [REST] if REST in signature.programs else []
        writes = {r: manifest.programs[signature.programs[r]].writes for r in roles}
        self.owner = {r: i % group.size for i, r in enumerate(roles)}
        self.own = [r for r in roles if self.owner[r] == group.rank]
        self.params = {r: [b for b in writes[r] if is_kind(b, Kind.PARAM)] for r in roles}
        self._gathered = False
        self.state = {r: [b for b in writes[r] if is_kind(b, Kind.STATE)] for r in roles}
        self.release()

    @property
    def state_bytes(self) -> int:
        """Of optimizer state that this rank keeps."""
        return sum(_size(self._tensors[b]) for r in self.own for b in self.state[r])

    @property
    def elsewhere(self) -> frozenset[str]:
        """Optimizer state that other ranks keep."""
        return frozenset(b for r, found in self.state.items() if r not in self.own for b in found)

    @property
    def all_bytes(self) -> int:
        return sum(_size(self._tensors[b]) for found in self.state.values() for b in found)

    def exchange(self) -> None:
        """After the update: each part's parameters from its owner."""
        for role, params in self.params.items():
            self._spread(params, self.owner[role], "parameters of other ranks")
        if self._gathered:
            self.release()

    def gather(self) -> None:
        """All optimizer state to all ranks, for a checkpoint. The next step gives the memory back."""
        self._gathered = True
        for role, state in self.state.items():
            self._spread(state, self.owner[role], "optimizer state of other ranks")

    def _spread(self, buffers: list[str], owner: int, what: str) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for b in buffers:
            by_dtype.setdefault(self._tensors[b].dtype, []).append(self._tensors[b])
        for dtype, found in by_dtype.items():
            flat = torch.cat([_storage(t) for t in found])
            raw = flat.view(torch.uint8) if dtype in (torch.bool, torch.bfloat16, torch.float16) else flat
            self.group.from_rank(torch.view_as_real(raw).view(-1) if raw.is_complex() else raw, owner, what)
            if self.group.rank != owner:
                at = 0
                for t in found:
                    own = _storage(t)
                    own.copy_(flat[at : at + own.numel()])
                    at += own.numel()

    def release(self) -> None:
        """The memory of state that is not this rank's. It reads as zeros."""
        self._gathered = False
        libc = ctypes.CDLL(None, use_errno=True)
        for role, state in self.state.items():
            if self.owner[role] == self.group.rank:
                continue
            for b in state:
                t = self._tensors[b]
                begin, end = t.data_ptr(), t.data_ptr() + _size(t)
                first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
                if last > first:
                    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED)

    def describe(self) -> str:
        parts = len(self.own)
        return (f"rank {self.group.rank} keeps {self.state_bytes / 1e6:.1f} of {self.all_bytes / 1e6:.1f} MB of optimizer state "
                f"({parts} of {len(self.owner)} parts)")  # fmt: skip


def _size(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _storage(t: Tensor) -> Tensor:
    """A tensor's elements as they lie: its layout is a permutation without gaps."""
    return t.as_strided((t.numel(),), (1,))
