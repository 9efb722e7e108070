"""Triton source -> machine code. Inductor proposes several ways to run a kernel; on a machine that has the GPU they are timed,
and elsewhere the first is taken."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from .target import Target, assumed


@dataclass(frozen=True)
class Way:
    """One way to run a kernel: machine code, and how it is launched."""

    code: bytes  # a cubin
    function: str
    threads: int
    shared: int
    takes: tuple[str, ...]  # the type of each argument of the kernel's source; "constexpr" is not passed
    grid_lines: tuple[str, ...]  # Python of Inductor's: the grid, from the kernel's own arguments
    names: tuple[str, ...]
    what: str  # the way in words
    spills: int

    def grid(self, args: Sequence[Any]) -> tuple[int, int, int]:
        scope: dict[str, Any] = {n: a for n, a in zip(self.names, args, strict=False) if isinstance(a, (int, float))}
        for line in self.grid_lines:
            exec(line, scope)
        return tuple(int(scope[f"grid_{i}"]) for i in range(3))  # type: ignore[return-value]


def compiled(sources: Mapping[str, str], target: Target, num_workers: int, every_way: bool) -> dict[str, list[Way]]:
    """name -> its ways, the first one alone unless `every_way`. Compiled on several cores."""
    if not sources:
        return {}
    jobs = [(name, source, target, every_way) for name, source in sources.items()]
    if num_workers == 1 or len(jobs) == 1:
        return dict(map(_ways, jobs))
    # Fresh processes: a copy of one that has used a GPU may not.
    with ProcessPoolExecutor(min(num_workers, len(jobs)), mp_context=get_context("fork")) as pool:
        return dict(pool.map(_ways, jobs))


def _ways(job: tuple[str, str, Target, bool]) -> tuple[str, list[Way]]:
    name, source, target, every_way = job
    with assumed(target):
        tuner = _loaded(name, source)
        configs = tuner.configs if every_way else tuner.configs[:1]
        return name, [_compile(tuner, config, target) for config in configs]


def _loaded(name: str, source: str) -> Any:
    """Inductor's object for a kernel. Its decorator wants to find the source in a file."""
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(source), name)


def _compile(tuner: Any, config: Any, target: Target) -> Way:
    import triton
    from torch._inductor.runtime.triton_heuristics import GridExpr
    from triton.compiler import ASTSource

    meta = tuner._create_compile_meta(config)
    options = tuner._create_compile_options(config, meta)
    source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
    made = triton.compile(source, target=triton.runtime.driver.active.get_current_target(), options=options)
    grid = GridExpr.from_meta(tuner.inductor_meta, config)
    lines = (*grid.prefix, f"grid_0 = {grid.x_grid}", f"grid_1 = {grid.y_grid}", f"grid_2 = {grid.z_grid}")
    takes = tuple(meta["signature"].get(n, "constexpr") for n in tuner.fn.arg_names)
    fixed = {k[0] if isinstance(k, tuple) else k for k in meta["constants"]}
    takes = tuple("constexpr" if n in fixed else kind for n, kind in zip(tuner.fn.arg_names, takes, strict=True))
    code = made.asm["cubin"]
    words = " ".join(f"{k}={v}" for k, v in config.kwargs.items()) + f" warps={config.num_warps} stages={config.num_stages}"
    return Way(code, made.metadata.name, made.metadata.num_warps * 32, made.metadata.shared, takes, lines,
               tuple(tuner.fn.arg_names), words, 0)  # fmt: skip


def member(code: bytes) -> str:
    """The name of a kernel's code in the artifact: by content, so that what several programs share is there once."""
    return f"native/k{hashlib.sha256(code).hexdigest()[:24]}.cubin"
