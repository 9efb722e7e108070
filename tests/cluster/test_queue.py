"""The machine's own queue: every job ends once, in a true state, whoever is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launchers import FULL

from tilework.errors import MachineError, UserError
from tilework.jobs.book import Book, state_folder
from tilework.jobs.keeper import LOCK, end_all, poke
from tilework.jobs.local import LocalQueue
from tilework.jobs.spec import Job, Spec, seconds_of, signal_of
from tilework.jobs.supervisor import filled
from tilework.tiles import alive, client


def keeper_of(folder: Path) -> int | None:
    with contextlib.suppress(OSError), open(folder / LOCK, "rb") as f:
        return alive.holder(f.fileno())
    return None


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """For what other processes are about to do; the time is only there so that a failure ends."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalQueue]:
    (tmp_path / "run").mkdir(mode=0o700)
    for name, value in (("TILEWORK_JOBS", tmp_path / "jobs"), ("TILEWORK_RUN", tmp_path / "run"), ("TILEWORK_QUEUE", "local"),
                        ("TILEWORK_PLATFORM", "SN10-8"), ("TILEWORK_KILL_WAIT", "1")):  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    made = LocalQueue()
    yield made
    for job in made.jobs(ended=False):
        with contextlib.suppress(UserError):
            made.cancel(job.id)
    with contextlib.suppress(UserError):
        made.wait([j.id for j in made.jobs(ended=False)], 30)
    for pid in filter(
        None, (keeper_of(made.book.folder), client.view(start=False).daemon.pid if client.answers(tmp_path / "run") else 0)
    ):
        os.kill(pid, signal.SIGKILL)


def sh(queue: LocalQueue, text: str, **spec: object) -> Job:
    return queue.submit(Spec(command=("/bin/sh", "-c", text), **{"tiles": "1", **spec}))  # type: ignore[arg-type]


def ended(queue: LocalQueue, *jobs: Job) -> list[Job]:
    return queue.wait([j.id for j in jobs], 120)


def test_a_job(queue: LocalQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "blue")
    job = sh(queue, 'echo "$COLOUR $PWD $TILEWORK_TILES $SLURM_JOB_ID"; echo wrong >&2; exit 3', labels={"a": "b"}, name="first")
    monkeypatch.setenv("COLOUR", "red")  # later: the job has its environment
    (job,) = ended(queue, job)
    assert (job.state, job.exit_code, job.reason, job.runs, job.tiles) == ("FAILED", 3, "exit code 3", 1, "0")
    assert Path(job.output).read_text() == f"blue {tmp_path} job {job.id}\n" and Path(job.error).read_text() == "wrong\n"
    assert job.submitted <= (job.started or 0) <= (job.ended or 0) and job.spec.labels == {"a": "b"} and job.name == "first"
    assert queue.label(job.id, {"a": None, "c": "d"}).spec.labels == {"c": "d"}
    assert [j.id for j in queue.jobs(labels={"c": "d"})] == [job.id] and queue.jobs(labels={"c": "x"}) == []
    assert queue.book.environment(int(job.id)) == {}  # it is not kept longer than it is needed


def test_a_job_that_another_job_submits(queue: LocalQueue, tmp_path: Path) -> None:
    """It is nobody's rank, and on nobody's tiles but its own."""
    inner = "echo $SLURM_PROCID ${TILEWORK_RANK-none} ${TILEWORK_TILES-none} $TILEWORK_JOB"
    words = f"{sys.executable} -m tilework job submit --tiles shared --wait --output inner.log -- /bin/sh -c '{inner}'"
    (job,) = ended(queue, sh(queue, words, environment={**os.environ, "SLURM_PROCID": "3", "TILEWORK_RANK": "3"}))
    assert job.state == "COMPLETED" and (tmp_path / "inner.log").read_text() == "0 none none 2\n"


def test_ends(queue: LocalQueue, tmp_path: Path) -> None:
    """Well, by a signal, by the time limit, by somebody; with nobody to run, in no folder."""
    good, killed, slow = sh(queue, "true"), sh(queue, "kill -SEGV $$"), sh(queue, "sleep 100", time_limit=0.2)
    lost = queue.submit(Spec(command=("/no/such/command",), tiles="1"))
    (gone := tmp_path / "gone").mkdir()
    until(lambda: queue.job(good.id).is_over)
    hold = sh(queue, "sleep 0.3", tiles="chips:8")
    nowhere = queue.submit(Spec(command=("true",), tiles="1", folder=str(gone), after=(f"any:{hold.id}",)))
    gone.rmdir()
    stubborn = sh(queue, "trap '' TERM; sleep 100 & wait; sleep 100")
    until(lambda: queue.job(stubborn.id).state == "RUNNING")
    time.sleep(0.1)
    queue.cancel(stubborn.id)
    found = ended(queue, good, killed, slow, lost, nowhere, stubborn)
    assert [(j.state, j.exit_code) for j in found] == [
        ("COMPLETED", 0), ("FAILED", 139), ("TIMEOUT", 143), ("FAILED", 127), ("FAILED", 127), ("CANCELLED", 137)
    ]  # fmt: skip
    assert "/no/such/command" in found[3].reason and str(gone) in found[4].reason
    with pytest.raises(UserError, match="has ended already"):
        queue.cancel(good.id)
    with pytest.raises(UserError, match="there is no job 99"):
        queue.job("99")
    assert client.view().leases == []


def test_files_that_it_makes_are_as_its_users(queue: LocalQueue, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        (job,) = ended(queue, sh(queue, "touch made"))
    finally:
        os.umask(before)
    assert job.state == "COMPLETED" and (tmp_path / "made").stat().st_mode & 0o777 == 0o640


def test_a_log_that_grows(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last part is kept, and shown."""
    text = "yes 0123456789abcde | head -c 100000000; echo last >&2; sleep 2; echo END"
    (job,) = ended(queue, sh(queue, text))
    kept = os.path.getsize(f"{job.output}.1")
    assert kept == 64 << 20 and os.path.getsize(job.output) < 64 << 20
    said = subprocess.run([sys.executable, "-m", "tilework", "job", "logs", job.id], capture_output=True).stdout
    assert len(said) == kept + os.path.getsize(job.output) and said.endswith(b"abcde\nEND\n")


def test_order_and_backfill(queue: LocalQueue) -> None:
    """32 tiles. What the first in line could not use goes to a later one; nobody else passes it."""
    first, large, small, other = (
        sh(queue, f"sleep {t}", tiles=n) for t, n in (("0.6", "20"), ("0.1", "chips:8"), ("0.1", "2"), ("0", "2"))
    )
    found = ended(queue, first, large, small, other)
    assert all(j.state == "COMPLETED" for j in found)
    began = [j.started or 0 for j in found]
    assert began[0] < began[1] < min(began[2], began[3])  # all tiles are of use to the second, so nobody passes it


def test_after(queue: LocalQueue) -> None:
    bad = sh(queue, "sleep 0.2; exit 1")
    then, anyway, later = (sh(queue, "true", after=(a,)) for a in (bad.id, f"any:{bad.id}", bad.id))
    after_that = sh(queue, "true", after=(anyway.id,))
    found = ended(queue, bad, then, anyway, later, after_that)
    assert [j.state for j in found] == ["FAILED", "CANCELLED", "COMPLETED", "CANCELLED", "COMPLETED"]
    assert f"job {bad.id}, which had to end well before it, was FAILED" in found[1].reason
    assert (found[2].started or 0) >= (found[0].ended or 0)
    with pytest.raises(UserError, match="there is no job 77"):
        sh(queue, "true", after=("77",))


def test_what_can_never_fit_is_refused(queue: LocalQueue) -> None:
    with pytest.raises(UserError, match="fewer tiles than the job asks for") as found:
        sh(queue, "true", tiles="33")
    assert "32 tiles (8 chips) of platform SN10-8" in str(found.value)
    with pytest.raises(UserError, match="chips"):
        sh(queue, "true", tiles="chips:9")
    assert queue.jobs() == []


def test_nothing_of_a_job_outlives_it(queue: LocalQueue, tmp_path: Path) -> None:
    """Processes that left its session, too."""
    job = sh(
        queue,
        "setsid sh -c 'setsid sleep 1000 & echo $! > pid; sleep 1000' >/dev/null 2>&1 & while ! [ -s pid ]; do sleep 0.01; done",
    )
    (job,) = ended(queue, job)
    assert job.state == "COMPLETED"
    until(lambda: alive.start_time(int((tmp_path / "pid").read_text())) is None)


def test_a_warning_before_the_end(queue: LocalQueue, tmp_path: Path) -> None:
    """The program saves, and is put into the queue again: the second time it has less to do."""
    text = "trap 'touch saved; exit 9' USR1; if [ -f saved ]; then exit 0; fi; while true; do sleep 0.05; done"
    job = sh(queue, text, time_limit=30.0, signal=(signal.SIGUSR1, 29.8))
    (job,) = ended(queue, job)
    assert (job.state, job.exit_code) == ("FAILED", 9) and (tmp_path / "saved").exists()
    (tmp_path / "saved").unlink()
    again = sh(queue, "if [ -f saved ]; then exit 0; fi; touch saved; sleep 100", time_limit=0.3, requeue=True)
    (again,) = ended(queue, again)
    assert (again.state, again.runs) == ("COMPLETED", 2)


def test_a_supervisor_that_is_killed(queue: LocalQueue, tmp_path: Path) -> None:
    job, again = (
        sh(queue, "echo $$ > pid; sleep 1000 & sleep 1000"),
        sh(queue, "if [ -f twice ]; then exit 0; fi; touch twice; sleep 100", requeue=True),
    )
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() and (tmp_path / "twice").exists())
    for one in queue.book.supervised():
        os.kill(one.pid, signal.SIGKILL)
    job, again = ended(queue, job, again)
    assert (job.state, job.exit_code, job.reason) == ("LOST", None, "its supervisor was killed")
    assert (again.state, again.runs) == ("COMPLETED", 2)
    assert alive.start_time(int((tmp_path / "pid").read_text())) is None
    assert client.view().leases == []


def test_another_boot(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that ran when the machine went down are lost, those that waited go on."""
    from tilework.jobs import book

    with monkeypatch.context() as patch:
        patch.setattr(book, "boot", lambda: "another")
        ran, waited = (
            queue.book.add(Spec(command=("true",), tiles="1", environment=dict(os.environ), folder="/")) for _ in range(2)
        )
        queue.book.supervise(waited, os.getpid(), 1)
        assert queue.book.begin(ran, os.getpid(), 1, tiles="0", output="", error="")
    found = queue.wait([str(ran), str(waited)], 60)
    assert [(j.state, j.reason) for j in found] == [("LOST", "the machine was restarted"), ("COMPLETED", "")]


def test_many_jobs_while_the_queue_is_killed(queue: LocalQueue, tmp_path: Path) -> None:
    """Each writes one line: nothing is lost, nothing runs twice, no tile is left."""
    count = 500 if FULL else 80
    jobs = [sh(queue, f"echo {i} >> done; exit {i % 3}") for i in range(count)]
    kills = 0
    while kills < 2:
        pid = keeper_of(queue.book.folder)
        over = len(queue.jobs()) - len(queue.jobs(ended=False))
        if over == count:  # a quick machine
            break
        if pid is not None and over > count // 4 * (kills + 1):
            os.kill(pid, signal.SIGKILL)
            kills += 1
            while keeper_of(queue.book.folder) in (None, pid):  # a supervisor starts the next one, or a command of the user's
                poke(queue.book.folder)
                time.sleep(0.2)
        time.sleep(0.005)
    found = ended(queue, *jobs)
    assert kills
    assert [(j.state, j.exit_code, j.runs) for j in found] == [
        ("COMPLETED" if i % 3 == 0 else "FAILED", i % 3, 1) for i in range(count)
    ]  # fmt: skip
    assert sorted(map(int, (tmp_path / "done").read_text().split())) == list(range(count))
    until(lambda: client.view().leases == [])


def test_a_full_disk(queue: LocalQueue, tmp_path: Path) -> None:
    """Nothing can be written down: it is said, and what runs is written down when there is room again."""
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True).returncode
    ):
        pytest.skip("no small file system can be mounted here")
    try:
        os.environ["TILEWORK_JOBS"] = str(small / "jobs")
        full = LocalQueue()
        job = sh(full, "while ! [ -f go ]; do sleep 0.02; done; exit 6")
        until(lambda: full.job(job.id).state == "RUNNING")
        with contextlib.suppress(OSError), open(small / "filler", "wb") as f:
            while True:
                f.write(b"x" * 4096)
                f.flush()
        with pytest.raises(MachineError, match="book cannot be read or written"):
            for _ in range(50):
                sh(full, "true", name="x" * 5000)
        (tmp_path / "go").touch()
        time.sleep(0.3)
        (small / "filler").unlink()
        (job,) = ended(full, job)
        assert (job.state, job.exit_code) == ("FAILED", 6)
        os.kill(keeper_of(full.book.folder) or 0, signal.SIGKILL)
    finally:
        os.environ["TILEWORK_JOBS"] = str(tmp_path / "jobs")
        subprocess.run(["umount", "-l", str(small)])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_two_users(queue: LocalQueue, tmp_path: Path) -> None:
    """Another user can read neither environment nor logs, and cancel nothing. (Tiles of others: tests/tiles.)"""
    job = sh(queue, "echo secret; sleep 1000", environment={**os.environ, "PASSWORD": "secret"})
    until(lambda: queue.job(job.id).state == "RUNNING")
    at = queue.book.supervised()[0]
    for folder in (tmp_path, *tmp_path.parents):
        with contextlib.suppress(OSError):
            folder.chmod(folder.stat().st_mode | 0o055)
    other = f"""
import os
os.setgid(65534); os.setuid(65534)
for path in ({str(queue.book.folder / "book.db")!r}, {queue.job(job.id).output!r}, "/proc/{at.pid}/environ"):
    try:
        open(path, "rb").read()
        print("read", path)
    except OSError:
        pass
try:
    os.kill({at.pid}, 15)
    print("killed")
except OSError:
    pass
"""
    done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "", done
    assert queue.job(job.id).state == "RUNNING"
    queue.book.folder.chmod(0o755)
    with pytest.raises(UserError, match="must be yours alone"):
        Book(queue.book.folder)
    queue.book.folder.chmod(0o700)


def test_commands(queue: LocalQueue, tmp_path: Path) -> None:
    def cli(*words: str, code: int = 0) -> str:
        done = subprocess.run([sys.executable, "-m", "tilework", "job", *words], capture_output=True, text=True)
        assert done.returncode == code, done
        return done.stdout + done.stderr

    assert (
        cli("submit", "--tiles", "1", "--wait", "--", "sh", "-c", "exit 5", code=5)
        == "job 1\njob 1: FAILED, exit code 5 (exit code 5)\n"
    )
    (tmp_path / "script.sh").write_text("#!/bin/sh\n# a comment\necho one $1\necho two\n")
    made = json.loads(cli("submit", "--json", "--label", "kind=script", "--script", "script.sh", "argument"))
    assert made["id"] == "2" and made["spec"]["labels"] == {"kind": "script"} and "environment" not in made["spec"]
    (tmp_path / "script.sh").write_text("#!/bin/sh\nexit 1\n")  # later: the job has the text of then
    assert cli("wait", "2") == "job 2: COMPLETED, exit code 0\n" and cli("logs", "-f", "2") == "one argument\ntwo\n"
    shown = cli("show", "2")
    for words in (
        "state       COMPLETED",
        "exit code   0",
        "labels      kind=script",
        "  # a comment",
        "  two",
        "tiles       0-3",
    ):
        assert words in shown, shown
    assert cli("list") == "JOB STATE NAME TILES WAITED RAN EXIT LABELS REASON\n" and "kind=script" in cli("list", "--all")
    assert [j["id"] for j in json.loads(cli("list", "--all", "--json", "--label", "kind=script"))] == ["2"]
    assert "kind=other more=x" in cli("label", "2", "kind=other", "more=x") and "no labels" in cli("label", "2", "kind-", "more-")
    running = json.loads(cli("submit", "--json", "--tiles", "1", "--name", "line\n\x1b[31m", "--", "sleep", "100"))["id"]
    assert "line??[31m" in cli("list")  # nothing for a terminal to obey
    assert "has ended already" in cli("cancel", "1", running, code=2)  # and the other is cancelled all the same
    assert queue.wait([running], 60)[0].state == "CANCELLED"
    assert "is not there" in cli("submit", "--folder", "/no/such", "true", code=2)
    assert "there is no job 9" in cli("show", "9", code=2) and "cannot be read" in cli("submit", "--script", "none.sh", code=2)
    assert "is no time" in cli("submit", "--time", "soon", "true", code=2)
    assert cli("submit", "--dry-run", "--", "echo", "x") == "echo x\n"


def test_ten_thousand_jobs_are_listed(queue: LocalQueue) -> None:
    """That there are many of them is no reason to read each one's environment."""
    with queue.book.change() as db:
        row = ('{"command":["true"],"name":"n"}', "{}", 1.0, 2.0, 3.0)
        db.executemany(
            "insert into jobs (state, spec, labels, submitted, started, ended) values ('COMPLETED',?,?,?,?,?)", [row] * 10_000
        )
    assert len(queue.jobs()) == 10_000 and queue.jobs(limit=3)[-1].id == "10000" and queue.jobs(ended=False) == []


def test_times_and_names() -> None:
    for text, seconds in (("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400), ("30", 1800), ("1:30", 90), ("1:00:00", 3600),
                          ("1-0", 86400), ("1-2:30", 95400), ("0-00:00:05", 5)):  # fmt: skip
        assert seconds_of(text) == seconds, text
    for text in ("", "x", "1:2:3:4", "-1", "1-2-3"):
        with pytest.raises(UserError):
            seconds_of(text)
    assert signal_of("B:USR1@30") == (signal.SIGUSR1, 30.0) and signal_of("15") == (15, 60.0)
    with pytest.raises(UserError):
        signal_of("NOTHING")
    assert filled("slurm-%j_%x-%3j.%%%q", 7, Spec(name="n")) == "slurm-7_n-007.%%q"


def test_the_folder_is_the_users_own(queue: LocalQueue) -> None:
    assert state_folder().stat().st_mode & 0o077 == 0 and (state_folder() / "book.db").stat().st_mode & 0o077 == 0
    end_all("nobody's mark")
