"""The process group that apps expect to be up under --data-parallel, from whatever launched the ranks."""

from __future__ import annotations

import argparse
import socket

import torch.distributed as dist

from tilework.parallel.environment import launched

from ..logging import samba_logger
from .refusals import refused


def replicas_asked(args: argparse.Namespace) -> int:
    """-ws at compile time. The PEF says it; what comes of it is said now and not first on a cluster."""
    count = int(getattr(args, "world_size", None) or 1)
    if count > 1:
        samba_logger.warning(f"the PEF is made for {count} replicas, but several ranks cannot run it together yet: gradients are "
                             "not averaged. One rank can run it", log_limit=1)  # fmt: skip
    return count


def require_one_rank(args: argparse.Namespace, data_parallel: bool = False) -> None:
    """Before anything runs: several ranks would each train a model of their own, without a word."""
    asked, started = int(getattr(args, "world_size", None) or 1), max(launched().size, get_world_size())
    together = data_parallel or bool(getattr(args, "data_parallel", False)) or get_world_size() > 1
    if asked > 1 or (started > 1 and together):
        raise refused(f"data parallel over {max(asked, started)} ranks: gradients are not averaged yet. Run it with one rank, "
                      "and without -ws")  # fmt: skip
    if started > 1:
        samba_logger.warning(f"{started} ranks were launched without --data-parallel: each of them runs alone", log_limit=1)


def start(args: argparse.Namespace) -> None:
    if dist.is_initialized() or not dist.is_available():
        return
    args.local_rank = launched().local_rank
    if launched().size == 1:
        store = dist.TCPStore("127.0.0.1", _free_port(), 1, True)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return
    require_one_rank(args)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def get_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main_process() -> bool:
    return get_rank() == 0
