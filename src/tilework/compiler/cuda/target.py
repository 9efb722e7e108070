"""The GPU that code is made for: the one of this machine, or one that is named. Code is generated without asking a driver, so
that a machine without a GPU makes the same code, only untimed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ...errors import MachineError, UserError

DEFAULT = "sm_90"


@dataclass(frozen=True)
class Target:
    """An architecture, and what the generators of code want to know of a GPU of it."""

    architecture: str  # sm_90
    num_multiprocessors: int
    registers: int = 65536
    threads: int = 2048  # that a multiprocessor holds
    shared_bytes: int = 232448  # that one block may have
    present: bool = False  # whether such a GPU is here, to time kernels on

    @property
    def number(self) -> int:
        return int(self.architecture.removeprefix("sm_"))

    @property
    def major(self) -> int:
        return self.number // 10


_KNOWN = {
    "sm_80": Target("sm_80", 108, shared_bytes=166912),
    "sm_86": Target("sm_86", 84, threads=1536, shared_bytes=101376),
    "sm_89": Target("sm_89", 128, threads=1536, shared_bytes=101376),
    "sm_90": Target("sm_90", 132),
    "sm_100": Target("sm_100", 148),
    "sm_120": Target("sm_120", 170, threads=1536, shared_bytes=101376),
}


def here() -> Target | None:
    """The GPU of this machine that torch would use; None where there is none. TILEWORK_TIME_KERNELS=0 compiles as if it were
    elsewhere: faster, and the same code on every machine."""
    if not torch.cuda.is_available():
        return None
    p: Any = torch.cuda.get_device_properties(0)
    return Target(f"sm_{p.major}{p.minor}", p.multi_processor_count, p.regs_per_multiprocessor,
                  p.max_threads_per_multi_processor, p.shared_memory_per_block_optin,
                  present=os.environ.get("TILEWORK_TIME_KERNELS", "1") != "0")  # fmt: skip


def target_for(name: str) -> Target:
    """`name`: an architecture, or "native" for this machine's; without a GPU, native is DEFAULT."""
    found = here()
    if name == "native":
        return found or _KNOWN[DEFAULT]
    if found is not None and found.architecture == name:
        return found
    if name not in _KNOWN:
        raise UserError("options", f"architecture {name!r} is not known", expected=f"native, {', '.join(_KNOWN)}")
    return _KNOWN[name]


def require_toolchain() -> None:
    """MachineError that says what to install."""
    try:
        import triton  # noqa: F401
    except ImportError as e:
        raise MachineError("cuda-toolchain", "compiling for a GPU needs Triton", found=str(e),
                           fix="install a CUDA build of torch, which brings Triton") from e  # fmt: skip


_lock = threading.RLock()


@contextmanager
def assumed(target: Target) -> Iterator[None]:
    """Within it Inductor and Triton believe that the machine has this GPU, and ask no driver. One thread at a time."""
    require_toolchain()
    import torch._dynamo.device_interface as interface
    import triton
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._subclasses import fake_tensor

    major, minor = divmod(target.number, 10)
    properties = SimpleNamespace(
        name=target.architecture, major=major, minor=minor, multi_processor_count=target.num_multiprocessors,
        regs_per_multiprocessor=target.registers, max_threads_per_multi_processor=target.threads, max_threads_per_block=1024,
        warp_size=32, shared_memory_per_block_optin=target.shared_bytes, shared_memory_per_block=49152, total_memory=1 << 36,
        L2_cache_size=50 << 20, gcnArchName="",
    )  # fmt: skip
    known = DeviceProperties(type="cuda", index=0, multi_processor_count=target.num_multiprocessors, cc=target.number,
                             major=major, regs_per_multiprocessor=target.registers,
                             max_threads_per_multi_processor=target.threads, warp_size=32)  # fmt: skip
    asked: dict[str, Any] = {
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (major, minor),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
    }
    if not torch.cuda.is_available() and hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        torch._C._ensureCUDADeviceGuardSet()
    formats = _convolution_format if not torch.cuda.is_available() else torch._C._conv_determine_backend_memory_format
    with (
        _lock,
        mock.patch.multiple(torch.cuda, **asked),
        mock.patch.object(DeviceProperties, "create", classmethod(lambda cls, device: known)),
        mock.patch.object(fake_tensor, "init_gpu_context", lambda *_: None),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        mock.patch.object(torch._C, "_conv_determine_backend_memory_format", formats),
        mock.patch.dict(interface.caching_worker_device_properties, {"cuda": [properties]}),
    ):
        driver = triton.runtime.driver
        before = driver._active
        driver.set_active(_Driver(target.number))
        _forget()
        try:
            yield
        finally:
            driver._active = before
            _forget()


def _convolution_format(x: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
    """How cuDNN lays out what it makes; torch asks the library, where there is a GPU."""
    for t in (x, weight):
        if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous():
            return torch.channels_last
        if t.dim() == 5 and t.is_contiguous(memory_format=torch.channels_last_3d) and not t.is_contiguous():
            return torch.channels_last_3d
    return torch.contiguous_format


def _forget() -> None:
    """What torch has noted about Triton on this machine."""
    from torch.utils import _triton

    for name in ("has_triton", "has_triton_package", "triton_backend", "triton_hash_with_backend"):
        clear = getattr(getattr(_triton, name, None), "cache_clear", None)
        if clear is not None:
            clear()


@contextmanager
def patterns_without_a_gpu(target: Target) -> Iterator[None]:
    """Inductor traces its patterns on a GPU where it finds one; where there is none they are traced on the host."""
    if target.present:
        yield
        return
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        yield
    _forget()


class _Driver:
    """What Triton asks of a driver while it compiles."""

    def __init__(self, number: int) -> None:
        self.number = number

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.number, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda
