"""Which rank this process is, as its launcher says: torchrun, Open MPI, MPICH and other PMI launchers, Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# (rank, size, rank on this node) as each launcher names them; whoever started this very process comes before what it runs inside
# of. Slurm's are those of a step: in a batch script that calls no srun there is one process, whatever was allocated.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Launched:
    rank: int
    size: int
    local_rank: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """Rank 0 of 1 where nobody launched anything."""
    for names in _LAUNCHERS:
        rank, size, local = (environment.get(n, "") for n in names)
        if rank.isdigit() and size.isdigit():
            return Launched(int(rank), int(size), int(local) if local.isdigit() else int(rank))
    return Launched(0, 1, 0)
