"""Threads that work beside a session: their own operators of torch must not take its cores."""

from __future__ import annotations

import ctypes
import functools

import torch


def one_thread_here() -> None:
    """From here on, torch's operators in the calling thread use this thread alone. Otherwise each Python thread that calls some
    gets OpenMP threads of its own, which spin after every operator: a session that trains meanwhile takes two to three
    times as long. Other threads, and those that begin later, keep theirs, which torch.set_num_threads would change."""
    torch.get_num_threads()  # torch sets each thread up at its first call; what it sets is changed now
    for library in _openmp():
        library.omp_set_num_threads(1)


_NAMES = ("libgomp", "libiomp", "libomp")


@functools.cache
def _openmp() -> list[ctypes.CDLL]:
    """The OpenMP libraries of this process. Empty where they cannot be found: then nothing changes."""
    try:
        with open("/proc/self/maps") as f:
            paths = {
                line.split(maxsplit=5)[5].strip() for line in f if "libgomp" in line or "libiomp" in line or "libomp" in line
            }
        libraries = [ctypes.CDLL(path) for path in sorted(paths)]
    except OSError:
        return []
    return [library for library in libraries if hasattr(library, "omp_set_num_threads")]
