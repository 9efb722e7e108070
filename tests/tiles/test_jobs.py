"""Leases of jobs: who is in which job is read from cgroups, faked here in a folder, and real ones where root may make them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import kill_daemon, leases_when

from tilework.errors import UserError
from tilework.tiles import client, jobs
from tilework.tiles.asks import Ask

HERE = os.getpid()
MOUNTS = """tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup2 {root}/unified cgroup2 rw,relatime 0 0
cgroup {root}/memory cgroup rw,relatime,memory 0 0
cgroup {root}/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0
"""
SCOPE = "/system.slice/slurmstepd.scope"
# Says that it is there; then, for every line: takes what it says, or gives it back, or releases the job's tiles.
MEMBER = """
import os, sys
if sys.argv[1]:
    with open(sys.argv[1], "w") as f:
        f.write(str(os.getpid()))
from tilework.errors import TileworkError
from tilework.tiles import client, holding, messages
print("here", flush=True)
held = None
for line in sys.stdin:
    try:
        if line == "back\\n":
            print(holding.let_go(held), flush=True)
        elif line == "release\\n":
            with client.talking() as ask:
                print(ask(messages.Release(client.view().leases[0].id))["state"], flush=True)
        else:
            held = holding.hold(line.strip(), lambda _: None)
            print(*held.lease.tiles, "on", *sorted(os.sched_getaffinity(0)), flush=True)
    except TileworkError as e:
        print(e.id, flush=True)
"""


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what /proc says of cgroups, and the cgroups."""
    proc, root = tmp_path / "proc", tmp_path / "cgroups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "mounts").write_text(MOUNTS.format(root=root))
    monkeypatch.setattr(jobs, "PROC", proc)
    return root


def put(cgroups: Path, pid: int, *lines: str) -> None:
    place = cgroups.parent / "proc" / str(pid)
    place.mkdir(exist_ok=True)
    (place / "cgroup").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("lines", "job"),
    [
        (["0::/user.slice/user-1000.slice/session-1.scope"], None),
        ([f"0::{SCOPE}/job_12/step_0/user/task_0"], ("12", "0", f"unified{SCOPE}/job_12")),
        ([f"0::{SCOPE}/job_12/step_batch/slurm"], ("12", "batch", f"unified{SCOPE}/job_12")),
        ([f"0::{SCOPE}/job_12/step_extern"], ("12", "extern", f"unified{SCOPE}/job_12")),
        (["0::/system.slice/n1_slurmstepd.scope/job_3/step_1"], ("3", "1", "unified/system.slice/n1_slurmstepd.scope/job_3")),
        (["4:memory:/slurm/uid_7/job_5/step_2/task_0", "0::/"], ("5", "2", "memory/slurm/uid_7/job_5")),
        (["2:cpu,cpuacct:/slurm_n1/uid_7/job_5"], ("5", "", "cpu,cpuacct/slurm_n1/uid_7/job_5")),
        (["4:memory:/slurm/uid_8/job_5/step_2"], None),  # somebody else's job
        (["9:pids:/slurm/uid_7/job_5/step_2"], None),  # mounted nowhere
        ([f"0::/user.slice/user-7.slice/user@7.service/app.slice{SCOPE}/job_12/step_0"], None),  # a user's own folders
        (["0::/../job_12/step_0"], None),
        ([f"0::{SCOPE}/job_x/step_0"], None),
        (["nonsense", "", "::::"], None),
    ],
)
def test_the_job_of_a_process(cgroups: Path, lines: list[str], job: tuple[str, str, str] | None) -> None:
    put(cgroups, 99, *lines)
    found = jobs.job_of(99, uid=7)
    assert (None if found is None else (found.id, found.step, str(Path(found.cgroup).relative_to(cgroups)))) == job


def test_a_process_that_is_gone_is_in_no_job(cgroups: Path) -> None:
    assert jobs.job_of(99, uid=7) is None


def test_when_a_job_has_ended(cgroups: Path) -> None:
    job = cgroups / "memory/slurm/uid_7/job_5"
    assert not jobs.populated(str(job)), "gone"
    task = job / "step_0" / "task_0"
    task.mkdir(parents=True)
    for place in (job, job / "step_0", task):
        (place / "cgroup.procs").write_text("")
    assert not jobs.populated(str(job))
    (task / "cgroup.procs").write_text("123\n")
    assert jobs.populated(str(job))
    (task / "cgroup.procs").write_text(f"{HERE}\n")
    assert not jobs.populated(str(job)), "a daemon that the job started is not its process"
    (job / "cgroup.procs").write_text("9\n")
    assert jobs.populated(str(job))


class Member:
    def __init__(self, procs: str = "", **env: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", MEMBER, procs], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env={**os.environ, **env})  # fmt: skip
        assert self.process.stdout.readline() == "here\n"
        self.pid = self.process.pid

    def do(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def member() -> Iterator[Callable[..., Member]]:
    made: list[Member] = []

    def make(procs: str = "", **env: str) -> Member:
        made.append(Member(procs, **env))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def daemon(run_folder: Path, cgroups: Path) -> Iterator[Callable[[], None]]:
    """daemon(): starts one that reads the faked cgroups; again: the next one."""
    started: list[subprocess.Popen] = []

    def start() -> None:
        code = ("import sys; from pathlib import Path; from tilework.tiles import jobs, service; "
                "jobs.PROC = Path(sys.argv[1]); sys.exit(service.main([]))")  # fmt: skip
        for old in started:
            old.kill()
            old.wait()
        started.append(subprocess.Popen([sys.executable, "-c", code, str(cgroups.parent / "proc")]))
        until = time.monotonic() + 30
        while not client.answers(run_folder):
            assert time.monotonic() < until
            time.sleep(0.02)

    run_folder.mkdir(0o700)
    start()
    yield start
    started[-1].kill()
    started[-1].wait()


def test_a_job_holds_its_tiles_between_processes(daemon, cgroups: Path, member) -> None:
    job = cgroups / f"unified{SCOPE}/job_7"
    job.mkdir(parents=True)
    (job / "cgroup.procs").write_text("1\n")
    first, second, other = (member() for _ in range(3))
    for one, step in ((first, "batch"), (second, "0")):
        put(cgroups, one.pid, f"0::{SCOPE}/job_7/step_{step}/user/task_0")
    cpu = sorted(client.view().tiles[0].cpus)
    line = f"0 on {' '.join(map(str, cpu))}"
    assert first.do("job:1") == line
    assert second.do("job") == line and second.do("job:1") == line, "the same tiles, whatever it asks for"
    seen = client.view()
    assert [(x.kind, x.job, x.tiles, [p.pid for p in x.processes]) for x in seen.leases] == [
        ("job", "7", (0,), [first.pid, second.pid])
    ]
    assert seen.tiles[0].state == "held" and seen.shared == []
    first.end()
    assert second.do("back") == "False" and second.do("back") == "True"
    leases_when(lambda found: found[0].processes == [])
    for _ in range(2):  # nobody is there; the job's tiles stay, also with another daemon
        with pytest.raises(UserError, match="1 by job 7") as e:
            client.lease(Ask(tiles=(0,)), wait=0)
        assert e.value.id == "tiles-timeout"
        daemon()
    assert other.do("job") == "tiles-job", "in no job"
    third = member()
    put(cgroups, third.pid, f"0::{SCOPE}/job_7/step_1/user/task_0")
    assert third.do("job") == line
    third.end()
    (job / "cgroup.procs").write_text("")
    leases_when(lambda found: not found)
    assert client.lease(Ask(tiles=(0,)), wait=0).tiles == [0]


def test_processes_of_a_job_that_ask_at_the_same_time(daemon, cgroups: Path, member) -> None:
    """All of them wait, and get the same tiles: one lease, not one each."""
    job = cgroups / "memory/slurm" / f"uid_{os.getuid()}" / "job_8"
    (job / "step_0").mkdir(parents=True)
    (job / "step_0" / "cgroup.procs").write_text("1\n")
    mine = client.lease("all")
    members = [member() for _ in range(3)]
    for one in members:
        put(cgroups, one.pid, f"4:memory:/slurm/uid_{os.getuid()}/job_8/step_0/task_0")
        one.process.stdin.write("job:1\n")
        one.process.stdin.flush()
    leases_when(lambda _: len(client.view().queue) == 3)
    mine.release()
    answers = {one.process.stdout.readline() for one in members}
    assert len(answers) == 1 and len(client.view().leases) == 1
    assert len(client.view().leases[0].processes) == 3


def test_a_job_gives_its_tiles_back(daemon, cgroups: Path, member) -> None:
    """A process of the job may say so, when no other runs on them; nobody else's may."""
    job = cgroups / f"unified{SCOPE}/job_9"
    job.mkdir(parents=True)
    (job / "cgroup.procs").write_text("1\n")
    first, second = member(), member()
    for one in (first, second):
        put(cgroups, one.pid, f"0::{SCOPE}/job_9/step_0")
    first.do("job:1")
    assert second.do("release") == "tiles-in-use" and len(client.view().leases) == 1
    assert first.do("back") == "True" and second.do("release") == "released" and client.view().leases == []


def test_a_label_is_only_a_label(daemon, cgroups: Path, member) -> None:
    """What the environment says of a job is shown, and believed by nobody."""
    liar = member(SLURM_JOB_ID="7", TILEWORK_JOB="")
    assert liar.do("job:1") == "tiles-job"
    assert liar.do("1").startswith("0 on")
    seen = client.view().leases[0]
    assert (seen.label, seen.job, seen.step, seen.kind) == ("7", "", "", "exclusive")


# ---- a real one ----


@pytest.fixture
def real_job() -> Iterator[Path]:
    mounted = next((line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines() if " cgroup2 " in line), None)
    if os.geteuid() or mounted is None:
        pytest.skip("needs root and cgroup v2")
    job = Path(f"{mounted}{SCOPE}/job_{HERE}")
    made = [p for p in (job, *job.parents) if not p.exists()]
    try:
        (job / "step_0" / "user").mkdir(parents=True)
    except OSError as e:
        pytest.skip(f"no cgroup can be made here: {e}")
    yield job
    until = time.monotonic() + 10
    for place in (job / "step_0" / "user", job / "step_0", *made):
        while place.exists():
            with contextlib.suppress(OSError):  # a process that has just been killed may be there still
                place.rmdir()
            assert time.monotonic() < until, place
            time.sleep(0.01)


def test_a_job_in_a_real_cgroup(run_folder: Path, real_job: Path, member) -> None:
    procs = str(real_job / "step_0" / "user" / "cgroup.procs")
    first, second = member(procs), member(procs)
    assert first.do("job:1").startswith("0 on")
    first.end()
    leases_when(lambda found: [(x.kind, x.job, x.processes) for x in found] == [("job", str(HERE), [])])
    kill_daemon(run_folder)
    assert second.do("job").startswith("0 on")
    assert [(x.job, [p.pid for p in x.processes]) for x in client.view().leases] == [(str(HERE), [second.pid])]
    second.end()  # the last process of the job; the daemon, which it started, does not count
    leases_when(lambda found: not found)
    kill_daemon(run_folder)
