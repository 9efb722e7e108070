"""The job that a process is in, by the kernel's word: Slurm puts the processes of a job into a cgroup that only root can make.

cgroup v2   /system.slice/slurmstepd.scope/job_<id>/step_<id>/...   (with several slurmd on a node: <node>_slurmstepd.scope)
cgroup v1   /slurm/uid_<uid>/job_<id>/step_<id>/...                 (slurm_<node>)

What the environment says about a job is only a label.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_JOB = re.compile(
    r"(?P<job>/(?:system\.slice/(?:[^/]+_)?slurmstepd\.scope|slurm(?:_[^/]+)?/uid_(?P<uid>\d+))/job_(?P<id>\d+))"
    r"(?:/step_(?P<step>[^/]+))?(?:/.*)?"
)


@dataclass(frozen=True)
class Job:
    id: str
    step: str
    cgroup: str  # the job's folder


def job_of(pid: int, uid: int) -> Job | None:
    try:
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found = _JOB.fullmatch(path)  # from the root on: below it, users may have folders of their own, of any name
        mounted = _mounted(controllers) if found else None
        if found and mounted and found["uid"] in (None, str(uid)):
            return Job(found["id"], found["step"] or "", mounted + found["job"])
    return None


def _mounted(controllers: str) -> str | None:
    """Where the hierarchy of some controllers is mounted ('': that of cgroup v2)."""
    try:
        lines = (PROC / "self" / "mounts").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2" if not controllers else kind == "cgroup" and set(controllers.split(",")) <= set(options.split(",")):
            return place
    return None


def populated(cgroup: str) -> bool:
    """Is a process in it, or below it? This daemon does not count: a process of the job may have started it. True also where that
    cannot be read: only what is known to be empty has ended."""
    for place, _, files in os.walk(cgroup):
        if "cgroup.procs" in files:
            try:
                if {*(Path(place) / "cgroup.procs").read_text().split()} - {str(os.getpid())}:
                    return True
            except FileNotFoundError:
                continue
            except OSError:
                return True
    return False
