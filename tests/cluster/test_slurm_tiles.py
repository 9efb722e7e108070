"""Tiles under a real Slurm: a daemon for each node, a prolog that says which chips a job has, leases that belong to jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import NODES, SlurmCluster, needs

from tilework.jobs import prolog
from tilework.tiles import client

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TASK = """
import os, sys, time
from tilework.tiles import holding
held = holding.hold()
print(os.environ["SLURMD_NODENAME"], os.environ.get("SLURM_PROCID", "batch"), *held.lease.tiles, flush=True)
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two virtual SN30-8 nodes with 128 CPUs each. PER_TASK in the environment of a job stands for another site's prolog."""
    needs()
    folder = tmp_path_factory.mktemp("tiles")
    for name, per_task in (("node", False), ("task", True)):
        (folder / f"{name}.sh").write_text(prolog.script("rdu", per_task=per_task))
        (folder / f"{name}.sh").chmod(0o755)
    script = folder / "taskprolog.sh"
    script.write_text(f'#!/bin/bash\necho "export TILEWORK_RUN={folder}/$SLURMD_NODENAME"\n'
                      f'if [ -n "$PER_TASK" ]; then {folder}/task.sh; else {folder}/node.sh; fi\n')  # fmt: skip
    script.chmod(0o755)
    (folder / "task.py").write_text(TASK)
    made = SlurmCluster(folder, f"TaskProlog={script}")
    if not made.cgroups:
        pytest.skip("cgroups of version 1 cannot be made here")
    made.conf.write_text(made.conf.read_text().replace("CPUs=8", "CPUs=128"))
    daemons = []
    before = dict(os.environ)
    try:
        for node in NODES:  # the node's own: outside of any job
            (folder / node).mkdir(mode=0o700)
            env = {**os.environ, "TILEWORK_RUN": str(folder / node)}
            daemons.append(subprocess.Popen([sys.executable, "-m", "tilework.tiles.service", "--platform", "SN30-8"], env=env))
        os.environ.update(made.environment)
        os.environ["TILEWORK_LEASE"] = "1"
        made.start()
        yield made
    finally:
        made.stop()
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        os.environ.clear()
        os.environ.update(before)


def sbatch(cluster: SlurmCluster, folder: Path, script: str, *words: str, code: int = 0, **env: str) -> str:
    """What the job printed."""
    (folder / "job.sh").write_text(f"#!/bin/bash\n{script}\n")
    out = folder / "out.log"
    done = subprocess.run(["sbatch", "-W", f"--output={out}", *words, "job.sh"], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, **env}, timeout=200)  # fmt: skip
    said = out.read_text() if out.exists() else ""
    assert done.returncode == code, f"{done}\n{said}"
    return said


def leases(cluster: SlurmCluster, node: str) -> list[tuple[str, int]]:
    before = os.environ.get("TILEWORK_RUN")
    os.environ["TILEWORK_RUN"] = str(cluster.folder / node)
    try:
        return [(x.job, len(x.tiles)) for x in client.view(start=False).leases]
    finally:
        if before is None:
            del os.environ["TILEWORK_RUN"]
        else:
            os.environ["TILEWORK_RUN"] = before


def test_the_seeds_multi_node_command(cluster: SlurmCluster, tmp_path: Path) -> None:
    """16 tasks of 4 tiles fill the 64 tiles of each of two nodes, where a count of --gres is meant for each task."""
    words = ["--ntasks", "32", "--gres=rdu:1", "--ntasks-per-node", "16", "--nodes", "2", "--cpus-per-task=8"]
    task = f"{sys.executable} {cluster.folder}/task.py 2"
    lines = [
        line.split() for line in sbatch(cluster, tmp_path, f"srun {task}", *words, PER_TASK="1").splitlines() if line[:2] == "tw"
    ]
    for node in NODES:
        own = [list(map(int, tiles)) for where, _, *tiles in lines if where == node]
        assert len(own) == 16 and {len(tiles) for tiles in own} == {4}
        assert sorted(i for tiles in own for i in tiles) == list(range(64))
    assert sorted(int(rank) for _, rank, *_ in lines) == list(range(32))


def test_a_lease_holds_between_steps(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Two RDUs of a node are 16 tiles: the job's own from its first step to its end, whatever its steps are."""
    task = f"{sys.executable} {cluster.folder}/task.py"
    script = f"srun -n 2 {task}\ncp {cluster.folder}/tw1/lease-*.json . && ls lease-*.json | wc -l\nsrun -n 1 {task}"
    said = sbatch(cluster, tmp_path, script, "--gres=rdu:2", "-n", "2", "-N", "1", "-w", "tw1").splitlines()
    first = sorted([int(i) for i in line.split()[2:]] for line in said[:2])
    assert first == [list(range(8)), list(range(8, 16))] and said[2] == "1"  # of the job; none of its processes was left
    assert [int(i) for i in said[3].split()[2:]] == list(range(16))
    for _ in range(600):
        if not leases(cluster, "tw1"):
            return
        time.sleep(0.1)
    raise AssertionError("the job's tiles were not given back")


def test_affinity_inside_the_allocation_alone(cluster: SlurmCluster, tmp_path: Path) -> None:
    """SF_RNT_TILE_AFFINITY names tiles of the job, or is refused."""
    code = ("import argparse, sys; from sambaflow.samba.affinity import tiles_asked; from tilework.tiles import holding\n"
            "print(*holding.hold(tiles_asked(argparse.Namespace(), 'none')).lease.tiles)")  # fmt: skip
    (tmp_path / "own.py").write_text(code)
    run = f"srun {sys.executable} own.py"
    script = f"{run}\nSF_RNT_TILE_AFFINITY=0x3 {run}\nSF_RNT_TILE_AFFINITY=0xf0 {run}"
    said = sbatch(cluster, tmp_path, script, "--gres=rdu:1", "-w", "tw2", code=1, TILEWORK_PLATFORM="SN30-8")
    assert said.splitlines()[:2] == ["0 1 2 3 4 5 6 7", "0 1 2 3"] and "the job has no tiles 8-15" in said, said


@pytest.mark.skipif(shutil.which("mpirun.mpich") is None, reason="MPICH is not installed")
def test_the_boilerplate(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The script of the starter as it is, but for where /opt is: mpirun starts its ranks by Slurm's own srun."""
    subprocess.run(
        [sys.executable, "-m", "tilework", "site", "install", "--root", str(tmp_path)], check=True, capture_output=True
    )
    folder = tmp_path / "apps" / "boilerplate"
    shutil.copytree(tmp_path / "opt/sambaflow/apps/starters", tmp_path / "apps")
    (folder / "sn_boilerplate_main.py").exists()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for name, words in (("compile_dataparallel.sh", ()), ("run_dataparallel.sh", ("--gres=rdu:2", "-n", "2", "-N", "1"))):
        text = (folder / name).read_text().replace("/opt/", f"{tmp_path}/opt/").replace("#!/bin/bash\n", "")
        text = text.replace('"$@"', "--limit 300")
        said = sbatch(cluster, folder, text, *words, PATH=path, TILEWORK_PLATFORM="SN30-8")
    assert said.count("DataParallel run: True") == 2 and said.count("Step [150/150]") == 2, said
