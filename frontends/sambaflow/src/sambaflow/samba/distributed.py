"""The process group that apps expect to be up under --data-parallel, from whatever launched the ranks."""

from __future__ import annotations

import argparse
import os
import socket

import torch.distributed as dist

from .refusals import refused

_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def _number(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[n]) for n in names if os.environ.get(n, "").isdigit()), default)


def start(args: argparse.Namespace) -> None:
    if dist.is_initialized() or not dist.is_available():
        return
    size = _number(_SIZE, 1)
    args.local_rank = _number(_LOCAL, _number(_RANK, 0))
    if size == 1:
        store = dist.TCPStore("127.0.0.1", _free_port(), 1, True)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return
    raise refused(f"data parallel over {size} ranks: gradients are not averaged yet")


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
