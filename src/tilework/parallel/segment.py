"""Memory that the ranks of one machine share: a place for each one's gradients, and lines by which they wait for each other.

compiler/exchange.cpp works on it: a header, a seat for each rank, then the parts, each as long as one rank's buckets."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ..errors import MachineError
from .group import Group

_LINE = 64
_PAGE = mmap.PAGESIZE
_STALE = 3600.0  # seconds
_PID, _RANK = 3, 4  # of a seat, in numbers of 8 bytes


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


class Segment:
    """`buckets` keep their addresses: from now on their memory is this rank's part of the segment."""

    def __init__(self, group: Group, buckets: Sequence[Tensor], ranks: Sequence[int]) -> None:
        """`ranks`: those that share it, of this machine."""
        sizes = [_pages(b.numel() * b.element_size()) for b in buckets]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.seat, self.size = ranks.index(group.rank), len(ranks)
        self.parts, self.part_bytes = _pages(_LINE * (1 + self.size)), sum(sizes)
        total = self.parts + self.size * self.part_bytes
        path, problem = "", ""
        if self.seat == 0:
            path, problem = _created(total)
        told = group.tell({"path": path, "problem": problem, "bytes": self.part_bytes})
        leader = told[ranks[0]]
        try:
            if leader["problem"]:
                raise MachineError("ranks-memory", "no shared memory for the gradients of this machine's ranks",
                                   found=leader["problem"], expected=f"{total / 1e6:.1f} MB in /dev/shm",
                                   fix="give the container more (--shm-size), or reduce on the host (--reduce host)")  # fmt: skip
            fd = os.open(leader["path"], os.O_RDWR)
        finally:
            group.tell("opened")
            if path:
                with contextlib.suppress(OSError):
                    os.unlink(path)  # it lives as long as somebody has it open
        try:
            self._memory = mmap.mmap(fd, total)
            self._held = ctypes.c_char.from_buffer(self._memory)
            self.address = ctypes.addressof(self._held)
            for bucket, offset, size in zip(buckets, self.offsets, sizes, strict=True):
                _map_over(bucket, fd, self.parts + self.seat * self.part_bytes + offset, size)
        finally:
            os.close(fd)
        self.numbers = numbers = memoryview(self._memory).cast("q")
        seat = _LINE * (1 + self.seat) // 8
        numbers[seat + _RANK] = group.rank
        numbers[seat + _PID] = os.getpid()
        group.tell("mapped")


def _created(total: int) -> tuple[str, str]:
    problem = ""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        _sweep(Path(folder))
        path = Path(folder) / f"tilework-{os.getuid()}-{secrets.token_hex(8)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(fd, 0, total)  # now, not by a signal in the middle of a step
                return str(path), ""
            except OSError:
                os.unlink(path)
                raise
            finally:
                os.close(fd)
        except OSError as e:
            problem = problem or f"{folder}: {e.strerror}"
    return "", problem


def _sweep(folder: Path) -> None:
    """What ranks have left there that were killed between making a file and opening it, which takes moments."""
    for path in folder.glob(f"tilework-{os.getuid()}-{'[0-9a-f]' * 16}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                path.unlink()


def _map_over(bucket: Tensor, fd: int, offset: int, size: int) -> None:
    """The file at the bucket's own address, with what the bucket holds now."""
    address = bucket.data_ptr()
    if address % _PAGE:
        raise MachineError("ranks-memory", "gradients do not begin at a page of memory", fix="report this")
    os.pwrite(fd, ctypes.string_at(address, bucket.numel() * bucket.element_size()), offset)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fixed = 0x10  # MAP_FIXED
    found = libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, fd, offset)
    if found != address:
        raise MachineError("ranks-memory", "shared memory could not be mapped", found=os.strerror(ctypes.get_errno()))
