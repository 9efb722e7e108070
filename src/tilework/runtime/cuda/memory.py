"""A session's buffers in the memory of a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...artifact.graph import DTYPES, TensorType
from ...artifact.reader import Artifact
from ...errors import MachineError

_LINE = 256  # bytes: where a gradient of a bucket begins


class CudaMemory:
    def __init__(self, artifact: Artifact, device: torch.device, beside: int) -> None:
        """`beside`: bytes that its programs will need as well."""
        types = {name: entry.type() for name, entry in artifact.manifest.buffers.items()}
        self.num_bytes = sum(kind.extent * DTYPES[kind.dtype].itemsize for kind in types.values()) + beside
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if self.num_bytes > free:
            raise MachineError(
                "memory", f"{artifact.path}: the session does not fit into the GPU's memory",
                found=f"{self.num_bytes / 1e9:.2f} GB needed, {free / 1e9:.2f} of {total / 1e9:.1f} GB free",
                fix="use a smaller batch with more micro-batches (num_micro_batches), bfloat16, or a GPU that nobody else uses",
            )  # fmt: skip
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self.buckets: list[Tensor] = []
        for bucket in artifact.manifest.buckets:
            self._bucket({name: types[name] for name in bucket.buffers})
        for name, kind in types.items():
            if name not in self.tensors:
                whole = torch.zeros(max(1, kind.extent), dtype=DTYPES[kind.dtype], device=device)
                self.tensors[name] = whole.as_strided(kind.shape, kind.stride)

    def _bucket(self, types: dict[str, TensorType]) -> None:
        places, end, dtype = {}, 0, next(iter(types.values())).dtype
        step = _LINE // DTYPES[dtype].itemsize
        for name, kind in types.items():
            places[name], end = end, end + -(-kind.extent // step) * step
        whole = torch.zeros(end, dtype=DTYPES[dtype], device=self.device)
        self.buckets.append(whole)
        for name, kind in types.items():
            self.tensors[name] = whole.as_strided(kind.shape, kind.stride, places[name])

    def read(self, buffer: str) -> Tensor:
        """Laid out as the buffer is, on the host."""
        found = self.tensors[buffer]
        copy = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="cpu")
        return copy.copy_(found)

    def write(self, buffer: str, value: Tensor) -> None:
        with torch.no_grad():
            self.tensors[buffer].copy_(value)

    def fill(self, buffer: str, value: float) -> None:
        self.tensors[buffer].fill_(value)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
