"""Graph -> the kernel of its loop: in one block where that is enough, else in as many as there are multiprocessors."""

from __future__ import annotations

from collections.abc import Callable

from ....artifact.graph import Graph
from .. import nvrtc, tuning
from ..target import Target
from .emit import Emitted, emit
from .formulas import NotSmall
from .owners import MOST_PRIVATE, Owned, bytes_of, owned
from .stages import stages

NAME = "tilework_loop"
ALONE = 40_000  # operations a step that one block does sooner than several agree on them
MOST_ESTIMATED = 150.0  # us a step: beyond it, kernels of their own are better
THREADS = (512, 256, 1024)  # of a block; the first is taken where nothing can be timed


def best(graph: Graph, target: Target, report: Callable[[str], None] = lambda _: None) -> tuple[bytes, Emitted, Owned, str]:
    """(machine code, what it takes, its plan, how it was chosen). Raises NotSmall."""
    made = stages(graph, target)
    room = target.shared_bytes - 24 * 1024  # the rest is for slices of inputs and addresses
    alone = made.work <= ALONE and bytes_of(list(made.memories.values())) <= min(MOST_PRIVATE, room)
    blocks = 1 if alone else 1 << (target.num_multiprocessors.bit_length() - 1)
    plan = owned(made, blocks, THREADS[0], room)
    if plan.estimate > MOST_ESTIMATED:
        raise NotSmall(f"it would take some {plan.estimate:.0f} us a step")
    tried: list[tuple[float, bytes, Emitted]] = []
    for threads in THREADS if target.present else THREADS[:1]:
        emitted = emit(made, plan, threads, NAME)
        if emitted.shared > target.shared_bytes:
            raise NotSmall(f"{emitted.shared} bytes of shared memory a block")
        code = nvrtc.compile_cubin(emitted.source, f"{graph.name}_loop", target.architecture)
        tried.append((tuning.time_loop(code, NAME, emitted, graph) if target.present else 0.0, code, emitted))
    _, code, emitted = min(tried, key=lambda t: t[0])
    if not target.present:
        return code, emitted, plan, f"{emitted.threads} threads a block, not timed"
    return code, emitted, plan, ", ".join(f"{e.threads} threads: {t:.2f} us a step" for t, _, e in tried)
