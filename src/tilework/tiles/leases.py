"""What the daemon knows of one lease, or of one session that shares the machine: its record, its page, whether it hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from . import alive, jobs
from .messages import printable
from .records import Record
from .usage import Usage


class Lease:
    def __init__(self, record: Record, page: int | None) -> None:
        self.record, self.usage = record, Usage(page)
        self.hung = False
        self.empty_since = record.since  # of a job: since when none of its processes is there, wall clock
        self.pidfd = -1  # readable when the process has ended
        if record.kind in ("exclusive", "member") or (record.kind == "job" and page is not None):
            with contextlib.suppress(OSError):  # it has ended already: the next regular check sees that
                self.pidfd = os.pidfd_open(record.pid)

    @classmethod
    def found(cls, record: Record) -> Lease | None:
        """The live lease of a record that an earlier daemon wrote; None where its process, or its job, is gone."""
        page, until = None, time.monotonic() + 1.0
        if record.kind != "job" or not record.cgroup:
            page = alive.open_memory(record.pid, record.uid, record.page, record.inode)
            while page is None and alive.is_ending(record.pid, record.start) and time.monotonic() < until:
                time.sleep(0.001)
            if page is None:
                return None
        lease = cls(record, page)
        if lease.alive():
            return lease
        lease.close()
        return None

    def alive(self) -> bool:
        """A job of Slurm's lives as long as a process is in its cgroup, anything else as long as its process has its page
        locked."""
        if self.usage.fd is None:
            return jobs.populated(self.record.cgroup)
        return alive.holder(self.usage.fd) == self.record.pid

    def look_for_hang(self, after: float) -> bool:
        """True where it has just begun to hang. The process is asked for its stack then, by a signal that others ignore."""
        hung = self.usage.stuck_for() >= after
        began, self.hung = hung and not self.hung, hung
        if began:
            with contextlib.suppress(OSError):  # not ours to signal: no stack then
                os.kill(self.record.pid, signal.SIGURG)
        return began

    def stack(self) -> str:
        """What its faulthandler wrote."""
        fd = alive.open_memory(self.record.pid, self.record.uid, self.record.stack)
        if fd is None:
            return ""
        try:
            text = os.pread(fd, 4000, max(0, os.fstat(fd).st_size - 4000)).decode("utf-8", "replace")
            return "\n".join(printable(line, 200) for line in text.splitlines())
        except OSError:
            return ""
        finally:
            os.close(fd)

    def close(self) -> None:
        self.usage.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
