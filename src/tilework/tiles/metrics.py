"""The daemon as Prometheus reads it. Counters only grow while a daemon lives; labels are tiles, states, columns, kinds and users,
of which a machine has few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from .leases import Lease
from .page import COLUMNS
from .topology import Node
from .view import STATES, View

KINDS = ("exclusive", "shared", "job")


class Counters:
    """What has happened since the daemon started."""

    def __init__(self) -> None:
        self.tile_seconds: Counter[tuple[str, str]] = Counter()  # (tile, column)
        self.seconds: Counter[tuple[str, str]] = Counter()  # (kind, column)
        self.steps: Counter[str] = Counter()  # kind
        self.began: Counter[str] = Counter()  # kind
        self.ended: Counter[str] = Counter()  # kind
        self.waits, self.waited_seconds = 0, 0.0

    def look(self, node: Node, process: Lease, tiles: tuple[int, ...]) -> None:
        """Takes over what a process has done since the last look, on its tiles."""
        seconds, steps = process.usage.spent()
        kind = "job" if process.record.of else process.record.kind
        self.steps[kind] += steps
        for column, spent in zip(COLUMNS, seconds, strict=True):
            if spent:
                self.seconds[kind, column] += spent  # type: ignore[assignment]
                for i in tiles:
                    if i < len(node.tiles):
                        self.tile_seconds[node.tiles[i].path, column] += spent  # type: ignore[assignment]


def exposition(seen: View, counted: Counters) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(list(_families(seen, counted))))  # type: ignore[arg-type]
    text: str = generate_latest(registry).decode()
    return text


class _Collector:
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return iter(self._families)


def _families(seen: View, counted: Counters) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def family(kind: Any, name: str, text: str, values: dict[tuple[str, ...], float], *labels: str) -> Any:
        made = kind(f"tilework_{name}", text, labels=labels)
        for key, value in values.items():
            made.add_metric(key, value)
        return made

    gauge, counter = partial(family, GaugeMetricFamily), partial(family, CounterMetricFamily)
    leases = {lease.id: lease for lease in seen.leases}
    held = [(t, leases[t.lease]) for t in seen.tiles if t.lease is not None]
    sessions = Counter[str](x.kind for x in (*seen.leases, *seen.shared))
    users = Counter(lease.user for _, lease in held)
    idle = Counter(lease.user for t, lease in held if t.state == "held-idle")
    yield gauge("tile_state", "1 for the state that a tile is in", {(t.path, s): float(t.state == s) for t in seen.tiles
                                                                   for s in STATES}, "tile", "state")  # fmt: skip
    yield gauge("tile_held_seconds", "age of the lease of a held tile", {(t.path,): x.held_seconds for t, x in held}, "tile")
    yield gauge("tile_idle_seconds", "for how long the holder of a held tile has done nothing",
                {(t.path,): x.idle_seconds for t, x in held}, "tile")  # fmt: skip
    yield gauge("held_tiles", "tiles that a user holds", {(u,): n for u, n in users.items()}, "user")
    yield gauge("held_idle_tiles", "tiles that a user holds and leaves idle", {(u,): idle[u] for u in users}, "user")
    yield gauge("leases", "leases, and sessions that share the machine", {(k,): sessions[k] for k in KINDS}, "kind")
    yield gauge("memory_bytes", "memory of sessions", {(k,): sum(x.memory_bytes for x in (*seen.leases, *seen.shared)
                                                               if x.kind == k) for k in KINDS}, "kind")  # fmt: skip
    yield gauge("hung_leases", "leases and sessions that hang", {(): sum(x.hung for x in (*seen.leases, *seen.shared))})
    yield gauge("waiting_requests", "requests that wait for tiles", {(): seen.num_waiting})
    yield gauge("start_time_seconds", "when the daemon started, Unix time", {(): seen.daemon.started})
    paths = {t.path for t in seen.tiles}
    yield counter("tile_activity_seconds", "seconds that holders of a tile spent in an activity",
                  {k: v for k, v in counted.tile_seconds.items() if k[0] in paths}, "tile", "activity")  # fmt: skip
    yield counter("activity_seconds", "seconds that processes spent in an activity",
                  {(k, c): counted.seconds[k, c] for k in KINDS for c in COLUMNS}, "kind", "activity")  # fmt: skip
    yield counter("steps", "training steps", {(k,): counted.steps[k] for k in KINDS}, "kind")
    yield counter("leases_began", "leases and shared sessions that began", {(k,): counted.began[k] for k in KINDS}, "kind")
    yield counter("leases_ended", "leases and shared sessions that ended", {(k,): counted.ended[k] for k in KINDS}, "kind")
    yield counter("waits", "requests that have got their tiles", {(): counted.waits})
    yield counter("wait_seconds", "seconds that they waited", {(): counted.waited_seconds})
