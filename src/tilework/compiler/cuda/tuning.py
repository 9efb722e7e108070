"""Which way of running a kernel is the fastest on this machine's GPU: each is timed on memory of its own, on the stream and with
the clock of the GPU itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...artifact.graph import Graph
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


def time_loop(code: bytes, name: str, emitted: Any, graph: Graph) -> float:
    """Microseconds a step of a kernel that is a whole loop, on zeros."""
    from ...gpu import Kernel, Module

    steps = 200
    memory = {b: torch.zeros(max(1, graph.types[b].num_bytes), dtype=torch.uint8, device="cuda") for b in emitted.buffers}
    places = torch.tensor([v for b in emitted.buffers for v in (memory[b].data_ptr(), 0)], dtype=torch.int64, device="cuda")
    scratch = torch.zeros(max(64, emitted.scratch), dtype=torch.uint8, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    args = [
        ("*i64", places.data_ptr()),
        ("*u8", scratch.data_ptr()),
        ("*u32", wrong.data_ptr()),
        ("i64", steps),
        ("u64", 0),
        ("u64", 0),
    ]
    module = Module(code, name)
    function = module.function(name, emitted.shared, large_cluster=emitted.cluster)
    kernel = Kernel(function, (emitted.blocks, 1, 1), emitted.threads, emitted.shared, args,
                    cooperative=emitted.blocks > 1 and not emitted.cluster, name=name)  # fmt: skip
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        scratch[:64].zero_()
        begin.record()
        kernel.launch()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / steps)
    module.close()
    return best
