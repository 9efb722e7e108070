"""popdist: which instance of several this process is, as poprun says, and the connection between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import tilework
from tilework.parallel import launched, start

__version__ = f"3.4.0+tilework.{tilework.__version__}"


def _number(name: str, default: int) -> int:
    text = os.environ.get(f"POPDIST_{name}", "")
    return int(text) if text.isdecimal() else default


def isPopdistEnvSet() -> bool:
    """Whether poprun has started this process."""
    return "POPDIST_NUM_TOTAL_REPLICAS" in os.environ


def getInstanceIndex() -> int:
    return launched().rank if isPopdistEnvSet() else 0


def getNumInstances() -> int:
    return launched().size if isPopdistEnvSet() else 1


def getNumTotalReplicas() -> int:
    return _number("NUM_TOTAL_REPLICAS", 1)


def getNumLocalReplicas() -> int:
    return _number("NUM_LOCAL_REPLICAS", 1)


def getReplicaIndexOffset() -> int:
    return _number("REPLICA_INDEX_OFFSET", 0)


def getNumIpusPerReplica() -> int:
    return _number("NUM_IPUS_PER_REPLICA", 1)


def init() -> None:
    """Connects the instances. Every instance calls it."""
    if getNumInstances() > 1:
        start(expected=getNumInstances())


def finalizeDistributed() -> None:
    """Nothing: the instances leave together when they end."""


def synchronize(name: str = "") -> None:
    """Waits for all instances."""
    start().barrier()


def execute_on_instances(instances: Iterable[int], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args) in these instances; None in the others."""
    return function(*args, **kwargs) if getInstanceIndex() in set(instances) else None
