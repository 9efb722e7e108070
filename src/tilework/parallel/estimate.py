"""Scale on paper: how long a step takes with many replicas, from one rank's measured step and what it costs to reduce.

Each way to reduce n bytes is `begin + n * per byte` (an alpha-beta model):
  within a machine, q ranks, through shared memory: fitted to a measured sweep, from which it grows with q
  along a ring of p ranks: 2 (p - 1) messages one after the other, each of n / p bytes
  hierarchical, m machines: within the machine, then along rings of m. All q ranks use the network at once, each for n / q bytes,
  so the machine's connection carries 2 (m - 1) / m n bytes
A step is computing plus the part of the reduction that is not hidden behind the backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

# name -> (seconds for a message to arrive, bytes a second of one machine's connection); typical figures, not measured here.
NETWORKS = {
    "eth10": (50e-6, 1.25e9),
    "eth25": (30e-6, 3.1e9),
    "eth100": (15e-6, 12.5e9),
    "ib200": (3e-6, 25e9),
    "ib400": (2e-6, 50e9),
}
BACKWARD = 2 / 3  # of a step's computing: what a reduction can hide behind


@dataclass(frozen=True)
class Measured:
    step: float  # seconds of one rank's step, alone
    gradient_bytes: int
    within: tuple[float, float]  # (seconds to begin, seconds a byte) of a reduction within the machine
    ranks: int  # with which that was measured
    cores: int = 2**30  # of a machine; ranks beyond them take turns


@dataclass(frozen=True)
class Network:
    latency: float  # seconds
    bandwidth: float  # bytes a second


@dataclass(frozen=True)
class Predicted:
    replicas: int
    nodes: int
    algorithm: str
    reduce: float  # seconds
    step: float  # seconds, all together

    def efficiency(self, alone: float) -> float:
        """Of one rank's speed, what each of many keeps."""
        return alone / self.step


def within_machine(m: Measured, ranks: int) -> float:
    if ranks == 1:
        return 0.0
    begin, per_byte = m.within
    growth = math.log2(ranks) / math.log2(max(2, m.ranks))
    # Every rank reads and writes all n bytes in all, whatever their number: memory is shared, and so is its speed.
    return begin * growth + per_byte * m.gradient_bytes * max(1.0, ranks / m.ranks)


def along_ring(count: int, size: float, network: Network) -> float:
    return 0.0 if count == 1 else 2 * (count - 1) * (network.latency + size / count / network.bandwidth)


def predict(
    m: Measured, replicas: int, nodes: int, network: Network, *, algorithm: str = "auto", overlap: bool = True
) -> Predicted:
    per_node = -(-replicas // nodes)
    hierarchical = within_machine(m, per_node) + along_ring(nodes, m.gradient_bytes, network)
    if nodes == 1:
        found = {"hierarchical": hierarchical}
    else:
        # In one ring of all ranks, each machine's connection carries the traffic of its two ends.
        found = {"hierarchical": hierarchical, "ring": along_ring(replicas, m.gradient_bytes, network)}
    best = min(found, key=lambda a: found[a]) if algorithm == "auto" or algorithm not in found else algorithm
    hidden = BACKWARD * m.step if overlap and nodes > 1 else 0.0
    computing = m.step * max(1.0, per_node / m.cores)
    return Predicted(replicas, nodes, best, found[best], computing + max(0.0, found[best] - hidden))


def curve(m: Measured, per_node: int, network: Network, most: int = 10_000, *, overlap: bool = True) -> list[Predicted]:
    """1, 2, 4, ... replicas up to `most`, `per_node` on each machine."""
    counts = [2**i for i in range(int(math.log2(most)) + 1)]
    if counts[-1] != most:
        counts.append(most)
    return [predict(m, n, -(-n // per_node), network, overlap=overlap) for n in counts]
