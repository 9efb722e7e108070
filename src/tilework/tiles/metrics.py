"""The daemon's view as Prometheus reads it."""

from __future__ import annotations

from typing import Any


def exposition(view: dict[str, Any]) -> str:
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()

    def gauge(name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"tilework_{name}", text, labels, registry=registry)

    leases = {lease["id"]: lease for lease in view["leases"]}
    state = gauge("tile_state", "1 for the state that a tile is in", "tile", "state")
    share = gauge("tile_share", "share of the last 10 seconds, 0 to 1", "tile", "activity")
    for tile in view["tiles"]:
        lease = leases.get(tile["lease"])
        now = "hung" if lease and lease["hung"] else "held" if lease else "drained" if tile["drained"] is not None else "free"
        for name in ("free", "held", "hung", "drained"):
            state.labels(tile["path"], name).set(now == name)
        for column, percent in (lease["shares"] if lease else {"idle": 100.0}).items():
            share.labels(tile["path"], column).set(percent / 100)
    names = ("lease", "user", "pid", "job")
    seconds = gauge("lease_seconds", "time since the lease began, by activity", *names, "activity")
    steps = gauge("lease_steps", "steps since the lease began", *names)
    held = gauge("lease_held_seconds", "age of the lease", *names)
    memory = gauge("lease_memory_bytes", "memory of the lease's sessions", *names)
    for lease in view["leases"]:
        labels = (lease["id"], lease["user"], str(lease["pid"]), lease["job"])
        for column, value in lease.get("seconds", {}).items():
            seconds.labels(*labels, column).set(value)
        steps.labels(*labels).set(lease.get("steps", 0))
        held.labels(*labels).set(lease["held_seconds"])
        memory.labels(*labels).set(lease.get("memory_bytes", 0))
    gauge("waiting_requests", "requests that wait for tiles").set(view["num_waiting"])
    gauge("daemon_started_seconds", "when the daemon started, Unix time").set(view["daemon"]["started"])
    text: str = generate_latest(registry).decode()
    return text
