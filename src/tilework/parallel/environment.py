"""Which rank this process is, as its launcher says: `tilework launch`, torchrun, Open MPI, MPICH and other PMI launchers, Slurm.

Everything about ranks comes from here. It is checked before anything connects (`problems`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

# (launcher, rank, size, rank on this node, ranks on this node) as each names them; whoever started this very process comes before
# what it runs inside of. Slurm's are those of a step: in a batch script that calls no srun there is one process, whatever was
# allocated.
_LAUNCHERS = (
    ("tilework", "TILEWORK_RANK", "TILEWORK_WORLD_SIZE", "TILEWORK_LOCAL_RANK", "TILEWORK_LOCAL_SIZE"),
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI, srun --mpi=pmi2
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)


@dataclass(frozen=True)
class Launched:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # 0: the launcher does not say
    launcher: str = ""  # empty: nobody launched anything

    @property
    def one_node(self) -> bool:
        return self.local_size == self.size


def launched(environment: Mapping[str, str] | None = None) -> Launched:
    """Rank 0 of 1 where nobody launched anything."""
    env = os.environ if environment is None else environment
    for launcher, *names in _LAUNCHERS:
        rank, size, local, local_size = (env.get(n, "") for n in names)
        if rank.isdigit() and size.isdigit():
            local = local or (env.get("SLURM_LOCALID", "") if launcher == "pmi" else "")  # srun --mpi=pmi2
            on_node = int(local_size) if local_size.isdigit() else 1 if int(size) == 1 else ranks_on_node(env, none=0)
            return Launched(int(rank), int(size), int(local) if local.isdigit() else int(rank), on_node, launcher)
    return Launched()


def ranks_on_node(environment: Mapping[str, str] | None = None, none: int = 1) -> int:
    """Ranks on this node, by whatever launched them; `none` where nobody says."""
    env = os.environ if environment is None else environment
    names = (*(local for *_, local in _LAUNCHERS if local), "PMI_LOCAL_SIZE")
    found = next((int(env[n]) for n in names if env.get(n, "").isdecimal()), None)
    return max(1, found) if found is not None else _slurm_ranks(env, none)


def _slurm_ranks(env: Mapping[str, str], none: int) -> int:
    """Tasks of this job step on this node. A batch script is no step, though it knows how many tasks it could start."""
    node = env.get("SLURM_NODEID", "0")
    text = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not text and (env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")):
        text = env.get("SLURM_TASKS_PER_NODE", "")
    left = int(node) if node.isdecimal() else 0
    for part in text.split(","):  # such as 2(x3),1: three nodes with two tasks, one with one
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if found is None:
            return none
        left -= int(found[2] or 1)
        if left < 0:
            return int(found[1])
    return none


def problems(here: Launched, expected: int | None = None, environment: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with the ranks as they were launched, each with what to do. Nothing has been connected yet."""
    env = os.environ if environment is None else environment
    found = []
    if not 0 <= here.rank < here.size:
        found.append(f"rank {here.rank} of {here.size} ranks: the launcher's variables contradict each other")
    if expected is not None and expected != here.size:
        found.append(f"{here.size} ranks were started, and {expected} were asked for: make the launcher's number of tasks "
                     "(mpirun -np, srun --ntasks, torchrun --nproc-per-node) and the world size equal")  # fmt: skip
    tasks = env.get("SLURM_STEP_NUM_TASKS", "")
    if here.size == 1 and here.launcher != "slurm" and tasks.isdigit() and int(tasks) > 1:
        found.append(f"this process sees only itself, but its Slurm step has {tasks} tasks: start it with srun --mpi=pmi2, or "
                     "without mpirun inside srun")  # fmt: skip
    mpi = _mpi_of_program()
    if mpi is not None and mpi != (here.rank, here.size):
        found.append(f"the program's MPI library says rank {mpi[0]} of {mpi[1]}, the launcher says {here.rank} of {here.size}: "
                     "mpirun and the library are of different MPIs; use the mpirun that belongs to it")  # fmt: skip
    return found


def _mpi_of_program() -> tuple[int, int] | None:
    """As MPI itself says, where the program has already started it through mpi4py."""
    import sys

    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
