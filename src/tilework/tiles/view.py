"""What the daemon tells everybody: each tile and what state it is in, who holds it, who shares the machine, who waits. The daemon
works it out once (describe.py); tools only print it."""

from __future__ import annotations

from typing import Literal

import msgspec

# A tile is free; held; held by somebody who has done nothing for a while; held by somebody who hangs; drained, but still held;
# drained.
State = Literal["free", "held", "held-idle", "hung", "draining", "drained"]
BUSY_PERCENT = 5.0  # less of everything is idling
STATES: tuple[State, ...] = ("free", "held", "held-idle", "hung", "draining", "drained")


class TileView(msgspec.Struct):
    path: str
    chip: int
    cpus: tuple[int, ...]
    memory_node: int = 0
    gpu: int | None = None
    multiprocessors: int = 0
    state: State = "free"
    activity: str = ""  # what its holder did most of the time (one of page.COLUMNS); empty: nobody holds it
    lease: str | None = None
    drained: str | None = None  # the reason


class ProcessView(msgspec.Struct):
    pid: int
    start: int
    command: str


class SessionView(msgspec.Struct):
    """A lease of a process or of a job; or a process that shares the machine (no tiles)."""

    id: str
    kind: Literal["exclusive", "job", "shared"]
    pid: int
    user: str
    uid: int
    command: str
    tiles: tuple[int, ...] = ()
    job: str = ""  # by the kernel's word
    step: str = ""
    label: str = ""  # by the process's word
    since: float = 0.0  # wall clock
    held_seconds: float = 0.0
    processes: list[ProcessView] = []
    state: str = "unknown"  # hung, idle, or what it is doing now; unknown: the daemon may not see
    hung: bool = False
    shares: dict[str, float] = {}  # percent of the window in each column; empty: unknown
    seconds: dict[str, float] = {}  # since the lease began
    steps: int = 0
    steps_per_second: float = 0.0
    loss: float | None = None
    memory_bytes: int = 0
    idle_seconds: float = 0.0
    stuck_seconds: float = 0.0
    stack: str = ""  # for its owner and root

    @property
    def activity(self) -> str:
        """What it did most of the time; `state` is a moment's, which may lie between two steps."""
        busy = {k: v for k, v in self.shares.items() if k != "idle"}
        most = max(busy, key=busy.__getitem__, default="idle")
        return most if busy.get(most, 0.0) >= BUSY_PERCENT else "idle"


class WaitingView(msgspec.Struct):
    ask: str
    user: str
    pid: int
    command: str
    waited_seconds: float


class DaemonView(msgspec.Struct):
    pid: int
    user: str
    started: float
    version: str
    folder: str
    trouble: str = ""
    installed: bool = False


class View(msgspec.Struct):
    platform: str
    title: str
    virtual: bool
    levels: tuple[str, str, str]
    tiles: list[TileView]
    daemon: DaemonView
    note: str = ""
    platform_note: str = ""  # where the tiles are not those of the platform that was asked for
    leases: list[SessionView] = []
    shared: list[SessionView] = []
    queue: list[WaitingView] = []
    num_waiting: int = 0
    window_seconds: float = 0.0


def duration(seconds: float) -> str:
    """'12 s', '3 min', '2.5 h', '4 d'."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"
