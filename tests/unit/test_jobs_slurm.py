"""Slurm without a Slurm: the batch scripts, to the letter, and what the releases' answers mean. tests/cluster has a real one.

TILEWORK_GOLDEN=1 writes the golden files anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tilework.errors import MachineError, UserError
from tilework.jobs import prolog, slurm
from tilework.jobs.slurm import SlurmQueue
from tilework.jobs.spec import Spec

GOLDEN = Path(__file__).parent / "golden"
SPECS = {
    "slurm-command": Spec(command=("python", "train.py", "--name", "it's a run", "$HOME")),
    "slurm-everything": Spec(
        command=("python", "train.py"), name="night run", tiles="2", num_tasks=32, num_nodes=2, tasks_per_node=16,
        cpus_per_task=2, time_limit=90061, after=("12", "any:13", "14"), labels={"sweep": "7", "note": 'a "b" \\ #c'},
        folder="/data/my runs",
        environment={"SECRET": "1"}, output="logs/%x-%j.out", error="logs/%x-%j.err", signal=(10, 119.5), requeue=True,
        options={"partition": "tiles", "gres": "rdu:1", "nodelist": "tw[1-2]", "mpi": "pmi2", "exclusive": ""},
    ),
    "slurm-script": Spec(
        script="#!/usr/bin/env -S python3 -u\n#SBATCH --mem=4G\n#SBATCH --output=own.txt\n\nimport sys\n"
        "#SBATCH --nodes=9\nprint(sys.argv)",
        arguments=("a b", "--flag"), name="mine", signal=(15, 30), tiles="shared",
    ),
    "slurm-script-srun": Spec(
        script="#!/bin/bash\n#SBATCH -n 4\nsrun python train.py\n", num_tasks=4, signal=(12, 60), time_limit=3600,
    ),
}  # fmt: skip


@pytest.fixture
def queue() -> SlurmQueue:
    return SlurmQueue(Path("/home/some one/jobs"))


@pytest.mark.parametrize("name", sorted(SPECS))
def test_the_batch_script(name: str, queue: SlurmQueue) -> None:
    text, path = queue.rendered(SPECS[name]), GOLDEN / f"{name}.sh"
    if os.environ.get("TILEWORK_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert "SECRET" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def ended(tmp_path: Path, spec: Spec, **environment: str) -> tuple[int, str, dict[str, Any]]:
    """A batch script, run as slurmd would: its exit code, what it said, and what it noted."""
    queue = SlurmQueue(tmp_path)
    queue.folder.mkdir(exist_ok=True)
    env = {**os.environ, "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "tw[1-2]", "TMPDIR": str(tmp_path), **environment}
    done = subprocess.run(["bash"], input=queue.rendered(spec), env=env, capture_output=True, text=True, cwd=tmp_path)
    return done.returncode, done.stdout + done.stderr, json.loads((queue.folder / "5.json").read_text())


@pytest.mark.parametrize(("word", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137), ("exit 130", 130)])
def test_what_it_notes(word: str, code: int, tmp_path: Path) -> None:
    got, _, note = ended(tmp_path, Spec(command=("sh", "-c", word)), SLURM_RESTART_COUNT="2")
    assert got == note["exit_code"] == code
    assert (note["nodes"], note["runs"], note["signals"]) == ("tw[1-2]", 3, "") and note["ended"] >= note["started"]


@pytest.mark.parametrize("sent", [("SIGUSR1",), ("SIGCONT", "SIGUSR1"), ("SIGINT",), ("SIGTSTP", "SIGIO", "SIGPWR")])
def test_signals_reach_the_program(sent: tuple[str, ...], tmp_path: Path) -> None:
    """Slurm sends CONT before others, at once. TSTP, IO and PWR stand for STOP, CONT and TERM."""
    last = {"SIGPWR": "SIGTERM"}.get(sent[-1], sent[-1])
    program = f"import signal as s, time; s.signal(s.{last}, lambda *_: exit(6)); print('ready', flush=True); time.sleep(60)"
    path = tmp_path / "slurm_script"
    path.write_text(SlurmQueue(tmp_path).rendered(Spec(command=(sys.executable, "-c", program))))
    env = {**os.environ, "SLURM_JOB_ID": "5"}
    with subprocess.Popen(["bash", str(path)], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for name in sent:
            process.send_signal(signal.Signals[name])
            if name != "SIGCONT":
                time.sleep(0.1)  # not at once: bash would lose some
        assert process.wait(30) == 6


def test_a_script_leaves_nothing_behind(tmp_path: Path) -> None:
    script = "#!/bin/bash\necho $0 $# $1; exit 4"
    code, text, _ = ended(tmp_path, Spec(script=script, arguments=("a b",)))
    assert code == 4 and text.startswith(f"{tmp_path}/tilework-job.") and text.endswith("/script 1 a b\n")
    assert not list(tmp_path.glob("tilework-job.*"))


def test_a_folder_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    text = SlurmQueue(Path("/proc/nowhere")).rendered(Spec(command=("sh", "-c", "echo fine; exit 2")))
    done = subprocess.run(["bash"], input=text, env={**os.environ, "SLURM_JOB_ID": "5"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "fine\n", "")


def test_its_variables_are_its_own(tmp_path: Path) -> None:
    """A variable of the user's stays as it was."""
    _, text, _ = ended(
        tmp_path, Spec(command=("sh", "-c", "echo $code $program $1 $TILEWORK_TILES"), tiles="4"), code="c", program="p"
    )
    assert text == "c p job:4\n"


@pytest.mark.parametrize(
    ("spec", "id"),
    [
        (Spec(), "job-spec"),
        (Spec(command=("a",), script="#!/bin/sh\n"), "job-spec"),
        (Spec(script="echo\n"), "job-script"),
        (Spec(script="#!\n"), "job-script"),
        (Spec(command=("a",), after=("x",)), "job-after"),
        (Spec(command=("a",), name="a\n#SBATCH --uid=0"), "slurm-option"),
        (Spec(command=("a",), options={"array": "0-3"}), "slurm-option"),
        (Spec(command=("a",), options={"a b": ""}), "slurm-option"),
    ],
)
def test_what_is_no_batch_script(spec: Spec, id: str, queue: SlurmQueue) -> None:
    with pytest.raises(UserError) as caught:
        queue.rendered(spec)
    assert caught.value.id == id


ENTRY = {
    "job_id": 7,
    "job_state": "RUNNING",
    "exit_code": 0,
    "user_id": 0,
    "submit_time": 5,
    "start_time": 6,
    "end_time": 9,
    "nodes": "n1",
}


@pytest.mark.parametrize(
    ("fields", "state", "code"),
    [
        ({}, "RUNNING", None),
        ({"job_state": "PENDING"}, "PENDING", None),
        ({"job_state": "COMPLETED"}, "COMPLETED", 0),
        ({"job_state": "FAILED", "exit_code": 768}, "FAILED", 3),
        ({"job_state": "FAILED", "exit_code": 9}, "FAILED", 137),
        ({"job_state": ["FAILED"], "exit_code": {"status": ["ERROR"], "return_code": {"set": True, "number": 3}}}, "FAILED", 3),
        ({"job_state": ["COMPLETED", "COMPLETING"]}, "RUNNING", None),
        ({"job_state": ["PENDING", "REQUEUED"]}, "PENDING", None),
        (
            {"job_state": "FAILED", "exit_code": {"status": "SIGNALED", "return_code": 0, "signal": {"signal_id": 9}}},
            "FAILED",
            137,
        ),
        (
            {
                "job_state": ["FAILED"],
                "exit_code": {
                    "return_code": {"set": False, "number": 0},
                    "signal": {"id": {"set": True, "number": 15}, "name": "TERM"},
                },
            },
            "FAILED",
            143,
        ),
        ({"job_state": "OUT_OF_MEMORY", "exit_code": 125 << 8}, "FAILED", 125),
        ({"job_state": "DEADLINE"}, "FAILED", None),
        ({"job_state": "NODE_FAIL"}, "LOST", None),
        ({"job_state": "PREEMPTED"}, "LOST", None),
        ({"job_state": "BOOT_FAIL"}, "LOST", None),
        ({"job_state": "TIMEOUT", "exit_code": 0}, "TIMEOUT", None),
        ({"job_state": "CANCELLED", "exit_code": 15}, "CANCELLED", 143),
        ({"job_state": "SUSPENDED"}, "RUNNING", None),
        ({"job_state": "A_NEW_STATE"}, "RUNNING", None),
    ],
)
def test_what_squeue_says(fields: dict[str, Any], state: str, code: int | None) -> None:
    job = slurm.told({**ENTRY, **fields})
    assert (job.id, job.state, job.exit_code) == ("7", state, code)
    assert (job.ended is not None) == job.is_over
    if state in ("LOST",) or "OUT" in str(fields) or "NEW" in str(fields):
        assert job.reason


def test_numbers_of_other_releases() -> None:
    newer = {
        "submit_time": {"set": True, "infinite": False, "number": 5},
        "time_limit": {"set": True, "infinite": True, "number": 0},
    }
    job = slurm.told({**ENTRY, **newer, "tasks": {"set": True, "number": 4}, "comment": '{"a": "b"}'})
    assert (job.submitted, job.spec.time_limit, job.spec.num_tasks, job.spec.labels) == (5.0, None, 4, {"a": "b"})
    assert slurm.told({**ENTRY, "comment": "by hand", "time_limit": 90}).spec.time_limit == 5400


def pretend(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_ours_are_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    pretend(ours, "sbatch", "# Tilework: over the local queue\nexit 1")
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{ours}:/no/such/folder")
    assert not slurm.found()
    pretend(theirs, "sbatch", "echo '12;cluster'")
    monkeypatch.setenv("PATH", f"{ours}:{theirs}")
    assert slurm.found()
    assert SlurmQueue(tmp_path / "jobs").submit(Spec(command=("true",))).id == "12"


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("sleep 10", "slurm-silent"),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", "slurm-silent"),
        ("""echo '{"jobs": [], "errors": [{"description": "Failed while looking for jobs"}]}'""", "slurm-silent"),
        ("echo 'squeue: unrecognized option --json' >&2; exit 1", "slurm-answer"),
        ("echo '{'", "slurm-answer"),
        ("echo '{}'", "slurm-answer"),
        ("echo '[]'", "slurm-answer"),
        (None, "slurm-missing"),
    ],
)
def test_answers_that_are_none(text: str | None, id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if text:
        pretend(tmp_path, "squeue", text.replace("sleep", "exec /bin/sleep"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TILEWORK_SLURM_TIMEOUT", "0.3" if text and "sleep" in text else "20")
    with pytest.raises(MachineError) as caught:
        SlurmQueue(tmp_path).jobs()
    assert caught.value.id == id


def test_a_limit_that_is_no_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(tmp_path, "squeue", "echo")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TILEWORK_SLURM_TIMEOUT", "soon")
    with pytest.raises(UserError) as caught:
        SlurmQueue(tmp_path).jobs()
    assert caught.value.id == "slurm-timeout"


SHOWN = (
    "JobId=5 JobName=x TRES=cpu=4 JOB_GRES=rdu:4 Nodes=tw1 CPU_IDs=0-1 Mem=0 GRES=other:1(IDX:7),rdu:2(IDX:0,3),rdu:big:1(IDX:5)"
    " Nodes=tw[2-4] CPU_IDs=0 Mem=100 GRES=rdu:1(IDX:6)  Nodes=tw5 CPU_IDs=0 Mem=0 GRES= MinCPUsNode=1"
)


@pytest.mark.parametrize(
    ("node", "devices"), [("tw1", "0,3,5"), ("tw2", "6"), ("tw4", "6"), ("tw5", ""), ("tw9", ""), ("tw", ""), ("", "")]
)
def test_the_task_prolog(node: str, devices: str, tmp_path: Path) -> None:
    hosts = 'case "$3" in "tw[2-4]") printf "tw2\\ntw3\\ntw4\\n";; *) echo "$3";; esac'
    pretend(tmp_path, "scontrol", f'if [ "$2" = hostnames ]; then {hosts}; else echo "{SHOWN}"; fi')
    done = tell(prolog.script("rdu"), tmp_path, node)
    assert done == (f"export TILEWORK_TILES=job:chip:{devices}\nexport TILEWORK_GRES_DEVICES={devices}\n" if devices else "")


def tell(text: str, tmp_path: Path, node: str) -> str:
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5", "SLURMD_NODENAME": node}
    done = subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_task_prolog_never_fails(tmp_path: Path) -> None:
    pretend(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Unable to contact' >&2; exit 1")
    assert tell(prolog.script("rdu"), tmp_path, "tw1") == ""
    with pytest.raises(UserError):
        prolog.script("rdu; rm")
