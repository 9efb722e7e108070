"""The ranks of one run, connected: torch.distributed under whatever launched them, and which of them share a machine.

group = tilework.parallel.start()        # under mpirun, srun, torchrun or `tilework launch`; one rank where nobody launched any
session = tilework.load("lenet.pef", group=group)
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MachineError, UserError
from . import algorithms, rendezvous
from .environment import Launched, launched, problems

TIMEOUT = 300.0  # seconds that a rank waits for another; TILEWORK_TIMEOUT
_QUICK = 10.0
_FAILED = "tilework/failed"


class RanksError(MachineError):
    """Another rank failed, or did not come: this one is not at fault."""


def _timeout(given: float | None) -> float:
    if given is not None:
        return given
    text = os.environ.get("TILEWORK_TIMEOUT", "")
    try:
        return float(text) if text else TIMEOUT
    except ValueError:
        raise UserError("ranks-timeout", "TILEWORK_TIMEOUT is not a number of seconds", found=text) from None


class Group:
    """Which rank this is, who else there is, and what they can do together."""

    def __init__(self, here: Launched, store: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout, self.launcher = here.rank, here.size, timeout, here.launcher
        self._store = store
        self.doing = ""  # the collective that this rank is in
        self.steps = 0
        self._closed = self.failed = self.stopped = False
        machines = self._told("who", {"machine": _machine(), "pid": os.getpid(), "host": socket.gethostname()})
        self.pids = [m["pid"] for m in machines]
        self.hosts = [m["host"] for m in machines]
        places: dict[str, list[int]] = {}
        for rank, m in enumerate(machines):
            places.setdefault(m["machine"], []).append(rank)
        self.nodes = list(places.values())  # ranks by machine
        self.node = next(i for i, ranks in enumerate(self.nodes) if self.rank in ranks)
        self.local_ranks = self.nodes[self.node]
        self.local_rank = self.local_ranks.index(self.rank)

    @property
    def is_even(self) -> bool:
        """Whether every machine has as many ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @property
    def peers(self) -> list[int]:
        """The ranks with this one's place on each machine."""
        return [ranks[self.local_rank] for ranks in self.nodes]

    def take_cores(self) -> None:
        """Ranks of one machine that were given the same cores divide them, and use as many threads. Where the launcher has given
        each its own, nothing changes; TILEWORK_PIN=0 turns it off."""
        if self._has_cores:
            return
        self._has_cores = True
        mine = sorted(os.sched_getaffinity(0))
        masks = self.tell(mine)  # all ranks speak, also those that are alone on their machine
        pinned = os.environ.get("TILEWORK_PIN", "1") != "0"
        if not pinned or len(self.local_ranks) == 1 or any(masks[r] != mine for r in self.local_ranks):
            return
        share = own_share(mine, self.local_rank, len(self.local_ranks))
        os.sched_setaffinity(0, share)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(len(share))

    _has_cores = False

    # ---- together ----

    def all_reduce(self, flat: Tensor, algorithm: algorithms.Algorithm = "ring") -> None:
        """The sum over all ranks, in place; `flat` has one dimension."""
        if self.size == 1:
            return
        with self.during("all-reduce"):
            if algorithm == "hierarchical" and self.is_even:
                algorithms.hierarchical(flat, self.nodes, self.rank)
            else:
                algorithms.ring(flat, range(self.size), self.rank)

    def sum_over(self, flat: Tensor, ranks: Sequence[int]) -> None:
        """The sum over some ranks, in place, along a ring."""
        with self.during("reduce (between the machines)"):
            algorithms.ring(flat, ranks, self.rank)

    def from_rank(self, flat: Tensor, rank: int, what: str = "broadcast") -> None:
        if self.size > 1:
            with self.during(what):
                dist.broadcast(flat, rank)

    def barrier(self) -> None:
        if self.size > 1:
            with self.during("barrier"):
                dist.barrier()

    def tell(self, value: Any) -> list[Any]:
        """Everybody's value (anything that JSON can hold), by rank."""
        if self.size == 1:
            return [value]
        with self.during("exchange of facts"):
            return self._told(f"told/{self._count()}", value)

    _counted = 0

    def _count(self) -> int:
        self._counted += 1
        return self._counted

    def _told(self, key: str, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        self._store.set(f"tilework/{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"tilework/{key}/{r}")) for r in range(self.size)]

    # ---- what went wrong ----

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """An error of the connection says who was waited for, and where."""
        before, self.doing = self.doing, what
        try:
            yield
        except RuntimeError as e:  # gloo's time-outs, broken connections
            raise self.lost(what, str(e)) from e
        finally:
            self.doing = before

    def lost(self, what: str, found: str) -> RanksError:
        """The error for ranks that did not come. Ranks that are well say so in the store; those that do not are named."""
        note = f"{what}, step {self.steps + 1}"
        missing = self._silent(note)
        first = self.first_failure()
        if first is not None and first != self.rank:
            text = f"rank {first} failed; rank {self.rank} was waiting for it in {note}"
        elif missing:
            names = ", ".join(
                f"{r} (process {self.pids[r]} on {self.hosts[r]}{', gone' if self._is_gone(r) else ''})" for r in missing
            )
            text = f"rank {self.rank} waited in {note} for rank{'s' if len(missing) > 1 else ''} {names}"
        else:
            text = f"rank {self.rank} lost the connection in {note}"
        return RanksError("ranks-lost", text, found=_first_line(found), fix=self.advice)

    @property
    def advice(self) -> str:
        return f"see what that rank printed; ranks wait {self.timeout:g} s for each other (TILEWORK_TIMEOUT)"

    def _silent(self, note: str) -> list[int]:
        """The ranks that are neither waiting nor failing within two seconds."""

        def asked() -> list[int]:
            self._store.set(f"tilework/lost/{self.rank}", note)
            end, missing = time.monotonic() + 2, [r for r in range(self.size) if r != self.rank]
            while missing and time.monotonic() < end:
                missing = [r for r in missing if not self._store.check([f"tilework/lost/{r}"])]
                time.sleep(0.05)
            return missing

        found = _soon(asked, 4)
        if found is not None:
            return found
        far = [r for r in range(self.size) if r not in self.local_ranks]  # the store is rank 0's, and does not answer
        return far if self.rank not in self.nodes[0] else [0] if self.rank else []

    def _is_gone(self, rank: int) -> bool:
        if rank not in self.local_ranks:
            return False
        try:
            os.kill(self.pids[rank], 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False

    def first_failure(self) -> int | None:
        """The rank that failed first, if it could say so."""
        return _soon(lambda: int(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None, 2)

    def fail(self) -> None:
        """This rank stops with an error: the others are told, if none was before it."""
        _soon(lambda: self._store.compare_set(_FAILED, "", str(self.rank)), 2)

    def close(self) -> None:
        """Ranks leave together, so that nobody loses a connection that it still needs. At the end of a process this is done by
        itself."""
        global _group
        if self._closed:
            return
        self._closed = True
        if _group is self:
            _group = None
        if self.size > 1 and not self.failed:
            _soon(self._leave, _QUICK + 1)
        gc.collect()  # what still holds a connection must go before the connections do
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    def _leave(self) -> None:
        """Rank 0 has the store: it goes last."""
        left, end = self._store.add("tilework/left", 1), time.monotonic() + _QUICK
        while self.rank == 0 and left < self.size and time.monotonic() < end and not self._store.check([_FAILED]):
            time.sleep(0.01)
            left = self._store.add("tilework/left", 0)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_group: Group | None = None


def current() -> Group | None:
    """The group that start() made, if it is still open."""
    return _group


def start(*, expected: int | None = None, timeout: float | None = None) -> Group:
    """Connect the ranks. Every rank calls it; the second call returns the same group. A process group that the program has made
    itself is used as it is.

    expected   how many ranks there must be.
    timeout    seconds that a rank waits for another before it gives up (TILEWORK_TIMEOUT, 300).
    """
    global _group
    if _group is not None:
        if expected is not None and expected != _group.size:
            raise UserError("ranks-launched", "\n    ".join(problems(Launched(_group.rank, _group.size), expected)))
        return _group
    seconds = _timeout(timeout)
    if dist.is_available() and dist.is_initialized():
        here = Launched(dist.get_rank(), dist.get_world_size(), 0, 0, "the program itself")
        store: Any = dist.distributed_c10d._get_default_store()
    else:
        here = launched()
        wrong = problems(here, expected)
        if wrong:
            raise UserError("ranks-launched", "the ranks were not launched as they should be:\n    " + "\n    ".join(wrong))
        store = _connect(here, seconds) if here.size > 1 else None
    _group = Group(here, store, seconds)
    if here.size > 1:
        _name_failures(_group)
        atexit.register(_at_exit)
    return _group


def _at_exit() -> None:
    """The last of the program's handlers: this one was registered before them. A rank whose connections are broken does not wait
    for them to be taken down."""
    if _group is not None and _group.stopped:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STOPPED)
    if _group is not None:
        _group.close()


def _soon(act: Callable[[], Any], seconds: float) -> Any:
    """What it returns; None where it fails, or has not returned in time: over a broken network answers may never come."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(act())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _connect(here: Launched, timeout: float) -> Any:
    host, port = rendezvous.address(here, timeout)
    if not here.one_node and not _agents_store():
        rendezvous.require_reachable(host, port, here)
        if "GLOO_SOCKET_IFNAME" not in os.environ and (own := rendezvous.own_interface(host, port)):
            os.environ["GLOO_SOCKET_IFNAME"] = own
    elif here.one_node and "GLOO_SOCKET_IFNAME" not in os.environ and not _agents_store():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    published: Path | None = None
    try:
        master = here.rank == 0 and not _agents_store()
        store = dist.TCPStore(host, port, None, master, timedelta(seconds=timeout), wait_for_workers=False)  # type: ignore[attr-defined]
        if port == 0:
            published = rendezvous.publish(here, store.port)
        dist.init_process_group("gloo", store=dist.PrefixStore("tilework", store), rank=here.rank, world_size=here.size,  # type: ignore[attr-defined]
                                timeout=timedelta(seconds=timeout))  # fmt: skip
    except RuntimeError as e:
        text = _first_line(str(e)) or type(e).__name__
        if here.rank == 0 and ("EADDRINUSE" in str(e) or "already in use" in str(e)):
            raise MachineError("ranks-address", f"rank 0 cannot listen at {host}:{port}: the port is in use", found=text,
                               fix="set MASTER_PORT to a free port, the same for all ranks") from None  # fmt: skip
        raise RanksError(
            "ranks-missing", f"rank {here.rank} of {here.size} could not meet the others at {host}:{port}", found=text,
            fix="see what the others printed; all ranks must be started, and reach that address",
        ) from None  # fmt: skip
    finally:
        if published is not None:
            with contextlib.suppress(OSError):
                published.unlink()
    return store


def _agents_store() -> bool:
    """torchrun keeps the store itself: every rank is a client of it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "RANK" in os.environ


def own_share(cores: Sequence[int], seat: int, seats: int) -> list[int]:
    """The cores of one of several ranks: as even as can be, neighbours together. With fewer cores than ranks, some share one."""
    if len(cores) < seats:
        return [cores[seat % len(cores)]]
    return list(cores[len(cores) * seat // seats : len(cores) * (seat + 1) // seats])


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else ""


def _machine() -> str:
    """The same for processes that can share memory and a network; Slurm's nodes differ even where one machine plays several."""
    parts = [socket.gethostname(), os.environ.get("SLURMD_NODENAME", "")]
    for path in ("/proc/sys/kernel/random/boot_id",):
        with contextlib.suppress(OSError):
            parts.append(Path(path).read_text().strip())
    for path in ("/proc/self/ns/net", "/dev/shm"):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            parts.append(f"{found.st_dev}-{found.st_ino}")
    return " ".join(parts)


def _name_failures(group: Group) -> None:
    """An uncaught exception is printed once, by the rank where it began. Ranks that stop because of it say so in a line."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        stopped = failing(error)
        if stopped:
            print(f"tilework: {error}", file=sys.stderr, flush=True)
            raise SystemExit(stopped)
        if group.first_failure() not in (None, group.rank):
            said = f"tilework: rank {group.rank} failed as well: {kind.__name__}: {_first_line(str(error))}"
            print(said, file=sys.stderr, flush=True)
            raise SystemExit(1)
        print(f"tilework: rank {group.rank} of {group.size} failed:", file=sys.stderr, flush=True)
        before(kind, error, trace)

    sys.excepthook = hook


def failing(error: BaseException) -> int | None:
    """This rank stops with an error, and the others learn it. The exit code of one that stops only because of another."""
    group = _group
    if group is None or group.size == 1:
        return None
    group.failed, group.stopped = True, isinstance(error, RanksError)
    if not group.stopped:
        group.fail()
    for act in _on_failure:
        with contextlib.suppress(Exception):
            act()
    return STOPPED if group.stopped else None


STOPPED = 76
_on_failure: list[Any] = []


def on_failure(act: Any) -> None:
    """Called when this rank stops with an error, so that others need not wait for the time-out."""
    _on_failure.append(act)


def equal(group: Group, tensors: Sequence[Tensor]) -> None:
    """Everybody's tensors become rank 0's. Small ones travel together."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    for dtype, found in by_dtype.items():
        raw = torch.uint8 if dtype in (torch.bool, torch.bfloat16, torch.float16) else None
        room: list[Tensor] = []
        for i, t in enumerate(found):
            room.append(t)
            if i + 1 < len(found) and sum(r.numel() for r in room) < 1 << 22:
                continue
            flat = torch.cat([r.contiguous().view(-1) for r in room])
            group.from_rank(flat.view(raw) if raw is not None else flat, 0, "weights from rank 0")
            at = 0
            for r in room:
                r.copy_(flat[at : at + r.numel()].view(r.shape))
                at += r.numel()
            room = []
