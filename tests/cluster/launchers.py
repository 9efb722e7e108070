"""Several processes as ranks, under the launchers that people use. Those that are not installed are skipped, and say so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FULL = os.environ.get("TILEWORK_FULL") == "1"
IN_FULL = pytest.mark.full  # make test runs a sample
MPICH = next((p for name in ("mpirun.mpich", "mpiexec.hydra") if (p := shutil.which(name))), None)
OPENMPI = shutil.which("mpirun.openmpi")


def under(launcher: str, count: int) -> list[str]:
    """The words before a command that start `count` ranks of it."""
    if launcher == "mpich":
        if MPICH is None:
            pytest.skip("MPICH is not installed (apt-get install mpich)")
        return [MPICH, "-np", str(count)]
    if launcher == "openmpi":
        if OPENMPI is None:
            pytest.skip("Open MPI is not installed (apt-get install openmpi-bin)")
        return [OPENMPI, "--allow-run-as-root", "--oversubscribe", "-np", str(count)]
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--no-python"]
    return [sys.executable, "-m", "tilework", "launch", "-n", str(count), "--no-tag", "--"]


class Ranks:
    """Runs programs/NAME.py as ranks. What each of them tells (training.tell) comes back, by rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: subprocess.CompletedProcess[str] | None = None

    def __call__(
        self, count: int, program: str, *words: object, launcher: str = "tilework", code: int | None = 0, **env: str
    ) -> list[dict[str, Any]]:
        for old in self.folder.glob("told-*.json"):
            old.unlink()
        command = [*under(launcher, count), sys.executable, str(HERE / "programs" / f"{program}.py"), *map(str, words)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TILEWORK_", "OMPI_", "PMI", "SLURM_"))}
        environment = {**clean, "TILEWORK_LEASE": "0", "TORCH_CPP_LOG_LEVEL": "ERROR", **env}
        self.done = done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        if code is not None:
            assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        found = [json.loads(path.read_text()) for path in self.folder.glob("told-*.json")]
        return sorted(found, key=lambda r: int(r["rank"]))
