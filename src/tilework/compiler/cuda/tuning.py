"""Which way of running a kernel is the fastest on this machine's GPU: each is timed on memory of its own, on the stream and with the
clock of the GPU itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .kernels import Way
from .launches import Launch, Launches, View

_REPEATS = 5


def choose(made: Launches, ways: Mapping[str, Sequence[Way]]) -> tuple[dict[str, Way], dict[str, str]]:
    """(kernel -> its way, and how long it took in words)"""
    first: dict[str, Launch] = {}
    for step in made.steps:
        if isinstance(step, Launch):
            first.setdefault(step.kernel, step)
    chosen, said = {}, {}
    for name, several in ways.items():
        if len(several) == 1 or name not in first:
            chosen[name] = several[0]
            continue
        times = _times(first[name], several)
        best = min(range(len(several)), key=lambda i: times[i])
        chosen[name] = several[best]
        said[name] = f"; {times[best]:.1f} us, of {len(several)} ways that took up to {max(times):.1f}"
    return chosen, said


def _times(launch: Launch, several: Sequence[Way]) -> list[float]:
    from ...gpu import Kernel, Module

    memory: dict[Any, torch.Tensor] = {}

    def address(v: Any) -> Any:
        if not isinstance(v, View):
            return v
        extent = v.offset + 1 + sum((n - 1) * s for n, s in zip(v.shape, v.stride, strict=True))
        size = max(1, extent) * v.dtype.itemsize
        if v.place not in memory or memory[v.place].numel() < size:
            memory[v.place] = torch.zeros(size + 256, dtype=torch.uint8, device="cuda")
        return memory[v.place].data_ptr() + v.offset * v.dtype.itemsize

    for a in launch.args:
        address(a)  # the largest view of each place decides
    found = []
    for way in several:
        module = Module(way.code, way.function)
        args = [(kind, address(a)) for a, kind in zip(launch.args, way.takes, strict=False) if kind != "constexpr"]
        kernel = Kernel(module.function(way.function, way.shared), way.grid(launch.args), way.threads, way.shared, args)
        kernel.launch()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        best = float("inf")
        for _ in range(_REPEATS):
            begin.record()
            kernel.launch()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) * 1000)
        found.append(best)
        module.close()
    return found
