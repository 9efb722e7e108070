"""The GPU's driver, as far as torch does not show it: modules of machine code, and launches of their kernels."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_uint, c_void_p
from typing import Any

import torch

from .errors import MachineError

_NO_BINARY, _OUT_OF_MEMORY = 209, 2
_MAX_DYNAMIC_SHARED, _ANY_CLUSTER_SIZE = 8, 14
_MAX_STATIC = 48 << 10  # bytes of shared memory that need no asking
_CTYPES: dict[str, Any] = {
    "i1": ctypes.c_int8, "u1": ctypes.c_uint8, "i8": ctypes.c_int8, "u8": ctypes.c_uint8, "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16, "i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "f32": ctypes.c_float, "fp64": ctypes.c_double, "f64": ctypes.c_double,
}  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise MachineError("cuda-driver", "the driver of NVIDIA's GPUs is not installed", found=str(e),
                           fix="install it; or compile and run with --device cpu") from e  # fmt: skip
    library.cuModuleLoadData.argtypes = [ctypes.POINTER(c_void_p), c_char_p]
    library.cuModuleGetFunction.argtypes = [ctypes.POINTER(c_void_p), c_void_p, c_char_p]
    library.cuModuleUnload.argtypes = [c_void_p]
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, c_void_p]
    library.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    launch: Any = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p]
    library.cuLaunchKernel.argtypes = [*launch, c_void_p]
    library.cuLaunchCooperativeKernel.argtypes = launch
    library.cuOccupancyMaxActiveClusters.argtypes = [ctypes.POINTER(c_int), c_void_p, c_void_p]
    library.cuOccupancyMaxActiveBlocksPerMultiprocessor.argtypes = [ctypes.POINTER(c_int), c_void_p, c_int, ctypes.c_size_t]
    return library


def _check(status: int, what: str) -> None:
    if status == 0:
        return
    text = c_char_p()
    _library().cuGetErrorString(status, ctypes.byref(text))
    why = (text.value or b"unknown").decode()
    if status == _NO_BINARY:
        raise MachineError("artifact-fingerprint", f"{what}: made for GPUs of another architecture", found=why,
                           fix="compile again on this machine")  # fmt: skip
    if status == _OUT_OF_MEMORY:
        raise MachineError("memory", f"{what}: the GPU's memory is full", found=why, fix="use a smaller batch")
    raise MachineError("cuda-driver", f"{what} failed", found=f"{why} ({status})",
                       fix="if a kernel of this process has failed before, start the process again")  # fmt: skip


def copy_within(to: int, source: int, num_bytes: int) -> None:
    """From one address on the GPU to another, in the order of the current stream."""
    if to != source and num_bytes:
        stream = torch.cuda.current_stream().cuda_stream
        _check(_library().cuMemcpyDtoDAsync_v2(to, source, num_bytes, stream), "a copy on the GPU")


def resident(function: c_void_p, threads: int, shared: int) -> int:
    """Blocks of a kernel that are on a multiprocessor at once."""
    found = c_int()
    status = _library().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(found), function, threads, shared)
    _check(status, "asking how many blocks fit")
    return found.value


class _LaunchConfig(ctypes.Structure):
    _fields_ = (("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
                ("attributes", c_void_p), ("num_attributes", c_uint))  # fmt: skip


def clusters(function: c_void_p, blocks: int, threads: int, shared: int) -> int:
    """How many clusters of a kernel that is one are on the GPU at once."""
    found = c_int()
    config = _LaunchConfig((c_uint * 3)(blocks, 1, 1), (c_uint * 3)(threads, 1, 1), shared, None, None, 0)
    status = _library().cuOccupancyMaxActiveClusters(ctypes.byref(found), function, ctypes.byref(config))
    return found.value if status == 0 else 0


_dropped: list[tuple[int, c_void_p]] = []  # (GPU, module) that nobody has any more; the next load unloads them


class Module:
    """Machine code on the GPU, until close(), or until this object is gone and another one is loaded."""

    def __init__(self, code: bytes, name: str) -> None:
        self._handle = c_void_p()
        self.name = name
        self._gpu = torch.cuda.current_device()
        while _dropped:
            gpu, handle = _dropped.pop()
            with torch.cuda.device(gpu):
                torch.cuda.synchronize()
                _library().cuModuleUnload(handle)
        _check(_library().cuModuleLoadData(ctypes.byref(self._handle), code), f"loading {name}")

    def function(self, name: str, shared: int = 0, *, large_cluster: bool = False) -> c_void_p:
        found = c_void_p()
        _check(_library().cuModuleGetFunction(ctypes.byref(found), self._handle, name.encode()), f"{self.name}: kernel {name}")
        if shared > _MAX_STATIC:
            _check(_library().cuFuncSetAttribute(found, _MAX_DYNAMIC_SHARED, shared), f"{name}: {shared} bytes of shared memory")
        if large_cluster:
            _check(_library().cuFuncSetAttribute(found, _ANY_CLUSTER_SIZE, 1), f"{name}: a cluster of more than 8 blocks")
        return found

    def close(self) -> None:
        if self._handle:
            _library().cuModuleUnload(self._handle)
            self._handle = c_void_p()

    def __del__(self) -> None:
        """Not unloaded here: this may be any thread at any moment, in the middle of a capture, say."""
        if self._handle:
            _dropped.append((self._gpu, self._handle))


class Kernel:
    """A launch made ready: where it reads and writes is fixed."""

    def __init__(
        self,
        function: c_void_p,
        grid: Sequence[int],
        threads: int,
        shared: int,
        args: Sequence[tuple[str, Any]],
        *,
        cooperative: bool = False,
        name: str = "kernel",
    ) -> None:
        self.values = [c_void_p(v) if kind.startswith("*") else _CTYPES[kind](v) for kind, v in args]
        self.values += [c_void_p(None), c_void_p(None)]  # scratch memory that Triton may ask for: never here
        self._pointers = (c_void_p * len(self.values))(*(ctypes.addressof(v) for v in self.values))
        self._shape = (*map(int, grid), threads, 1, 1, shared)
        self._function, self._cooperative, self.name = function, cooperative, name
        self.empty = 0 in self._shape[:3]

    def launch(self) -> None:
        if self.empty:
            return
        stream = torch.cuda.current_stream().cuda_stream
        if self._cooperative:
            status = _library().cuLaunchCooperativeKernel(self._function, *self._shape, stream, self._pointers)
        else:
            status = _library().cuLaunchKernel(self._function, *self._shape, stream, self._pointers, None)
        if status:
            _check(status, f"launching {self.name}")
