"""sbatch, srun, squeue, sinfo and scancel over the machine's own queue: scripts and commands as sites print them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_queue import queue as queue  # the fixture
from test_queue import until

from tilework.jobs import commands
from tilework.jobs.local import LocalQueue
from tilework.tiles import alive, client
from tilework.tiles.machine import numbers

HOST = socket.gethostname()


@pytest.fixture
def site(queue: LocalQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands in front of any real Slurm."""
    made = commands.install(tmp_path)
    assert {p.name for p in made} == set(commands.NAMES) and len(made) == 10
    monkeypatch.setenv("PATH", f"{tmp_path / 'usr/local/bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


def run(*words: str, code: int = 0, **env: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **env}, timeout=120)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def script(folder: Path, text: str, name: str = "job.sh") -> str:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    return name


def test_a_batch_script(site: Path, queue: LocalQueue) -> None:
    """Its #SBATCH lines, patterns in names of files, arguments; the command line comes before the script."""
    text = "#SBATCH --job-name=mine --ntasks=2\n#SBATCH --time=00:05:00 # a comment\n\n"
    text += 'echo "$SLURM_JOB_NAME $SLURM_NTASKS $1"\n#SBATCH --nope\n'
    (site / "out").mkdir()
    name = script(site, text)
    assert run("sbatch", "--output=out/%x-%A.log", "--gres=rdu:2", name, "word") == "Submitted batch job 1\n"
    assert run("sbatch", "--parsable", "-W", "-J", "other", "-n", "3", name, "x") == "2\n"
    queue.wait(["1"], 60)
    assert (site / "out/mine-1.log").read_text() == "mine 2 word\n" and (site / "slurm-2.out").read_text() == "other 3 x\n"
    assert queue.job("1").tiles == "0-7" and queue.job("1").spec.time_limit == 300
    assert len(numbers(queue.job("2").tiles)) == 4  # one chip, wherever one was free
    assert run("sbatch", "--ipus=2", "--parsable", "-W", name, "x") == "3\n" and len(numbers(queue.job("3").tiles)) == 8
    assert run("sbatch", "--wait", "--wrap", "exit 7", code=7) == "Submitted batch job 4\n"


def test_tasks_divide_the_tiles_of_their_job(site: Path, queue: LocalQueue) -> None:
    """Without overlap; each knows its rank."""
    (site / "task.py").write_text(
        "import os\nfrom tilework.tiles import holding\nheld = holding.hold()\n"
        "print(os.environ['SLURM_PROCID'], os.environ['SLURM_STEP_NUM_TASKS'], held.lease.tiles, flush=True)\n"
    )
    python = f"{sys.executable} task.py"
    name = script(site, f"srun --mpi=pmi2 {python}\nsrun -n 1 {python}\nTILEWORK_TILES=job:tiles:3 {python}")
    run(
        "sbatch",
        "--gres=rdu:1",
        "--tasks-per-node",
        "2",
        "--nodes",
        "1",
        "--nodelist",
        HOST,
        "--cpus-per-task=1",
        "-W",
        name,
        TILEWORK_LEASE="1",
        code=1,
    )
    said = (site / "slurm-1.out").read_text()
    lines = sorted(said.splitlines()[:2])
    assert lines == ["0 2 [0, 1]", "1 2 [2, 3]"], said
    assert "0 1 [0, 1, 2, 3]" in said and "KeyError: 'SLURM_STEP_NUM_TASKS'" in said  # the batch script itself is no task
    run(
        "sbatch",
        "-W",
        "--gres=rdu:1",
        script(site, f"TILEWORK_TILES=job:tiles:7 {sys.executable} task.py"),
        TILEWORK_LEASE="1",
        code=1,
    )
    assert "the job has no tile 7" in (site / "slurm-2.out").read_text()


def test_srun(site: Path, queue: LocalQueue) -> None:
    assert run("srun", "echo", "hello") == "hello\n"
    assert sorted(run("srun", "-l", "-n", "3", "sh", "-c", "echo $SLURM_PROCID $SLURM_LOCALID").splitlines()) == [
        "0: 0 0",
        "1: 1 1",
        "2: 2 2",
    ]
    said = run("srun", "-n", "3", "sh", "-c", "exit $((SLURM_PROCID * 4))", code=8)  # the highest
    assert sorted(said.splitlines()) == [f"srun: error: {HOST}: task {i}: Exited with exit code {4 * i}" for i in (1, 2)]
    assert [j.state for j in queue.jobs()] == ["COMPLETED", "COMPLETED", "FAILED"]
    assert "this queue has one node" in run("srun", "--nodelist=sm-02", "true")
    held = queue.submit(type(queue.job("1").spec)(command=("sleep", "1000"), tiles="chips:8"))
    until(lambda: queue.job(held.id).state == "RUNNING")
    waiting = subprocess.Popen(
        ["srun", "--gres=rdu:1", "echo", "at last"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: any(j.reason for j in queue.jobs(ended=False)))
    queue.cancel(held.id)
    out, err = waiting.communicate(timeout=60)
    assert out == "at last\n" and err.splitlines() == [
        "srun: job 6 queued and waiting for resources",
        "srun: job 6 has been allocated resources",
    ]


def test_ctrl_c(site: Path, queue: LocalQueue) -> None:
    """The program hears SIGINT, once, and has time to save."""
    (site / "saves.py").write_text(
        "import sys, time\ntry:\n    sys.stdout.write('ready\\n'); sys.stdout.flush()\n    time.sleep(100)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.5)\n    sys.stdout.write('saved\\n'); sys.stdout.flush()\n"
    )
    words = ["srun", "-n", "2", sys.executable, "saves.py"]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out == "saved\n" * 2 and queue.job("1").state == "CANCELLED" and queue.job("1").reason == "interrupted"


def test_srun_that_is_killed_leaves_nothing(site: Path, queue: LocalQueue) -> None:
    process = subprocess.Popen(["srun", "-n", "2", "sh", "-c", "echo $$; sleep 1000"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    tasks = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    assert queue.wait(["1"], 60)[0].state == "LOST"
    until(lambda: not any(alive.start_time(pid) for pid in tasks) and client.view().leases == [])


def test_tables(site: Path, queue: LocalQueue) -> None:
    header = "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n"
    assert run("squeue") == header and run("squeue", "-h") == ""
    run("sbatch", "--gres=rdu:2", script(site, "sleep 1000", "a-long-name.sh"))
    until(lambda: queue.job("1").state == "RUNNING")
    user = queue.job("1").user
    assert re.fullmatch(
        rf"                 1     local a-long-n {user:>8}  R       0:0\d      1 {HOST}\n", run("squeue", "-h")
    ), run("squeue")
    run("sbatch", "--gres=rdu:8", script(site, "true"))
    run("sbatch", "--dependency=afterok:1", script(site, "true"))
    until(lambda: all(j.reason for j in queue.jobs(ended=False)[1:]))
    assert run("squeue", "-h", "-o", "%i %t %R") == f"1 R {HOST}\n2 PD (Resources)\n3 PD (Dependency)\n"
    assert run("squeue", "-h", "-j", "2", "-O", "JobID:6,State,Name:8") == "2     PENDING             job.sh\n"
    lines = run("sinfo").splitlines()
    assert lines == ["PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST", f"local*       up   infinite      1  mixed {HOST}"]
    # As the sites print it, spaces and all.
    found = [line.split() for line in run("sinfo", "-O", "AllocNodes,", "GresUsed,", "Gres,", "NodeList").splitlines()]
    assert found == [["ALLOCNODES", "GRES_USED", "GRES", "NODELIST"], ["all", "rdu:2(IDX:0-1)", "rdu:8", HOST]]
    assert run("scancel", "1", "2") == "" and "Invalid job id specified" in run("scancel", "99", code=1)
    assert [j.state for j in queue.wait(["1", "2", "3"], 60)] == ["CANCELLED"] * 3
    assert run("scancel", "1") == ""  # as it should be already


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["sbatch", "--array=1-3", "job.sh"], "unrecognized option '--array=1-3'"),
        (["sbatch", "--gres=moon:1", "job.sh"], "Invalid generic resource (gres) specification: moon:1"),
        (["sbatch", "none.sh"], "Unable to open file none.sh"),
        (["sbatch", "plain.txt"], "This does not look like a batch script"),
        (["sbatch", "--gres=rdu:9", "job.sh"], "fewer tiles than the job asks for"),
        (["sbatch", "--time=soon", "job.sh"], "'soon' is no time"),
        (["sbatch", "--dependency=afterok:77", "job.sh"], "there is no job 77"),
        (["sbatch", "--dependency=singleton", "job.sh"], "knows afterok and afterany"),
        (["srun"], "No command given"),
        (["srun", "--pty", "bash"], "unrecognized option '--pty'"),
        (["squeue", "-o", "%q"], "Invalid field requested: q"),
        (["squeue", "-j", "12"], "Invalid job id specified"),
        (["sinfo", "-O", "Moon"], "Invalid field requested: Moon"),
        (["scancel"], "No job identification provided"),
    ],
)
def test_mistakes(words: list[str], text: str, site: Path) -> None:
    script(site, "true")
    (site / "plain.txt").write_text("echo hello\n")
    said = run(*words, code=1)
    assert text in said and said.startswith(f"{words[0]}: error: "), said


def test_a_count_for_each_task(site: Path, queue: LocalQueue) -> None:
    """Where a site says so, as the sites' own commands mean it: 16 tasks with rdu:1 have all tiles of the node."""
    (site / "site.toml").write_text('[jobs]\ngres_per = "task"\n')
    words = ["--gres=rdu:1", "--tasks-per-node", "8", "--nodes", "2", "--nodelist", "sm-02,sm-01", "--cpus-per-task=16"]
    said = run("sbatch", *words, "-W", script(site, "true"), TILEWORK_SITE=str(site / "site.toml"))
    assert (
        "2 nodes asked for: this queue has one" in said and queue.job("1").tiles == "0-31" and queue.job("1").spec.num_tasks == 16
    )


def test_a_real_slurm_is_never_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilework.jobs import slurm

    real = tmp_path / "usr/local/bin/sbatch"
    real.parent.mkdir(parents=True)
    real.write_text("#!/bin/sh\nexec something\n")
    real.chmod(0o755)
    made = commands.install(tmp_path)
    assert real not in made and "something" in real.read_text()
    monkeypatch.setenv("PATH", str(real.parent))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert not slurm.found()  # a package without a cluster
    (tmp_path / "slurm.conf").touch()
    assert slurm.found() and commands.install(Path("/")) == []
    assert commands.remove(tmp_path) and real.exists() and not (tmp_path / "opt/slurm/bin/sbatch").exists()
    monkeypatch.setenv("PATH", str(tmp_path / "opt/slurm/bin"))
    commands.install(tmp_path)
    assert not slurm.found()


def test_the_daemon_of_tiles_outlives_the_job_that_started_it(site: Path, queue: LocalQueue) -> None:
    run("srun", "--gres=rdu:1", "true")
    pid = client.view(start=False).daemon.pid
    run("srun", "--gres=rdu:1", "true")
    assert client.view(start=False).daemon.pid == pid
