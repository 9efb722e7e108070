"""poptorch.Options of a process that poprun has started: replicas and processes are what it was asked for."""

from __future__ import annotations

from typing import Any

import popdist
from poptorch.errors import StateError
from poptorch.groups import Distributed
from poptorch.options import Options as PlainOptions


def _refused(name: str) -> Any:
    def setter(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise StateError("popdist-options", f"Cannot call `{name}` with popdist.poptorch.Options",
                         fix="poprun's --num-replicas and --num-instances set it")  # fmt: skip

    setter.__doc__ = "Set by poprun."
    return setter


class _Processes(Distributed):
    _title = "Distributed"

    def __init__(self) -> None:
        super().__init__()
        self._values["num_distributed_processes"] = popdist.getNumInstances()
        self._values["distributed_process_id"] = popdist.getInstanceIndex()

    disable = _refused("Distributed.disable")
    IPUoFConfigFiles = _refused("Distributed.IPUoFConfigFiles")
    configureProcessId = _refused("Distributed.configureProcessId")

    def setEnvVarNames(self, num_processes: str, process_id: str) -> Distributed:
        """poprun's own are used."""
        return self


class Options(PlainOptions):
    _title = "Options"

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        if not popdist.isPopdistEnvSet():
            raise StateError(
                "popdist-options",
                "this process was not started by poprun",
                fix="poprun --num-replicas=N python program.py; or poptorch.Options()",
            )
        expected = popdist.getNumIpusPerReplica()
        if ipus_per_replica not in (None, expected):
            raise StateError(
                "popdist-options",
                "the number of IPUs of a replica is not that of poprun",
                found=str(ipus_per_replica),
                expected=f"{expected} (--ipus-per-replica)",
            )
        self._values["replication_factor"] = popdist.getNumLocalReplicas()
        vars(self)["Distributed"] = _Processes()

    replicationFactor = _refused("replicationFactor")
    useIpuId = _refused("useIpuId")
