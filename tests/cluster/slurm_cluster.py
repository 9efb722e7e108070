"""A real Slurm cluster of two nodes on loopback, in a folder of its own: munged, slurmctld and two slurmd.

Nothing in /etc is read or written: clients find it by SLURM_CONF. Only processes that were started here are stopped, by their
ids. Slurm keeps track of a job's processes with cgroups where version 1 is mounted and can be written, as on a real node, else by
their parents. The cgroups of two clusters have the same names up to the job's id, so each begins with a number of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
NODES = ("tw1", "tw2")
CGROUPS = Path("/sys/fs/cgroup")
FREEZER = CGROUPS / "freezer"
CONF = """\
ClusterName=tilework
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port_0}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/{track}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0,default_queue_depth=100
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
GresTypes=rdu
FirstJobId={first}
KillWait=2
MinJobAge=2
MessageTimeout=3
SlurmctldTimeout=5
SlurmdTimeout=30
{more}
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{port_1}-{port_2}] CPUs=8 RealMemory=8000 Gres=rdu:8 State=UNKNOWN
PartitionName=tiles Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


def needs() -> None:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"Slurm is not installed: no {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("a Slurm cluster needs root")


def ports() -> tuple[int, int, int]:
    """Three free ones that follow each other, as the nodes' line wants them; below those that the kernel gives away: nobody gets
    them by chance until the daemons have them."""
    for _ in range(200):
        first = random.randrange(12000, 32000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + 3):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first, first + 1, first + 2
    raise AssertionError("no free ports")


def can_freeze() -> bool:
    """May cgroups of version 1 be made here?"""
    trial = FREEZER / f"tilework-trial-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return (FREEZER / "tasks").exists()


class SlurmCluster:
    def __init__(self, folder: Path, more: str = "", cgroups: bool | None = None) -> None:
        self.folder = folder
        self.cgroups = can_freeze() if cgroups is None else cgroups
        self.first = random.randrange(1, 60_000) * 1000
        self.conf = folder / "etc" / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.conf)}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("etc", "run", "log", "state", "spool/tw1", "spool/tw2", "dev"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(8):
            (folder / "dev" / f"rdu{index}").touch()
        key = folder / "etc" / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        (folder / "etc" / "gres.conf").write_text(f"NodeName=tw[1-2] Name=rdu File={folder}/dev/rdu[0-7]\n")
        (folder / "etc" / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={CGROUPS}\nCgroupAutomount=no\n")
        track = "cgroup" if self.cgroups else "linuxproc"
        host = socket.gethostname()
        numbers = {f"port_{i}": port for i, port in enumerate(ports())}
        text = CONF.format(folder=folder, host=host, first=self.first, more=more, nodes="tw[1-2]", track=track, **numbers)
        self.conf.write_text(text)

    def start(self) -> None:
        # One cluster at a time on a machine: the nodes of two have the same names, and so have their cgroups.
        self.alone = (Path(tempfile.gettempdir()) / f"tilework-slurm-{os.getuid()}.lock").open("w")
        fcntl.flock(self.alone, fcntl.LOCK_EX)
        run, log = self.folder / "run", self.folder / "log"
        places = (f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log")
        # --force: the folders above belong to root alone, which munged calls insecure
        self._begin(
            "munged", "--foreground", "--force", *places, f"--key-file={self.folder}/etc/munge.key", f"--seed-file={run}/seed"
        )
        self._until(lambda: (run / "munge.socket").exists(), "munged has no socket")
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.until_idle()

    def start_controller(self) -> None:
        self._begin("slurmctld", "-D", "-f", str(self.conf))

    def start_node(self, node: str) -> None:
        self._begin("slurmd", "-D", "-N", node, "-f", str(self.conf), name=node)

    def until_idle(self) -> None:
        self._until(lambda: self.client("sinfo", "-h", "-o", "%T %D").strip() == "idle 2", "the nodes are not idle")

    def kill(self, name: str) -> None:
        """At once, as a machine that loses its power; name: slurmctld, tw1, ..."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def until_saved(self) -> None:
        """The controller writes its state seconds later; one that is killed before that forgets what is new, and then ends it."""
        self.client(
            "scancel", self.client("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
        )  # a change
        now = time.time_ns()
        self._until(lambda: (self.folder / "state" / "job_state").stat().st_mtime_ns > now, "the state is not saved")

    def forget(self) -> None:
        """All jobs: the state that a controller would recover."""
        shutil.rmtree(self.folder / "state")
        (self.folder / "state").mkdir()

    def client(self, *words: str) -> str:
        done = subprocess.run(["timeout", "10", *words], env={**os.environ, **self.environment}, capture_output=True, text=True)
        return done.stdout

    def stop(self) -> None:
        """Kills what is left: no test needs what a slow and tidy end would save."""
        for name in [n for n in self.running if n != "munged"] + ["munged"]:
            if name in self.running:
                self.kill(name)
        for pid in self.steps():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.cgroups:
            for top in (place / f"slurm_{node}" for place in CGROUPS.iterdir() for node in NODES):
                self._remove(top)
        if hasattr(self, "alone"):
            self.alone.close()

    def steps(self) -> list[int]:
        """The processes of this cluster's jobs, and the daemons (slurmstepd) that hold them."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            return (
                f"SLURM_CONF={self.conf}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                and pid != os.getpid()
            )
        except OSError:
            return False

    def _remove(self, top: Path) -> None:
        """Its jobs' folders, and then the node's, which another cluster may still use."""
        for job in top.glob("uid_*/job_*"):
            if self.first <= int(job.name.removeprefix("job_")) < self.first + 1000:
                for _ in range(20):
                    for place, _, _ in os.walk(job, topdown=False):
                        with contextlib.suppress(OSError):
                            os.rmdir(place)
                    if not job.exists():
                        break
                    time.sleep(0.05)
        for place in [*top.glob("uid_*"), *top.glob("system"), top]:
            with contextlib.suppress(OSError):
                place.rmdir()

    def _begin(self, *words: str, name: str = "") -> None:
        with (self.folder / "log" / f"{name or words[0]}.out").open("ab") as out:
            self.running[name or words[0]] = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )

    def _until(self, true: object, why: str) -> None:
        assert callable(true)
        for _ in range(300):
            if true():
                return
            dead = [name for name, process in self.running.items() if process.poll() is not None]
            assert not dead, f"{dead} ended: {self.logs()}"
            time.sleep(0.05)
        raise AssertionError(f"{why}: {self.logs()}")

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in sorted((self.folder / "log").iterdir()))


@contextlib.contextmanager
def slurm_cluster(folder: Path, more: str = "") -> Iterator[SlurmCluster]:
    """Up in the block. The clients of this process find it: SLURM_CONF is set."""
    needs()
    cluster = SlurmCluster(folder, more)
    before = os.environ.get("SLURM_CONF")
    os.environ.update(cluster.environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
