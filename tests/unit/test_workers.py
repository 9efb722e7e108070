"""Work in copies of the process: every result arrives, whatever becomes of a copy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tilework.compiler import workers
from tilework.compiler.workers import Job, num_workers, started


def results_of(jobs: list[Job], num: int) -> dict[str, str]:
    found: dict[str, str] = {}
    with started(jobs, num) as finish:
        finish(found.__setitem__)
    return found


def here(pid: int, then: Callable[[], str], otherwise: Callable[[], str]) -> Callable[[], str]:
    return lambda: then() if os.getpid() == pid else otherwise()


@pytest.mark.parametrize("num", [1, 2, 3, 20])
def test_every_job_is_done_once(num: int) -> None:
    jobs = [Job(f"j{i}", i, lambda i=i: f"{i} {os.getpid()}") for i in range(7)]  # type: ignore[misc]
    found = results_of(jobs, num)
    assert {k: v.split()[0] for k, v in found.items()} == {f"j{i}": str(i) for i in range(7)}
    if num == 1:
        assert {v.split()[1] for v in found.values()} == {str(os.getpid())}


def test_copies_do_take_part() -> None:
    def work() -> str:
        time.sleep(0.2)
        return str(os.getpid())

    assert len(set(results_of([Job(str(i), 1, work) for i in range(6)], 3).values())) == 3


def test_what_a_dead_copy_owes_is_done_here() -> None:
    me = os.getpid()

    def die() -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def slow() -> str:
        time.sleep(0.1)
        return "here"

    jobs = [Job(str(i), 1, here(me, slow, die)) for i in range(5)]
    assert results_of(jobs, 3) == dict.fromkeys("01234", "here")


def test_an_error_in_a_copy_is_raised_here() -> None:
    def fail() -> str:
        time.sleep(0.1)
        raise ValueError("no such operator")

    with pytest.raises(ValueError, match="no such operator"):
        results_of([Job(str(i), 1, fail) for i in range(4)], 2)


def test_a_copy_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.3)
    me = os.getpid()

    def hang() -> str:
        time.sleep(3600)  # far beyond the time that a test may take
        return ""

    def slow() -> str:
        time.sleep(0.1)
        return "here"

    assert results_of([Job(str(i), 1, here(me, slow, hang)) for i in range(3)], 2) == dict.fromkeys("012", "here")


def test_no_copy_is_left_when_the_body_fails() -> None:
    me = os.getpid()
    jobs = [Job(str(i), 1, here(me, lambda: "", lambda: time.sleep(60) or "")) for i in range(3)]
    with pytest.raises(KeyboardInterrupt), started(jobs, 3):
        raise KeyboardInterrupt
    import multiprocessing

    assert multiprocessing.active_children() == []


def test_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_JOBS", "3")
    assert num_workers() == 3
    monkeypatch.setenv("TILEWORK_JOBS", "many")
    assert num_workers() >= 1
