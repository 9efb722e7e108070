"""CUDA C++ -> machine code, by NVIDIA's library for it: no GPU and no driver are needed."""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import sys
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from ...errors import BugError, MachineError


def _candidates() -> list[str]:
    """Where pip's packages, CUDA's installer and Debian put it."""
    places = [str(Path(p) / "nvidia" / "*" / "lib" / "libnvrtc.so.*") for p in sys.path if p]
    places += ["/usr/local/cuda*/lib64/libnvrtc.so.*", "/usr/lib/x86_64-linux-gnu/libnvrtc.so.*"]
    home = os.environ.get("CUDA_HOME")
    if home:
        places.insert(0, f"{home}/lib64/libnvrtc.so.*")
    found = [f for place in places for f in sorted(glob.glob(place), reverse=True) if "builtins" not in f]
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


@functools.cache
def _library() -> ctypes.CDLL:
    for name in _candidates():
        try:
            for part in glob.glob(str(Path(name).parent / "libnvrtc-builtins.so.*")) if "/" in name else ():
                ctypes.CDLL(part)  # it looks for its other half on the system's path alone
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcCreateProgram.argtypes = [POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p]
        library.nvrtcCompileProgram.argtypes = [c_void_p, c_int, POINTER(c_char_p)]
        library.nvrtcGetErrorString.restype = c_char_p
        for get in ("ProgramLog", "CUBIN"):
            getattr(library, f"nvrtcGet{get}Size").argtypes = [c_void_p, POINTER(c_size_t)]
            getattr(library, f"nvrtcGet{get}").argtypes = [c_void_p, c_char_p]
        library.nvrtcDestroyProgram.argtypes = [POINTER(c_void_p)]
        return library
    raise MachineError("cuda-toolchain", "compiling for a GPU needs NVIDIA's run-time compiler", found="no libnvrtc",
                       fix="install a CUDA build of torch, which brings it, or NVIDIA's CUDA toolkit")  # fmt: skip


def version() -> str:
    major, minor = c_int(), c_int()
    _library().nvrtcVersion(byref(major), byref(minor))
    return f"{major.value}.{minor.value}"


def compile_cubin(source: str, name: str, architecture: str, flags: Sequence[str] = ()) -> bytes:
    library, program = _library(), c_void_p()

    def check(status: int) -> None:
        if status:
            raise BugError("compile-nvrtc", f"{name}: {library.nvrtcGetErrorString(status).decode()}", found=_text("ProgramLog"))

    def _text(what: str) -> str:
        return _bytes(what).rstrip(b"\0").decode("utf-8", "replace")[:2000]

    def _bytes(what: str) -> bytes:
        size = c_size_t()
        getattr(library, f"nvrtcGet{what}Size")(program, byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, text)
        return text.raw

    options = [f"--gpu-architecture={architecture}", "--std=c++17", *flags]
    check(library.nvrtcCreateProgram(byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None))
    try:
        check(library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*(o.encode() for o in options))))
        return _bytes("CUBIN")
    finally:
        library.nvrtcDestroyProgram(byref(program))
