"""Memory of the host, for devices that compute there."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from ...artifact.graph import DTYPES, TensorType
from ...artifact.reader import Artifact
from ...errors import MachineError
from ..memory import free_memory

_LINE = 64  # bytes: gradients of a bucket begin at cache lines


class HostMemory:
    def __init__(self, artifact: Artifact) -> None:
        types = {name: entry.type() for name, entry in artifact.manifest.buffers.items()}
        self.num_bytes = sum(kind.extent * DTYPES[kind.dtype].itemsize for kind in types.values())
        free = free_memory()
        if free is not None and self.num_bytes > free:
            raise MachineError("memory", f"{artifact.path}: the session's buffers do not fit into memory",
                               found=f"{self.num_bytes / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free",
                               fix="use a smaller batch, or a machine with more memory")  # fmt: skip
        self.tensors: dict[str, Tensor] = {}
        self.buckets: list[Tensor] = []  # each one flat; its gradients are views of it
        for bucket in artifact.manifest.buckets:
            self._bucket({name: types[name] for name in bucket.buffers})
        for name, kind in types.items():
            if name not in self.tensors:
                self.tensors[name] = kind.empty()

    def _bucket(self, types: dict[str, TensorType]) -> None:
        places, end, dtype = {}, 0, next(iter(types.values())).dtype
        step = _LINE // DTYPES[dtype].itemsize
        for name, kind in types.items():
            places[name], end = end, end + -(-kind.extent // step) * step
        # Whole pages: replicas may put memory that they share in their place (parallel/segment.py).
        own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(1, end * DTYPES[dtype].itemsize), flags=own)
        whole = torch.frombuffer(memory, dtype=DTYPES[dtype], count=end) if end else torch.empty(0, dtype=DTYPES[dtype])
        self.buckets.append(whole)
        for name, kind in types.items():
            self.tensors[name] = whole.as_strided(kind.shape, kind.stride, places[name])

    def read(self, buffer: str) -> Tensor:
        return self.tensors[buffer].clone()

    def write(self, buffer: str, value: Tensor) -> None:
        with torch.no_grad():
            self.tensors[buffer].copy_(value)

    def fill(self, buffer: str, value: float) -> None:
        self.tensors[buffer].fill_(value)

    def synchronize(self) -> None:
        """What the host does is done when it returns."""
