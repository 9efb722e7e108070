"""What every frontend needs: who launched a process, how a program ends, loading ahead."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tilework.frontend.ahead import ahead
from tilework.parallel.environment import Launched, launched


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launched(0, 1, 0)),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            Launched(3, 8, 1, 0, "torchrun"),
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Launched(1, 2, 1, 0, "openmpi")),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}, Launched(5, 8, 1, 0, "slurm")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Launched(0, 1, 0)),  # a batch script that starts one process
        ({"PMIX_RANK": "3"}, Launched(0, 1, 0)),
    ],
)
def test_launchers(environment: dict[str, str], expected: Launched) -> None:
    assert launched(environment) == expected


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_ends_a_program(distributed: bool, debug: bool) -> None:
    """With its own exit code, its message once, and whatever the program has asked for at its end."""
    code = f"""
import atexit, sys
from tilework.errors import UserError
from tilework.frontend import failures
failures.install()
failures.debug = {debug}
atexit.register(lambda: print("at the end"))
if {distributed}:
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
failures.install()
raise UserError("options", "a mistake") if len(sys.argv) == 1 else ValueError("another")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "at the end\n" and done.stderr.count("a mistake") == 1, done
    assert ("Traceback" in done.stderr) == debug
    other = subprocess.run([sys.executable, "-c", code, "x"], capture_output=True, text=True, timeout=120)
    assert other.returncode == 1 and "ValueError: another" in other.stderr and "excepthook" not in other.stderr


def test_loading_ahead() -> None:
    assert list(ahead(range(5), lambda i: i * i, 2, timeout=10)) == [0, 1, 4, 9, 16]

    def broken():
        yield 1
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(ahead(broken(), lambda i: i, 2, timeout=10))
    assert list(ahead(broken(), lambda i: i, 2, timeout=10, ends_on_error=True)) == [1]
