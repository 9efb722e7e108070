"""Graph -> the kernel of its loop: in one block where that is enough, else in as many as pay."""

from __future__ import annotations

from ....artifact.graph import Graph
from ..target import Target
from .emit import Emitted, emit
from .formulas import NotSmall
from .owners import MOST_PRIVATE, Owned, bytes_of, owned
from .stages import stages

NAME = "tilework_loop"
ALONE = 40_000  # operations a step that one block does sooner than several agree on them
MOST_ESTIMATED = 150.0  # us a step: beyond it, kernels of their own are better


def best(graph: Graph, target: Target) -> tuple[Emitted, Owned]:
    """Raises NotSmall."""
    made = stages(graph, target)
    threads = 512
    if made.work <= ALONE and bytes_of(list(made.memories.values())) <= min(MOST_PRIVATE, target.shared_bytes - 1024):
        plan = owned(made, 1, threads)
    else:
        blocks, threads = 1 << (target.num_multiprocessors.bit_length() - 1), 256
        plan = owned(made, blocks, threads)
        if plan.estimate > MOST_ESTIMATED:
            raise NotSmall(f"it would take some {plan.estimate:.0f} us a step")
    emitted = emit(made, plan, threads, NAME)
    if emitted.shared > target.shared_bytes:
        raise NotSmall(f"{emitted.shared} bytes of shared memory a block")
    return emitted, plan
