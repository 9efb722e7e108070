"""SlurmQueue against a real Slurm: two nodes on loopback (slurm_cluster.py)."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from slurm_cluster import SlurmCluster, slurm_cluster

from tilework.errors import MachineError, UserError
from tilework.jobs import prolog
from tilework.jobs.slurm import SlurmQueue, found
from tilework.jobs.spec import Job, Spec

# Says that it is ready, and what signals it got; after `few` of them it ends as one that saved its work.
CATCHER = """
import signal, sys, time
got = []
def caught(number, frame):
    got.append(signal.Signals(number).name)
    print("caught", signal.Signals(number).name, flush=True)
for name in sys.argv[2:]:
    signal.signal(signal.Signals[name], caught)
print("ready", flush=True)
until = time.time() + 120
while len(got) < int(sys.argv[1]) and time.time() < until:
    time.sleep(0.05)
time.sleep(0.3)
print("saved", *got, flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm")
    script = folder / "taskprolog.sh"
    script.write_text(prolog.script("rdu"))
    script.chmod(0o755)
    with slurm_cluster(folder, f"TaskProlog={script}") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def queue(cluster: SlurmCluster) -> SlurmQueue:
    return SlurmQueue(cluster.folder / "jobs")


@pytest.fixture(scope="module", autouse=True)
def early(queue: SlurmQueue) -> list[Job]:
    """Jobs whose time runs while the other tests do. Slurm counts minutes, and looks at the clock twice in one: 58 seconds before
    the end of one minute is soon."""
    saving = Spec(command=catcher(1, "SIGUSR1"), time_limit=60, signal=(signal.SIGUSR1, 58))
    ranks = msgspec.structs.replace(saving, num_tasks=2)
    script = Spec(
        script="#!/bin/bash\ntrap 'echo saved SIGUSR1; exit' USR1\nsleep 100 & wait\n", time_limit=60, signal=saving.signal
    )
    return [queue.submit(spec) for spec in (saving, ranks, script)]


def catcher(count: int, *names: str) -> tuple[str, ...]:
    return (sys.executable, "-c", CATCHER, str(count), *names)


def said(job: Job) -> str:
    return Path(job.output).read_text() if Path(job.output).exists() else ""


def noted(queue: SlurmQueue, job: Job) -> str:
    path = queue.folder / f"{job.id}.json"
    return path.read_text() if path.exists() else ""


def until(true: Callable[[], object]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to that")


def running(queue: SlurmQueue, job: Job, text: str = "ready") -> None:
    until(lambda: text in said(job) or queue.job(job.id).is_over)
    assert text in said(job), queue.job(job.id)


def run(queue: SlurmQueue, spec: Spec) -> Job:
    return queue.wait([queue.submit(spec).id], 60)[0]


def test_there_is_a_real_slurm(cluster: SlurmCluster) -> None:
    assert found()


@pytest.mark.parametrize(
    ("command", "state", "code"),
    [
        (("true",), "COMPLETED", 0),
        (("sh", "-c", "exit 3"), "FAILED", 3),
        (("sh", "-c", "kill -9 $$"), "FAILED", 137),
        (("no-such-program",), "FAILED", 127),
    ],
)
def test_exit_codes(command: tuple[str, ...], state: str, code: int, queue: SlurmQueue) -> None:
    job = run(queue, Spec(command=command))
    assert (job.state, job.exit_code, job.runs) == (state, code, 1)
    assert job.started and job.ended and job.nodes in ("tw1", "tw2") and job.user == "root"
    assert job.name == command[0]


def test_output_files_labels_and_words(queue: SlurmQueue, tmp_path: Path) -> None:
    words = ("printf", "%s|", "a b", "it's", '"$HOME"', "`x`", "\\", "*", "line\nbreak")
    labels = {"who": 'it\'s "me" \\ # : hetjob', "n": "1", "long": "x" * 200}
    spec = Spec(command=words, name="it's a # name", output="%x-%j-%u.txt", folder=str(tmp_path), labels=labels)
    job = run(queue, spec)
    assert job.output == job.error == str(tmp_path / f"it's a # name-{job.id}-root.txt")
    assert Path(job.output).read_text() == "".join(f"{w}|" for w in words[2:])
    assert job.spec.labels == labels and job.spec == spec
    both = run(queue, Spec(command=("sh", "-c", "pwd; echo err >&2"), folder=str(tmp_path), output="o", error="e.%j"))
    assert (tmp_path / "o").read_text() == f"{tmp_path}\n" and (tmp_path / f"e.{both.id}").read_text() == "err\n"
    kept = run(queue, Spec(command=("sh", "-c", "echo out; echo err >&2")))
    assert Path(kept.output).read_text() == "out\n" and Path(kept.error).read_text() == "err\n"
    assert Path(kept.output).parent.stat().st_mode & 0o777 == 0o700


def test_labels_are_changed_and_asked_for(queue: SlurmQueue) -> None:
    job = queue.submit(Spec(command=("true",), labels={"sweep": "7", "a": "b"}))
    assert queue.label(job.id, {"a": None, "c": "d"}).spec.labels == {"sweep": "7", "c": "d"}
    assert [j.id for j in queue.jobs(labels={"sweep": "7"})] == [job.id]
    assert queue.jobs(labels={"sweep": "8"}) == []
    queue.wait([job.id], 60)
    assert queue.job(job.id).spec.labels == {"sweep": "7", "c": "d"}
    assert queue.jobs(ended=False, labels={"sweep": "7"}) == []
    assert [j.id for j in queue.jobs(limit=2)] == sorted((j.id for j in queue.jobs()), key=int)[-2:]


def test_the_environment_stays_out_of_the_records(queue: SlurmQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"PATH": os.environ["PATH"], "SECRET": "hunter2"}
    job = run(queue, Spec(command=("sh", "-c", "echo $SECRET ${HOMELESS:-none}"), environment=environment))
    assert said(job) == "hunter2 none\n"
    assert not [p for p in queue.folder.glob("*.json") if "hunter2" in p.read_text()]
    monkeypatch.setenv("MINE", "here")
    monkeypatch.setenv("SBATCH_OUTPUT", "/nowhere/%j")  # would count for more than the script's line
    assert said(run(queue, Spec(command=("sh", "-c", "echo $MINE")))) == "here\n"


@pytest.mark.slow
def test_dependencies(queue: SlurmQueue) -> None:
    bad = queue.submit(Spec(command=("sh", "-c", "sleep 0.5; exit 1")))
    well = queue.submit(Spec(command=("true",), after=(bad.id,)))
    anyhow = queue.submit(Spec(command=("true",), after=(f"any:{bad.id}",)))
    jobs = queue.wait([bad.id, well.id, anyhow.id], 60)
    assert [j.state for j in jobs] == ["FAILED", "CANCELLED", "COMPLETED"]
    assert jobs[1].reason == "a job that it waited for did not end well" and jobs[1].exit_code is None and jobs[1].started is None
    assert (jobs[2].started or 0) >= (jobs[0].ended or 0)
    good = run(queue, Spec(command=("true",)))
    assert run(queue, Spec(command=("true",), after=(good.id,))).state == "COMPLETED"
    with pytest.raises(UserError) as caught:
        queue.submit(Spec(command=("true",), after=("1; rm",)))
    assert caught.value.id == "job-after"


def test_cancel(queue: SlurmQueue) -> None:
    job = queue.submit(Spec(command=catcher(1, "SIGTERM")))
    running(queue, job)
    assert queue.job(job.id).state == "RUNNING"
    queue.cancel(job.id)
    (job,) = queue.wait([job.id], 60)
    assert job.state == "CANCELLED" and said(job) == "ready\ncaught SIGTERM\nsaved SIGTERM\n"  # once: it was not sent twice
    with pytest.raises(UserError) as caught:
        queue.cancel(job.id)
    assert caught.value.id == "job-over"


def test_cancel_one_that_waits(queue: SlurmQueue) -> None:
    first = queue.submit(Spec(command=("sleep", "60")))
    second = queue.submit(Spec(command=("true",), after=(first.id,)))
    queue.cancel(second.id)
    queue.cancel(first.id)
    first, second = queue.wait([first.id, second.id], 60)
    assert (first.state, second.state, second.started, second.exit_code) == ("CANCELLED", "CANCELLED", None, None)


def test_signals(queue: SlurmQueue) -> None:
    job = queue.submit(Spec(command=catcher(4, "SIGUSR1", "SIGINT", "SIGQUIT", "SIGTERM")))
    running(queue, job)
    for name in ("USR1", "INT", "QUIT", "TERM"):
        queue.cancel(job.id, signal.Signals[f"SIG{name}"])
        running(queue, job, f"caught SIG{name}")
    (job,) = queue.wait([job.id], 60)
    assert (job.state, job.exit_code) == ("COMPLETED", 0)
    assert said(job).splitlines()[-1] == "saved SIGUSR1 SIGINT SIGQUIT SIGTERM"


def test_stop_continue_and_kill(queue: SlurmQueue) -> None:
    job = queue.submit(Spec(command=("sh", "-c", "echo ready $$; exec sleep 60")))
    running(queue, job)
    stat = Path("/proc") / said(job).split()[1] / "stat"
    queue.cancel(job.id, signal.SIGSTOP)
    until(lambda: stat.read_text().split()[2] == "T")
    queue.cancel(job.id, signal.SIGCONT)
    until(lambda: stat.read_text().split()[2] == "S")
    queue.cancel(job.id, signal.SIGKILL)
    (job,) = queue.wait([job.id], 60)
    assert job.state == "CANCELLED"  # to Slurm that is a cancellation, which begins with TERM


def test_ranks(queue: SlurmQueue) -> None:
    """srun starts them; signals reach each of them once."""
    print_rank = "import os; print(os.environ['SLURM_PROCID'], os.environ['SLURMD_NODENAME'], flush=True)"
    spec = Spec(command=(sys.executable, "-c", print_rank), num_tasks=4, num_nodes=2, tasks_per_node=2, options={"mpi": "none"})
    job = run(queue, spec)
    assert (job.state, sorted(said(job).split("\n"))) == ("COMPLETED", ["", "0 tw1", "1 tw1", "2 tw2", "3 tw2"])
    assert job.nodes == "tw[1-2]"
    job = run(queue, Spec(command=("sh", "-c", "exit $SLURM_PROCID"), num_tasks=4))
    assert (job.state, job.exit_code) == ("FAILED", 3)
    job = queue.submit(Spec(command=catcher(2, "SIGUSR1", "SIGTERM"), num_tasks=2))
    until(lambda: said(job).count("ready") == 2)
    queue.cancel(job.id, signal.SIGUSR1)
    until(lambda: said(job).count("caught SIGUSR1") == 2)
    queue.cancel(job.id)
    (job,) = queue.wait([job.id], 60)
    assert job.state == "CANCELLED" and said(job).count("saved SIGUSR1 SIGTERM\n") == 2


def test_a_script(queue: SlurmQueue, tmp_path: Path) -> None:
    """Its own interpreter with its argument, its own words, its own lines for sbatch."""
    python = f"""#!{sys.executable} -B
#SBATCH --output={tmp_path}/own.txt --cpus-per-task=2
#SBATCH --job-name=own
import os, sys
text = '''#SBATCH --nodes=77
EOF
$HOME `x` \\\\
'''
print(sys.flags.dont_write_bytecode, sys.argv[1:], os.environ["SLURM_CPUS_PER_TASK"], repr(text), end="")
sys.exit(5)"""
    job = run(queue, Spec(script=python, arguments=("a b", "$c", "")))
    assert (job.state, job.exit_code) == ("FAILED", 5)
    assert (tmp_path / "own.txt").read_text() == "1 ['a b', '$c', ''] 2 '#SBATCH --nodes=77\\nEOF\\n$HOME `x` \\\\\\n'"
    assert job.output == f"{tmp_path}/own.txt"
    # what was asked for counts for more than the script's own lines
    asked = Spec(script=python, arguments=("x",), output=str(tmp_path / "asked.txt"), cpus_per_task=1, name="asked")
    job = run(queue, asked)
    assert (tmp_path / "asked.txt").read_text().startswith("1 ['x'] 1 ") and job.output == f"{tmp_path}/asked.txt"
    job = run(queue, Spec(script='#!/bin/bash\nsource /dev/stdin <<< "a=3"\nsrun -n2 -l bash -c "echo $a"\nexit $a', num_tasks=2))
    assert (job.exit_code, sorted(said(job).split("\n"))) == (3, ["", "0: 3", "1: 3"])


def test_scripts_that_are_none(queue: SlurmQueue) -> None:
    assert run(queue, Spec(script="#!/no/such/interpreter\n")).exit_code == 127
    for spec, id in ((Spec(script="echo 1\n"), "job-script"), (Spec(), "job-spec")):
        with pytest.raises(UserError) as caught:
            queue.submit(spec)
        assert caught.value.id == id


def test_requests_that_slurm_refuses(queue: SlurmQueue) -> None:
    for options, text in (
        ({"gres": "rdu:9"}, "Requested node configuration is not available"),
        ({"partition": "nowhere"}, "invalid partition specified: nowhere"),
        ({"no_such_option": "1"}, "no-such-option"),
    ):
        with pytest.raises(UserError) as caught:
            queue.submit(Spec(command=("true",), options=options))
        assert caught.value.id == "slurm-refused" and text in caught.value.found, caught.value
    for name in ("array", "not an option", "a\nb"):
        with pytest.raises(UserError) as caught:
            queue.submit(Spec(command=("true",), options={name: "1"}))
        assert caught.value.id == "slurm-option"


def test_no_such_job(queue: SlurmQueue) -> None:
    for id in ("1", "x", "../../etc"):
        with pytest.raises(UserError) as caught:
            queue.job(id)
        assert caught.value.id == "job-unknown"
    job = queue.submit(Spec(command=("sleep", "30")))
    with pytest.raises(UserError) as caught:
        queue.wait([job.id], 0.5)
    assert caught.value.id == "job-wait"
    queue.cancel(job.id)


@pytest.mark.full
def test_the_time_is_over(queue: SlurmQueue) -> None:
    deaf = queue.submit(Spec(command=catcher(9, "SIGTERM"), time_limit=1))
    quick = queue.submit(Spec(command=catcher(1, "SIGTERM"), time_limit=1))
    again = queue.submit(Spec(command=catcher(1, "SIGTERM"), time_limit=1, requeue=True))
    deaf, quick = queue.wait([deaf.id, quick.id], 180)
    assert (deaf.state, quick.state) == ("TIMEOUT", "TIMEOUT") and quick.reason == "its time was over"
    assert said(deaf) == "ready\ncaught SIGTERM\n" and said(quick).endswith("saved SIGTERM\n")
    assert deaf.exit_code in (None, 137) and quick.exit_code == 0
    until(lambda: queue.job(again.id).state == "PENDING")  # in the queue again
    assert said(again).endswith("saved SIGTERM\n")
    queue.cancel(again.id)


def test_which_job_a_process_is_in(cluster: SlurmCluster, queue: SlurmQueue) -> None:
    """By the cgroup, as the daemon of tiles reads it."""
    if not cluster.cgroups:
        pytest.skip("cgroups of version 1 cannot be made here")
    show = (
        "import os; from tilework.tiles.jobs import job_of; j = job_of(os.getpid(), os.getuid()); print(j.id, j.step, flush=True)"
    )
    job = run(queue, Spec(command=(sys.executable, "-c", show)))
    assert said(job) == f"{job.id} batch\n"
    job = run(queue, Spec(command=(sys.executable, "-c", show), num_tasks=2))
    assert said(job) == f"{job.id} 0\n" * 2


def devices(line: str) -> set[int]:
    found: set[int] = set()
    for part in line.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def test_the_task_prolog(cluster: SlurmCluster, queue: SlurmQueue) -> None:
    """Each job hears which devices of its node it has; two at a time have different ones; one without any hears nothing."""
    show = "echo $SLURMD_NODENAME ${TILEWORK_TILES-none} ${TILEWORK_GRES_DEVICES-none}; while ! test -e go; do sleep 0.1; done"
    folder = cluster.folder / "prolog"
    folder.mkdir()
    spec = Spec(command=("sh", "-c", show), folder=str(folder), options={"gres": "rdu:3", "nodelist": "tw1"})
    jobs = [queue.submit(spec), queue.submit(spec), queue.submit(Spec(command=("sh", "-c", show), folder=str(folder)))]
    both = Spec(command=spec.command, folder=str(folder), num_tasks=2, num_nodes=2, options={"gres": "rdu:2"})
    jobs.append(queue.submit(both))
    for job in jobs:
        running(queue, job, "none" if job is jobs[2] else "job:chip")
    until(lambda: said(jobs[3]).count("tw") == 2)
    (folder / "go").touch()
    assert {j.state for j in queue.wait([j.id for j in jobs], 60)} == {"COMPLETED"}
    had: dict[str, set[int]] = {"tw1": set(), "tw2": set()}
    for job, count in zip(jobs, (3, 3, 0, 2), strict=True):
        for line in said(job).splitlines():
            node, tiles, indices = line.split()
            if count:
                assert tiles == f"job:chip:{indices}" and len(devices(indices)) == count and not devices(indices) & had[node]
                had[node] |= devices(indices)
            else:
                assert tiles == indices == "none"
    assert (len(had["tw1"]), len(had["tw2"])) == (8, 2)


def test_a_signal_before_the_time_is_over(early: list[Job], queue: SlurmQueue) -> None:
    for job, count in zip(queue.wait([j.id for j in early], 100), (1, 2, 1), strict=True):
        assert (job.state, job.exit_code) == ("COMPLETED", 0) and said(job).count("saved SIGUSR1\n") == count, said(job)


@pytest.mark.full
def test_the_controller_is_killed_and_started_again(
    cluster: SlurmCluster, queue: SlurmQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = cluster.folder / "flag"
    ends = queue.submit(Spec(command=("sh", "-c", f"echo ready; while ! test -e {flag}; do sleep 0.1; done; exit 7")))
    stays = queue.submit(Spec(command=catcher(1, "SIGUSR1")))
    for job in (ends, stays):
        running(queue, job)
    until(lambda: all(queue.job(j.id).state == "RUNNING" for j in (ends, stays)))
    cluster.until_saved()
    cluster.kill("slurmctld")
    flag.touch()
    until(lambda: '"exit_code": 7' in noted(queue, ends))  # while nobody is there to hear it
    calls: list[Callable[[], object]] = [lambda: queue.jobs(), lambda: queue.submit(Spec(command=("true",)))]
    for call, text in zip(calls, ("Failed while looking for jobs", "Unable to contact slurm controller"), strict=True):
        with pytest.raises(MachineError) as caught:
            call()
        assert caught.value.id == "slurm-silent" and text in caught.value.found  # the client's own words
        with monkeypatch.context() as patch, pytest.raises(MachineError) as caught:
            patch.setenv("TILEWORK_SLURM_TIMEOUT", "0.5")
            call()
        assert caught.value.id == "slurm-silent" and "no answer in 0.5 seconds" in caught.value.found
    cluster.start_controller()
    (ends,) = queue.wait([ends.id], 60)  # it bears that nobody answers at first
    assert (ends.state, ends.exit_code) == ("FAILED", 7)
    queue.cancel(stays.id, signal.SIGUSR1)
    (stays,) = queue.wait([stays.id], 60)
    assert (stays.state, said(stays)) == ("COMPLETED", "ready\ncaught SIGUSR1\nsaved SIGUSR1\n")


def test_a_node_is_killed(cluster: SlurmCluster, queue: SlurmQueue) -> None:
    """Its daemon started again in time: nothing happened. A node that is given up: the job is lost."""
    flag = cluster.folder / "node-flag"
    wait = ("sh", "-c", f"echo ready; while ! test -e {flag}; do sleep 0.1; done; exit 4")
    job = queue.submit(Spec(command=wait, options={"nodelist": "tw2"}))
    running(queue, job)
    cluster.kill("tw2")
    flag.touch()
    until(lambda: '"exit_code": 4' in noted(queue, job))
    cluster.start_node("tw2")
    (job,) = queue.wait([job.id], 60)
    assert (job.state, job.exit_code) == ("FAILED", 4)
    lost = queue.submit(Spec(command=catcher(9, "SIGTERM"), options={"nodelist": "tw2"}))
    running(queue, lost)
    cluster.kill("tw2")
    cluster.client("scontrol", "update", "NodeName=tw2", "State=DOWN", "Reason=power")
    (lost,) = queue.wait([lost.id], 60)
    assert (lost.state, lost.reason, lost.exit_code) == ("LOST", "its node went down", None)
    cluster.start_node("tw2")
    cluster.client("scontrol", "update", "NodeName=tw2", "State=RESUME")
    cluster.until_idle()


@pytest.mark.full
def test_slurm_has_forgotten_them(cluster: SlurmCluster, queue: SlurmQueue) -> None:
    """Its state is lost. What was seen is kept; what was not is read from what the jobs wrote themselves."""
    seen = run(queue, Spec(command=("sh", "-c", "exit 6"), labels={"kept": "1"}))
    good = queue.submit(Spec(command=("true",), labels={"kept": "1"}))
    bad = queue.submit(Spec(command=("sh", "-c", "kill -9 $$"), labels={"kept": "1"}))
    ended = queue.submit(Spec(command=catcher(1, "SIGTERM"), labels={"kept": "1"}))
    killed = queue.submit(Spec(command=("sleep", "60"), after=(ended.id,), labels={"kept": "1"}))
    running(queue, ended)
    queue.cancel(ended.id)
    for job in (good, bad, ended):
        until(lambda job=job: noted(queue, job) and '"exit_code": null' not in noted(queue, job))
    cluster.kill("slurmctld")
    cluster.forget()
    cluster.start_controller()
    cluster.until_idle()
    jobs = {j.id: j for j in queue.jobs(labels={"kept": "1"})}
    states = [(jobs[j.id].state, jobs[j.id].exit_code) for j in (seen, good, bad, ended, killed)]
    assert states == [("FAILED", 6), ("COMPLETED", 0), ("FAILED", 137), ("CANCELLED", 0), ("LOST", None)]
    assert "it left no word" in jobs[killed.id].reason
    assert queue.job(seen.id).nodes and queue.job(good.id).ended
    # Slurm would refuse to wait for a job that it does not know
    assert run(queue, Spec(command=("true",), after=(good.id,))).state == "COMPLETED"


@pytest.mark.full
def test_slurm_forgets_by_itself(cluster: SlurmCluster, queue: SlurmQueue) -> None:
    job = run(queue, Spec(command=("sh", "-c", "exit 6")))
    unseen = queue.submit(Spec(command=("sh", "-c", "exit 8")))
    until(lambda: cluster.client("scontrol", "-o", "show", "jobs").startswith("No jobs in the system"))
    assert [(j.state, j.exit_code) for j in map(queue.job, (job.id, unseen.id))] == [("FAILED", 6), ("FAILED", 8)]


def test_what_was_kept_is_json_of_the_users_alone(queue: SlurmQueue) -> None:
    assert queue.folder.stat().st_mode & 0o777 == 0o700
    for path in queue.folder.glob("*.json"):
        assert isinstance(json.loads(path.read_text()), dict)
