"""The machine's own queue, of one user: a book (book.py), its keeper (keeper.py), and a supervisor for each job."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import time
from pathlib import Path

import msgspec

from ..errors import UserError
from ..tiles import alive
from ..tiles.asks import capped, parse
from ..tiles.site import read_site
from ..tiles.topology import HOST, detect
from .book import Book, Supervised, boot, state_folder
from .keeper import poke
from .spec import SHARED, Job, Spec
from .supervisor import Supervisor, below


class LocalQueue:
    kind = "local"

    def __init__(self, folder: Path | None = None) -> None:
        self.book = Book(folder or state_folder())

    def submit(self, spec: Spec) -> Job:
        id = self.book.add(self._checked(spec))
        poke(self.book.folder)
        return self.job(str(id))

    def attached(self, spec: Spec) -> tuple[int, Supervisor]:
        """A job that this very process will run: its id, and who runs it. Its end is this process's end."""
        own = os.getpid()
        id = self.book.add(self._checked(spec), pid=own, start=alive.start_time(own))
        poke(self.book.folder)  # somebody must notice if this process is killed
        return id, Supervisor(self.book, id, attached=True)

    def _checked(self, spec: Spec) -> Spec:
        if spec.command and not spec.command[0]:
            raise UserError("job-spec", "the command has no name", found=repr(spec.command))
        if bool(spec.command) == bool(spec.script):
            raise UserError("job-spec", "a job is a command or a script", found="both" if spec.command else "neither")
        if spec.script and not spec.script.startswith("#!"):
            raise UserError("job-script", "this does not look like a batch script", found=spec.script.splitlines()[0][:60],
                            expected="a first line that begins with #! and the path of an interpreter")  # fmt: skip
        if any(not word.removeprefix("any:").isdecimal() for word in spec.after):
            raise UserError("job-after", "jobs to wait for are given by their numbers", found=", ".join(spec.after))
        for word in spec.after:
            self.job(word.removeprefix("any:"))
        environment = spec.environment if spec.environment is not None else dict(os.environ)
        _fits(spec.tiles, environment.get("TILEWORK_PLATFORM"))
        folder = spec.folder or os.getcwd()
        for place in (folder, *(os.path.dirname(os.path.join(folder, p)) for p in (spec.output, spec.error) if p)):
            if "%" not in place and not os.path.isdir(place):
                raise UserError("job-spec", "the job's folder, or that of its output, is not there", found=place)
        os.umask(mask := os.umask(0o077))
        return msgspec.structs.replace(spec, environment=environment, folder=folder, umask=mask if spec.umask < 0 else spec.umask)

    def jobs(self, *, ended: bool = True, limit: int | None = None, labels: dict[str, str] | None = None) -> list[Job]:
        user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname()
        found = self.book.jobs(ended=ended, limit=limit if not labels else None)
        if labels:
            found = [j for j in found if labels.items() <= j.spec.labels.items()][-(limit or 0) :]
        for job in found:
            job.user, job.nodes = user, host if job.state == "RUNNING" else ""
        return found

    def job(self, id: str) -> Job:
        job = self.book.job(id)
        job.user = pwd.getpwuid(os.getuid()).pw_name
        job.nodes = socket.gethostname() if job.started else ""
        return job

    def cancel(self, id: str, number: int | None = None) -> None:
        job = self.job(id)
        if job.is_over:
            raise UserError("job-over", f"job {id} has ended already", found=job.state)
        at = self._at(int(id))
        if number is not None:
            if at is None or job.state != "RUNNING":
                raise UserError("job-over", f"job {id} does not run", found=job.state)
            for pid in below(at.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            return
        self.book.ask_to_end(int(id))
        at = self._at(int(id))
        if at is not None:
            with contextlib.suppress(OSError):
                os.kill(at.pid, signal.SIGTERM)
        elif self.book.end(int(id), "CANCELLED", was=("PENDING",), reason="cancelled while it waited"):
            return
        poke(self.book.folder)

    def _at(self, id: int) -> Supervised | None:
        """The live process that is at a job."""
        for one in self.book.supervised():
            if one.id == id and one.boot == boot() and alive.start_time(one.pid) == one.start:
                return one
        return None

    def label(self, id: str, labels: dict[str, str | None]) -> Job:
        job = self.job(id)
        now = {k: v for k, v in {**job.spec.labels, **labels}.items() if v is not None}
        self.book.set_labels(int(id), now)
        return self.job(id)

    def wait(self, ids: list[str], timeout: float | None = None) -> list[Job]:
        until = None if timeout is None else time.monotonic() + timeout
        pause, poked = 0.02, time.monotonic()
        while True:
            found = [self.job(id) for id in ids]
            left = [j.id for j in found if not j.is_over]
            if not left:
                return found
            if until is not None and time.monotonic() > until:
                raise UserError("job-wait", f"job {', '.join(left)} has not ended in time", found=found[0].state)
            if time.monotonic() - poked > 2.0:  # whoever kept the queue may have been killed
                poke(self.book.folder)
                poked = time.monotonic()
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)


def _fits(tiles: str, platform: str | None) -> None:
    """Refused now, rather than after it has waited: what this machine does not have."""
    if tiles in ("", SHARED):
        return
    site = read_site()
    node = detect(platform or site.platform or HOST, site)
    ask = parse(tiles, node)
    _, note = capped(ask, node)
    if note and not (node.platform == HOST and ask.chips is not None):  # whole chips are what a program was written for
        raise UserError("job-size", "this machine has fewer tiles than the job asks for", found=f"{ask}",
                        expected=f"at most {len(node.tiles)} tiles ({len(node.chips)} chips) of platform {node.platform}",
                        fix="ask for fewer: --tiles")  # fmt: skip
