"""Which rank this process is, as its launcher says: torchrun, Open MPI, MPICH and other PMI launchers, Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# In this order: whoever started this very process comes before what it runs inside of.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


@dataclass(frozen=True)
class Launched:
    rank: int
    size: int
    local_rank: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Rank 0 of 1 where nobody launched anything."""

    def number(names: tuple[str, ...], default: int) -> int:
        return next((int(environment[n]) for n in names if environment.get(n, "").isdigit()), default)

    rank = number(_RANK, 0)
    return Launched(rank, number(_SIZE, 1), number(_LOCAL, rank))
