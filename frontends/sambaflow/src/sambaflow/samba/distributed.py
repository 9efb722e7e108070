"""Data parallel: ranks from whatever launched them, and the process group that apps expect to be up under --data-parallel."""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist

import tilework
from tilework import parallel
from tilework.parallel.environment import Launched, launched, problems

from ..logging import samba_logger


def replicas_asked(args: argparse.Namespace) -> int:
    """How many replicas a PEF is made for. Made for two, it runs with any number."""
    asked = int(getattr(args, "world_size", None) or 1)
    return max(asked, 2) if getattr(args, "data_parallel", False) else asked


def start(args: argparse.Namespace) -> None:
    """Connects the ranks, before the app does anything. A compile needs nobody else."""
    args.local_rank = launched().local_rank
    if getattr(args, "command", None) == "compile" and launched().size > 1:
        samba_logger.warning(f"{launched().size} ranks compile the same PEF; one is enough", log_limit=1)
    group = parallel.start()
    if group.size == 1 and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    _require_world_size(args, group.rank, group.size)


def _require_world_size(args: argparse.Namespace, rank: int, size: int) -> None:
    """-ws of a run says how many ranks there must be; of a compile, how many there will be."""
    asked = getattr(args, "world_size", None)
    if asked and getattr(args, "command", None) != "compile" and int(asked) != size:
        raise tilework.UserError("ranks-launched", "\n    ".join(problems(Launched(rank, size), int(asked))))


def group_for(args: argparse.Namespace, data_parallel: bool = False) -> parallel.Group | None:
    """The ranks that train together, where the app or its arguments ask for it."""
    asked = data_parallel or bool(getattr(args, "data_parallel", False))
    own = get_world_size() > 1  # the app has brought a group up by itself
    if not asked and not own:
        if launched().size > 1:
            samba_logger.warning(
                f"{launched().size} ranks were launched without --data-parallel: each of them runs alone", log_limit=1
            )
        return None
    group = parallel.start()
    return group if group.size > 1 else None


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """As tilework.Session.join takes them."""
    return {"reduce": "device" if getattr(args, "reduce_on_rdu", False) else "host"}


def get_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main_process() -> bool:
    return get_rank() == 0


# ---- init_process_group("mpi") ----


def accept_mpi() -> None:
    """The vendor's torch is built with MPI, and apps ask for it by name. Here the ranks are connected by gloo, wherever they
    come from."""
    original = dist.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if str(backend).lower() != "mpi" or dist.is_initialized():
            return original(backend, *args, **kwargs)
        group = parallel.start()
        if group.size == 1:
            original("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return None

    if not getattr(original, "_tilework", False):
        init_process_group._tilework = True  # type: ignore[attr-defined]
        dist.init_process_group = init_process_group
