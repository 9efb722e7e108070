"""A loop that is one kernel: every step of a call in one launch (compiler/cuda/persistent)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...errors import UserError
from ...gpu import Kernel, clusters, copy_within, resident
from ..devices import Call

if TYPE_CHECKING:
    from ..devices.cuda import Device
    from .loop import Table

LONGEST = 1e6  # us of one launch, about: whoever presses Ctrl-C waits for it, and a GPU with a screen stops what takes long
_COUNTER = 64  # bytes at the start of the scratch memory that are zero when the kernel begins


class Whole:
    def __init__(self, device: Device, entry: dict[str, Any], call: Call, table: Table) -> None:
        self.device, self.table = device, table
        self.names = [str(b) for b in entry["buffers"]]
        rows = {b: i for i, b in enumerate((*call.inputs, *call.scheduled, *call.zeroed, *call.outputs))}
        how = dict(zip(call.inputs, call.taken or ["each"] * len(call.inputs), strict=True))
        how |= dict.fromkeys(call.scheduled, "each")
        how |= {
            b: "each" if h == "all" else h for b, h in zip(call.outputs, call.how or ["all"] * len(call.outputs), strict=True)
        }
        self.rows = {b: (rows[b], way == "each") for b, way in how.items()}
        self.sums = [b for b, way in how.items() if way == "sum"]
        self.left = [b for b in (*call.scheduled, *call.outputs) if b in self.rows]  # what the session holds afterwards
        self.zeroed = call.zeroed
        self.addresses = {b: device.memory.tensors[b].data_ptr() for b in {*self.names, *self.rows}}
        self.host = torch.zeros(2 * len(self.names), dtype=torch.int64, device="cpu").pin_memory()
        self.places = torch.zeros(2 * len(self.names), dtype=torch.int64, device=device.torch_device)
        self.wrong = torch.zeros(1, dtype=torch.int32, device="cpu").pin_memory()
        self.scratch = device.scratch(int(entry["scratch"]))
        self.grid, self.threads, self.shared = (int(entry["blocks"]), 1, 1), int(entry["threads"]), int(entry["shared"])
        self.name = str(entry["function"])
        self.most = max(1, int(LONGEST / float(entry["estimate"])))  # steps of a launch
        self.cluster = bool(entry.get("cluster"))
        self.function = device.module(str(entry["member"])).function(self.name, self.shared, large_cluster=self.cluster)

    @staticmethod
    def fits(device: Device, entry: dict[str, Any]) -> bool:
        """Whether all of its blocks are on this GPU at once, as they must be to wait for each other. A GPU of the architecture
        that it was made for may have fewer multiprocessors, or less shared memory."""
        kind: Any = torch.cuda.get_device_properties(device.torch_device)
        blocks, threads, shared = int(entry["blocks"]), int(entry["threads"]), int(entry["shared"])
        if shared > kind.shared_memory_per_block_optin:
            return False
        cluster = bool(entry.get("cluster"))
        function = device.module(str(entry["member"])).function(str(entry["function"]), shared, large_cluster=cluster)
        if cluster:
            return clusters(function, blocks, threads, shared) > 0
        return blocks == 1 or resident(function, threads, shared) * kind.multi_processor_count >= blocks

    def __call__(self, count: int) -> None:
        """`count` steps, from the table's place in the call on."""
        head, copies = self.table.head, self.table.copies
        numbers: list[int] = []
        slices: dict[str, torch.Tensor] = {}  # of outputs whose sum is asked for
        for name in self.names:
            row, moves = self.rows.get(name, (None, False))
            if row is None:
                numbers += [self.addresses[name], 0]
            elif name in self.sums:
                row_bytes = copies[row].bytes
                if name not in slices:
                    buffer = self.device.memory.tensors[name]
                    slices[name] = torch.empty((count, *buffer.shape), dtype=buffer.dtype, device=buffer.device)
                numbers += [slices[name].data_ptr(), row_bytes]
            elif moves:
                numbers += [copies[row].memory + head.at * copies[row].bytes, copies[row].bytes]
            else:
                numbers += [copies[row].memory, 0]
        self.host.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        self.places.copy_(self.host, non_blocking=True)
        self.scratch[:_COUNTER].zero_()
        for name in self.zeroed:
            self.device.memory.tensors[name].zero_()
        args = [("*i64", self.places.data_ptr()), ("*u8", self.scratch.data_ptr()), ("*u32", self.wrong.data_ptr()),
                ("i64", count), ("u64", head.base), ("u64", head.counter)]  # fmt: skip
        together = self.grid[0] > 1 and not self.cluster
        Kernel(self.function, self.grid, self.threads, self.shared, args, cooperative=together, name=self.name).launch()
        for name, each in slices.items():
            self.table.sums[self.rows[name][0]].view(each.shape[1:]).add_(each.sum(0))
            copy_within(self.addresses[name], each[-1].data_ptr(), copies[self.rows[name][0]].bytes)
        for name in self.left:
            if name in slices:
                continue
            row, moves = self.rows[name]
            copy = copies[row]
            place = copy.memory + ((head.at + count - 1) * copy.bytes if moves else 0)
            copy_within(self.addresses[name], place, copy.bytes)

    def check(self) -> None:
        """After the kernel is done."""
        if int(self.wrong[0]):
            self.wrong.zero_()
            raise UserError("input-values", "an index in the inputs is out of range", found="the first one was taken instead",
                            fix="correct the class labels or token numbers, and load the weights again")  # fmt: skip
