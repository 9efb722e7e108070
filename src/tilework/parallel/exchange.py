"""The reduction inside the native step, through memory that the ranks of a machine share (compiler/exchange.cpp)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p

import torch
from torch import Tensor

from ..errors import MachineError
from .algorithms import Algorithm
from .group import Group, RanksError, on_failure
from .segment import Segment

_ACROSS = ctypes.CFUNCTYPE(c_int, c_int64, c_void_p, c_int64)
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.int64: 2, torch.bfloat16: 3, torch.float16: 4}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_SPIN = 50e-6  # seconds; a step's share of time, not more
_ERROR_SIZE = 1024


class _Bucket(Structure):
    _fields_ = (("offset", c_int64), ("count", c_int64), ("dtype", c_int32))


class _Settings(Structure):
    _fields_ = (
        ("segment", c_void_p), ("seat", c_int64), ("size", c_int64), ("parts", c_int64), ("part_bytes", c_int64),
        ("buckets", POINTER(_Bucket)), ("num_buckets", c_int64), ("scale", c_double), ("timeout_ns", c_int64),
        ("spin_ns", c_int64), ("across", _ACROSS), ("ready_after", POINTER(c_int64)),
    )  # fmt: skip


class Exchange:
    """What this rank's driver calls between the backward pass and the update.

    algorithm     "hierarchical": through shared memory within this machine, along rings between machines; "ring": along one ring
                  of all ranks, wherever they are.
    ready_after   of each bucket, the call of the gradients' program after which it is complete: then a thread carries it while
                  the program goes on. None: all buckets go when the program is done."""

    def __init__(
        self,
        library: ctypes.CDLL,
        group: Group,
        buckets: Sequence[Tensor],
        *,
        mean: bool,
        algorithm: Algorithm,
        ready_after: Sequence[int] | None,
    ) -> None:
        unknown = {str(b.dtype) for b in buckets if _PARTS.get(b.dtype, b.dtype) not in _DTYPES}
        if unknown:
            raise MachineError("ranks-dtype", "gradients of this type cannot be reduced in the native step",
                               found=", ".join(unknown), fix="reduce on the host (--reduce host)")  # fmt: skip
        layout = list((c_int64 * 5).in_dll(library, "tilework_exchange_layout"))
        if layout != [2, 64, 64, ctypes.sizeof(_Bucket), ctypes.sizeof(_Settings)]:
            raise MachineError("native-driver", "the artifact was made by another version of Tilework", found=f"layout {layout}",
                               fix="compile again")  # fmt: skip
        self.group, self.library = group, library
        self.buckets = [torch.view_as_real(b).view(-1) if b.dtype in _PARTS else b for b in buckets]
        shares = algorithm == "hierarchical"
        self._peers = group.peers if shares else list(range(group.size))
        self.segment = segment = Segment(group, buckets, group.local_ranks if shares else [group.rank])
        self._error: BaseException | None = None
        self._began = 0  # reductions
        table = (_Bucket * len(buckets))(
            *[_Bucket(at, b.numel(), _DTYPES[b.dtype]) for at, b in zip(segment.offsets, self.buckets, strict=True)]
        )
        ready = (c_int64 * len(buckets))(*ready_after) if ready_after is not None else None
        spins = segment.size <= len(os.sched_getaffinity(0)) or _apart(group)
        self._across = _ACROSS(self._over_peers) if len(self._peers) > 1 else _ACROSS()
        settings = _Settings(
            segment.address, segment.seat, segment.size, segment.parts, segment.part_bytes, table, len(buckets),
            1.0 / group.size if mean else 1.0, int(group.timeout * 1e9), int(_SPIN * 1e9) if spins else 0, self._across, ready,
        )  # fmt: skip
        for name in ("open", "begin", "after", "finish", "give_up", "close"):
            function = getattr(library, f"tilework_exchange_{name}")
            function.restype = c_void_p if name == "open" else c_int if name == "finish" else None
        library.tilework_exchange_open.argtypes = [POINTER(_Settings)]
        library.tilework_exchange_finish.argtypes = [c_void_p, c_char_p, c_size_t]
        for name in ("begin", "give_up", "close"):
            getattr(library, f"tilework_exchange_{name}").argtypes = [c_void_p]
        self.handle = c_void_p(library.tilework_exchange_open(ctypes.byref(settings)))
        self._kept = (settings, table, ready)
        on_failure(self.give_up)

    def functions(self) -> tuple[c_void_p, c_void_p, c_void_p]:
        """As the driver calls it: begin, finish, and what both take."""
        begin, finish = (ctypes.cast(getattr(self.library, f"tilework_exchange_{n}"), c_void_p) for n in ("begin", "finish"))
        return begin, finish, self.handle

    def watch(self) -> tuple[c_void_p, c_void_p]:
        """What a program calls after each of its pieces."""
        return ctypes.cast(self.library.tilework_exchange_after, c_void_p), self.handle

    def reduce(self, buckets: Sequence[Tensor] = ()) -> None:
        """The same from Python, for sections that are run one by one."""
        text = ctypes.create_string_buffer(_ERROR_SIZE)
        if self.library.tilework_exchange_finish(self.handle, text, _ERROR_SIZE):
            raise self.failed(text.value.decode(errors="replace"))

    def failed(self, text: str) -> RanksError:
        error, self._error = self._error, None
        if isinstance(error, RanksError):
            return error
        return RanksError("ranks-lost", text, fix=self.group.advice)

    def _over_peers(self, bucket: int, data: int, count: int) -> int:
        """From native code: this rank's slice, summed over those that have the same slice elsewhere."""
        if bucket == 0:
            self._began += 1
            self.group.steps = self._began - 1  # for what is said when a rank is lost
        return self._sum_over_peers(self.buckets[bucket].dtype, data, count)

    def _sum_over_peers(self, dtype: torch.dtype, data: int, count: int) -> int:
        try:
            memory = (ctypes.c_char * max(1, count * dtype.itemsize)).from_address(data)
            flat = torch.frombuffer(memory, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
            self.group.sum_over(flat, self._peers)
            return 0
        except BaseException as e:
            self._error = e
            return 1

    def give_up(self) -> None:
        """The others need not wait for this rank."""
        if self.handle:
            self.library.tilework_exchange_give_up(self.handle)

    def close(self) -> None:
        if self.handle:
            handle, self.handle = self.handle, c_void_p()
            self.library.tilework_exchange_close(handle)


class Sums(Exchange):
    """Sums over all replicas of a few numbers, which programs ask for in their middle: statistics of batch normalization."""

    ROOM = 1 << 13  # numbers, half of which travel at a time

    def __init__(self, library: ctypes.CDLL, group: Group, *, algorithm: Algorithm) -> None:
        memory = mmap.mmap(-1, self.ROOM * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        bucket = torch.frombuffer(memory, dtype=torch.float64, count=self.ROOM)
        super().__init__(library, group, [bucket], mean=False, algorithm=algorithm, ready_after=None)

    @property
    def has_failed(self) -> bool:
        """Whether somebody gave up (struct Header)."""
        return self.segment.numbers[1] != 0

    def give_to(self, program: ctypes.CDLL) -> None:
        """The library of a program that asks for sums."""
        program.tilework_sum_with.argtypes = [c_void_p, c_void_p]
        program.tilework_sum_with(ctypes.cast(self.library.tilework_exchange_sum, c_void_p), self.handle)

    def _over_peers(self, is_double: int, data: int, count: int) -> int:
        return self._sum_over_peers(torch.float64 if is_double else torch.float32, data, count)


def _apart(group: Group) -> bool:
    """Whether the ranks of this machine run on cores of their own."""
    with contextlib.suppress(OSError):
        mine = os.sched_getaffinity(0)
        others = [os.sched_getaffinity(group.pids[r]) for r in group.local_ranks if r != group.rank]
        return not any(mine & other for other in others)
    return False
