"""What a session that joins others asks of its device, and what they agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..artifact.manifest import Manifest
from ..artifact.names import WEIGHTS, is_kind
from ..errors import UserError
from .devices.host import HostMemory
from .sync import Buffers

if TYPE_CHECKING:
    from ..parallel.group import Group
    from ..parallel.shards import Shards


def equal_weights(group: Group, memory: Buffers) -> None:
    """Everybody's weights and optimizer state become rank 0's."""
    if group.size == 1:
        return
    from ..parallel.group import equal

    tensors = {b: memory.read(b) for b in memory if is_kind(b, *WEIGHTS)}
    equal(group, list(tensors.values()))
    if group.rank:
        for name, tensor in tensors.items():
            memory.write(name, tensor)


def sum_over(group: Group, device: Any, manifest: Manifest, algorithm: str) -> None:
    """Programs that ask for statistics of all replicas in their middle get them."""
    if group.size == 1 or not device.computes or not any(p.synchronises for p in manifest.programs.values()):
        return
    if not hasattr(device, "sum_over"):
        raise UserError("sync-batch-norm", "this device cannot add up the statistics of several replicas",
                        fix="compile without sync_batch_norm and nn.SyncBatchNorm, or for another device")  # fmt: skip
    device.sum_over(group, "hierarchical" if algorithm != "ring" and group.is_even else "ring")


def shared_out(group: Group, device: Any, manifest: Manifest) -> Shards:
    """The parts of the update that are this rank's."""
    from ..parallel.shards import Shards

    if not isinstance(device.memory, HostMemory):
        raise UserError("run-shards", "this device cannot share out the update")
    return Shards(group, manifest, manifest.signature, device.memory.tensors)
