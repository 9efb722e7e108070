"""What must hold, and the guard against getting worse. Everything here is a ratio within one run, or a time of Tilework's own.

    must_hold(result)            every target with its number: holds, or falls short
    regressions(result, kept)    the rows whose ratio to the best peer is worse than in the kept results by more than a tenth

Speeds differ from machine to machine, so the guard compares ratios, and with those peers only that both runs have.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

EVERY_ROW = 0.97  # of the best peer's speed, at least
WORSE = 0.90  # of the kept ratio: below this a row got worse
VS_EAGER = {"logreg-1": 40.0, "lenet-1": 5.0, "epoch": 10.0, "call-item": 3.0}
VS_BEST_PEER = {"logreg-1": 2.0, "ffn-1": 1.5, "lenet-1": 2.5}
COLD_START = 5.0  # times torch.compile with a warm cache, beyond importing the framework
COMPILE_SECONDS = {"logreg-1": 3.0, "lenet-64": 5.0, "unet-4": 20.0}  # with default options
OVERHEAD_US = {"loop_us": (2.0, "overhead per step in a loop"), "call_us": (8.0, "overhead per call from Python")}


@dataclass(frozen=True)
class Verdict:
    what: str
    target: str
    value: float
    unit: str
    holds: bool


def speed_ratio(contenders: dict[str, Any], peer: str) -> float:
    """How many times faster than `peer` Tilework is."""
    return contenders[peer]["median"] / contenders["tilework"]["median"]


def best_peer(contenders: dict[str, Any], among: set[str] | None = None) -> str | None:
    peers = [c for c in contenders if c != "tilework" and (among is None or c in among)]
    return min(peers, key=lambda c: contenders[c]["median"]) if peers and "tilework" in contenders else None


def ratios(row: dict[str, Any]) -> dict[str, Any]:
    """best_peer, vs_best_peer and vs_eager of a measured row, as far as it has them."""
    own = row.get("contenders", {})
    found: dict[str, Any] = {}
    peer = best_peer(own)
    if peer is not None:
        found |= {"best_peer": peer, "vs_best_peer": speed_ratio(own, peer)}
    if "tilework" in own and "eager" in own:
        found["vs_eager"] = speed_ratio(own, "eager")
    return found


def must_hold(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A verdict for each target whose numbers the result has."""
    found: list[Verdict] = []

    def at_least(what: str, value: float, target: float) -> None:
        found.append(Verdict(what, f">= {target:g}", value, "x", value >= target))

    def below(what: str, value: float, target: float, unit: str) -> None:
        found.append(Verdict(what, f"< {target:g}", value, unit, value < target))

    for name, row in result.get("rows", {}).items():
        if "vs_eager" in row and name in VS_EAGER:
            at_least(f"{name}: compared with eager", row["vs_eager"], VS_EAGER[name])
        if "vs_best_peer" in row:
            at_least(
                f"{name}: compared with the best peer ({row['best_peer']})",
                row["vs_best_peer"],
                VS_BEST_PEER.get(name, EVERY_ROW),
            )
    for name, row in result.get("cold_start", {}).items():
        own = row["contenders"]
        if "tilework" in own and "compile-model" in own:
            ratio = own["compile-model"]["beyond"]["median"] / own["tilework"]["beyond"]["median"]
            at_least(f"cold start {name}: compared with torch.compile, without the import", ratio, COLD_START)
    for name, times in result.get("compile_time", {}).items():
        if "all" in times:
            below(f"compile time {name}", times["all"], COMPILE_SECONDS[name], "s")
    for key, (target, what) in OVERHEAD_US.items():
        if key in result.get("overhead", {}):
            below(what, result["overhead"][key], target, "us")
    return [asdict(v) for v in found]


def regressions(result: dict[str, Any], kept: dict[str, Any]) -> list[dict[str, Any]]:
    worse = []
    for name, row in result.get("rows", {}).items():
        now, before = row.get("contenders", {}), kept.get("rows", {}).get(name, {}).get("contenders", {})
        common = set(now) & set(before)
        peer_now, peer_before = best_peer(now, common), best_peer(before, common)
        if peer_now is None or peer_before is None:
            continue
        ratio, ratio_before = speed_ratio(now, peer_now), speed_ratio(before, peer_before)
        if ratio < WORSE * ratio_before:
            worse.append({"row": name, "now": ratio, "peer": peer_now, "kept": ratio_before, "kept_peer": peer_before,
                          "noisy": row.get("others_busy", 0.0)})  # fmt: skip
    return worse
