"""Several pieces of pure Python work at once: in this process and in copies of it.

Inductor is Python, so a second core only helps in a second process; a copy (fork) has everything imported and traced
already. A copy is only made where no other Python thread runs, whose locks it would inherit in any state; one that waits (a
progress bar's, say) holds nothing that a copy needs. What a copy fails to deliver, for whatever reason, is done here, so errors
appear as if there were no copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from ..process import alone

PATIENCE = 30.0  # seconds that a copy may take longer than everything here took, before it is given up


_PR_SET_PDEATHSIG = 1  # a copy ends with its original, however that ends


@dataclass(frozen=True)
class Job:
    name: str
    weight: int  # how long it takes, in any unit
    work: Callable[[], str]


def num_workers() -> int:
    """TILEWORK_JOBS, or as many as there are cores; 1 where other threads run."""
    asked = os.environ.get("TILEWORK_JOBS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if alone() else 1


@contextlib.contextmanager
def started(jobs: list[Job], num: int):  # type: ignore[no-untyped-def]
    """Copies begin at once; the body of the `with` gets a function that works here as well until all is done, and calls
    its argument with (name, result) for each job as it is done, from any thread. The heaviest jobs are begun first."""
    jobs = sorted(jobs, key=lambda j: -j.weight)
    tickets, office = os.pipe()  # two bytes a job: whoever reads them has the job, and the end of the file means no more
    os.write(office, b"".join(i.to_bytes(2, "little") for i in range(len(jobs))))
    os.close(office)
    copies = [_Copy(jobs, tickets) for _ in range(min(num, len(jobs)) - 1)]

    def finish(done: Callable[[str, str], None]) -> None:
        begin = time.monotonic()
        readers = [threading.Thread(target=copy.read, args=(done,)) for copy in copies]
        for reader in readers:
            reader.start()
        own = set()
        for job in _taken(jobs, tickets):
            own.add(job.name)
            done(job.name, job.work())
        patience = PATIENCE + time.monotonic() - begin
        for copy, reader in zip(copies, readers, strict=True):
            reader.join(patience)
            copy.stop()
            reader.join()
        for job in jobs:
            if job.name not in own.union(*(copy.delivered for copy in copies)):
                done(job.name, job.work())

    try:
        yield finish
    finally:
        os.close(tickets)
        for copy in copies:
            copy.stop()


def _taken(jobs: list[Job], tickets: int) -> Iterator[Job]:
    while ticket := os.read(tickets, 2):
        yield jobs[int.from_bytes(ticket, "little")]


class _Copy:
    """A forked process that takes jobs and sends back each result."""

    def __init__(self, jobs: list[Job], tickets: int) -> None:
        self.delivered: set[str] = set()
        context = multiprocessing.get_context("fork")
        self.results, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(os.getpid(), jobs, tickets, sender), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns where torch's own, idle threads exist
            self.process.start()
        sender.close()

    def read(self, done: Callable[[str, str], None]) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                name, result = self.results.recv()
                try:
                    done(name, result)
                except Exception:  # interrupted meanwhile; else the job is done again, and fails where it is seen
                    return
                self.delivered.add(name)

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _serve(original: int, jobs: list[Job], tickets: int, results: Connection) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != original:  # it ended before this took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the original, which then stops its copies
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # the threads of the original do not exist here
    for job in _taken(jobs, tickets):
        try:
            results.send((job.name, job.work()))
        except Exception:  # the original does it again and says what is wrong
            break
    results.close()
    os._exit(0)  # without the original's exit handlers
