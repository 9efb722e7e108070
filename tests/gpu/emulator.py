"""Runs kernels of whole loops on the host, thread by thread (gpu_threads.h), so that they can be compared without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tilework.compiler.cuda.persistent.emit import Emitted

THREADS = Path(__file__).parent / "gpu_threads.h"


class Emulated:
    def __init__(self, emitted: Emitted, name: str) -> None:
        self.emitted = emitted
        call = f"static void kernel(const Arguments& a) {{ {name}(a.places, a.scratch, a.wrong, a.steps, a.base, a.counter); }}\n"
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
            source.write_text(f'#include "{THREADS}"\n{emitted.source}\n{call}')
            command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", str(source), "-o", str(library)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            assert made.returncode == 0, made.stderr[:3000]
            self._library = ctypes.CDLL(str(library))

    def run(
        self,
        buffers: Mapping[str, torch.Tensor],
        num_steps: int,
        steps: Mapping[str, int],
        base: int,
        counter: int,
        order: int = 0,
    ) -> None:
        """`steps`: bytes between the slices of what the caller gives and gets. `order`: of the threads, 0 and 1 are forwards and
        backwards."""
        e = self.emitted
        places: list[int] = [v for b in e.buffers for v in (buffers[b].data_ptr(), steps.get(b, 0))]
        scratch = torch.zeros(e.scratch + 64, dtype=torch.uint8)
        scratch[64:] = 0xFF
        wrong = torch.zeros(1, dtype=torch.int32)
        numbers: Any = (ctypes.c_longlong * len(places))(*places)
        status = self._library.emulate(
            numbers, ctypes.c_void_p(scratch.data_ptr()), ctypes.c_void_p(wrong.data_ptr()), ctypes.c_longlong(num_steps),
            ctypes.c_ulonglong(base), ctypes.c_ulonglong(counter), e.blocks, e.threads, e.shared, order,
        )  # fmt: skip
        assert status == 0, "its threads wait for each other for ever"
        self.out_of_range = bool(wrong[0])
