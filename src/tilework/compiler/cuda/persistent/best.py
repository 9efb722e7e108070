"""Graph -> the kernel of its loop: in one block where that is enough, else in as many as there are multiprocessors."""

from __future__ import annotations

from collections.abc import Callable

from ....artifact.graph import Graph
from ....errors import MachineError
from .. import nvrtc, tuning
from ..target import Target
from .emit import Emitted, emit
from .formulas import NotSmall
from .owners import MOST_PRIVATE, Owned, bytes_of, owned
from .stages import Stages, stages

NAME = "tilework_loop"
ALONE = 40_000  # operations a step that one block does sooner than several agree on them
MOST_ESTIMATED = 150.0  # us a step: beyond it, kernels of their own are better
CLUSTER, _CLUSTERS_SINCE = 16, 9  # blocks that may be one cluster; the first generation of GPUs that has them
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
    if not target.present:
        code, emitted = _compiled(made, plan, THREADS[0], graph, target, False)
        return code, emitted, plan, f"{emitted.threads} threads a block, not timed"
    ways = [(plan, threads, False) for threads in THREADS]
    if not alone and target.major >= _CLUSTERS_SINCE:
        ways += [(owned(made, CLUSTER, threads, room), threads, True) for threads in THREADS[::2]]
    tried: list[tuple[float, str, bytes, Emitted, Owned]] = []
    for way, threads, cluster in ways:
        try:
            code, emitted = _compiled(made, way, threads, graph, target, cluster)
            time = tuning.time_loop(code, NAME, emitted, graph)
        except (NotSmall, MachineError):
            if way is plan:
                raise
            continue  # a cluster that this GPU has no room for
        tried.append((time, f"{emitted.blocks} blocks of {threads} threads: {time:.2f} us a step", code, emitted, way))
    _, _, code, emitted, plan = min(tried, key=lambda t: t[0])
    return code, emitted, plan, ", ".join(said for _, said, *_ in tried)


def _compiled(made: Stages, plan: Owned, threads: int, graph: Graph, target: Target, cluster: bool) -> tuple[bytes, Emitted]:
    emitted = emit(made, plan, threads, NAME, cluster=cluster)
    if emitted.shared > target.shared_bytes:
        raise NotSmall(f"{emitted.shared} bytes of shared memory a block")
    return nvrtc.compile_cubin(emitted.source, f"{graph.name}_loop", target.architecture), emitted
