"""A call of any number of steps on a GPU. Slices of the caller's memory travel in parts, while the part before is computed;
between the steps nobody waits for the host.

Each unit (a step, or several) is launched once as it is, which is a real step and lets libraries set themselves up. From the
second one on it is a CUDA graph. What differs from step to step lies in a table that the graph's first and last kernels read."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...artifact.names import SEED
from ...gpu import Kernel
from ..devices import Call, NotANumber

if TYPE_CHECKING:
    from ..devices.cuda import Device

PART = 256 << 20  # bytes of the caller's slices that are on the GPU at a time, twice
UNROLLED = 16  # steps in a graph, where a call has as many
MOST_LAUNCHES = 4000  # in a graph
_THREADS, _BLOCKS = 256, 64
_ONE = threading.RLock()  # a call at a time: torch's settings, and the capture of graphs, are the whole process's
_HOW = {"each": 0, "all": 0, "once": 1, "again": 2, "last": 3, "sum": 4}
_STEP, _ZERO = 5, 6
_TYPES = {torch.float32: 0, torch.float64: 1, torch.int64: 2, torch.bfloat16: 3, torch.float16: 4}


class _Copy(ctypes.Structure):
    _fields_ = (("buffer", ctypes.c_uint64), ("memory", ctypes.c_uint64), ("bytes", ctypes.c_int64), ("how", ctypes.c_int32),
                ("type", ctypes.c_int32))  # fmt: skip


class _Head(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("counter", ctypes.c_uint64), ("seed", ctypes.c_uint64), ("at", ctypes.c_int64),
                ("count", ctypes.c_int64), ("micro", ctypes.c_int64), ("num_before", ctypes.c_int32),
                ("num_after", ctypes.c_int32), ("ticket", ctypes.c_int32), ("keep", ctypes.c_int32))  # fmt: skip


class Table:
    """compiler/cuda/loop.cu's table: here, and a copy on the GPU."""

    def __init__(self, device: Device, call: Call) -> None:
        buffers = device.memory.tensors
        rows: list[tuple[str, int, bool]] = []  # buffer, how, whether it comes before
        rows += [(b, _HOW[h], True) for b, h in zip(call.inputs, call.taken or ["each"] * len(call.inputs), strict=True)]
        rows += [(b, _STEP, True) for b in call.scheduled]
        rows += [(b, _ZERO, True) for b in call.zeroed]
        before = len(rows)
        rows += [(b, _HOW[h], False) for b, h in zip(call.outputs, call.how or ["all"] * len(call.outputs), strict=True)]
        size = ctypes.sizeof(_Head) + max(1, len(rows)) * ctypes.sizeof(_Copy)
        self._host = torch.zeros(size, dtype=torch.uint8, device="cpu").pin_memory()
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self.head = _Head.from_address(self._host.data_ptr())
        self.copies = (_Copy * max(1, len(rows))).from_address(self._host.data_ptr() + ctypes.sizeof(_Head))
        largest = 1
        for copy, (name, how, _) in zip(self.copies, rows, strict=False):
            t = buffers[name]
            copy.buffer, copy.bytes, copy.how, copy.type = t.data_ptr(), t.numel() * t.element_size(), how, _TYPES.get(t.dtype, 5)
            largest = max(largest, copy.bytes)
        self.head.micro, self.head.num_before, self.head.num_after = call.num_micro_batches, before, len(rows) - before
        self.head.seed = buffers[SEED].data_ptr() if SEED in buffers else 0
        self.head.keep = int(call.seeds == "keep")
        blocks = max(1, min(_BLOCKS, largest // (16 * _THREADS)))
        self.sums: dict[int, Tensor] = {}  # by row: where outputs are added up
        self.begin, self.end = (
            Kernel(device.loop.function(f"tilework_{name}"), (blocks, max(1, n), 1), _THREADS, 0,
                   [("*u8", self.memory.data_ptr())], name=name)
            for name, n in (("begin", before), ("end", len(rows) - before))
        )  # fmt: skip

    def send(self) -> None:
        """In the order of the stream. The host's copy may change once the copy is done."""
        self.memory.copy_(self._host, non_blocking=True)


class Bound:
    def __init__(self, device: Device, call: Call) -> None:
        self.device, self.call = device, call
        self.table = Table(device, call)
        self.micro = device.plans[call.micro]
        self.update = device.plans[call.update] if call.update else None
        self.whole = device.whole_for(call, self.table)  # all steps in one kernel
        self.graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._staged: list[dict[int, Tensor]] = [{}, {}]
        self._bad = torch.zeros((), dtype=torch.bool, device=device.torch_device)  # a watched number of this step is none

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], scheduled: Sequence[Tensor] = ()) -> None:
        with _ONE:
            self._locked(inputs, outputs, scheduled)

    def _locked(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], scheduled: Sequence[Tensor]) -> None:
        device = self.device
        device.stream.wait_stream(torch.cuda.current_stream(device.torch_device))  # what was written to the session's buffers
        with torch.no_grad(), torch.cuda.device(device.torch_device), torch.cuda.stream(device.stream), device.settings():
            if self.call.watched:
                self._watched(inputs, outputs, scheduled)
            else:
                self._run(inputs, outputs, scheduled, 0, self.call.num_steps)

    # ---- parts of a call ----

    def _run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], scheduled: Sequence[Tensor], first: int, last: int
    ) -> None:
        """Steps `first` to `last` of the call."""
        device, call = self.device, self.call
        given, taken = [*inputs, *scheduled], [*(call.taken or ["each"] * len(inputs)), *["step"] * len(scheduled)]
        per_step = sum(
            t.numel() * t.element_size() // call.num_steps
            for t, how in zip([*given, *outputs], [*taken, *(call.how or ["all"] * len(outputs))], strict=True)
            if how in ("each", "all", "step")
        )
        if self.whole is not None:  # which keeps every step's, and adds them up at the end
            kinds = call.how or ["all"] * len(outputs)
            per_step += sum(t.numel() * t.element_size() for t, how in zip(outputs, kinds, strict=True) if how == "sum")
        most = max(1, PART // max(1, per_step))
        most = min(most, self.whole.most) if self.whole is not None else most
        parts = [(at, min(last, at + most)) for at in range(first, last, most)]
        compute, copies = device.stream, device.copies
        done: list[torch.cuda.Event] = []
        waiting: list[tuple[Tensor, Tensor]] = []  # (the caller's memory, ours)
        for number, (begin, end) in enumerate(parts):
            staged = self._staged[number % 2]
            with torch.cuda.stream(copies):
                if number > 1:
                    copies.wait_event(done[number - 2])
                elif number == 0:
                    copies.wait_stream(compute)
                here = [self._in(staged, i, t, how, begin, end) for i, (t, how) in enumerate(zip(given, taken, strict=True))]
            compute.wait_stream(copies)
            there = [self._out(staged, len(given) + i, t, begin, end) for i, t in enumerate(outputs)]
            if number:
                compute.synchronize()  # the table of the part before has been read; its outputs are complete
                for target, source in waiting:
                    target.copy_(source)
            waiting = self._compute(here, there, outputs, begin, end)
            done.append(compute.record_event())
        device.finish()
        if self.whole is not None:
            self.whole.check()
        for target, source in waiting:
            target.copy_(source)

    def _compute(
        self, inputs: Sequence[int], there: Sequence[Tensor], outputs: Sequence[Tensor], begin: int, end: int
    ) -> list[tuple[Tensor, Tensor]]:
        device, call, table = self.device, self.call, self.table
        random = device.randoms.get(call.seeds)
        for i, address in enumerate(inputs):
            table.copies[i].memory = address
        waiting = []
        for i, (mine, given) in enumerate(zip(there, outputs, strict=True)):
            row = table.copies[table.head.num_before + i]
            how = (call.how or ["all"] * len(outputs))[i]
            whole = how == "all"
            self.table.sums[self.table.head.num_before + i] = mine
            row.memory = mine.data_ptr() - (begin * call.num_micro_batches * row.bytes if whole else 0)
            flat = given.view(-1)
            part = slice(begin * flat.numel() // call.num_steps, end * flat.numel() // call.num_steps) if whole else slice(None)
            if mine.data_ptr() != given.data_ptr() and (whole or end == call.num_steps):
                waiting.append((flat[part], mine.view(-1)))
        table.head.at, table.head.count = begin * call.num_micro_batches, call.count
        if random is not None:
            table.head.base, table.head.counter = random.base & 0xFFFFFFFFFFFFFFFF, random.counter
        table.send()
        self._steps(end - begin)
        if random is not None:
            random.counter += (end - begin) * call.num_micro_batches
        return waiting

    def _in(self, staged: dict[int, Tensor], number: int, t: Tensor, how: str, begin: int, end: int) -> int:
        """The address on the GPU that the first slice of the call would have."""
        if t.device == self.device.torch_device:
            return t.data_ptr()
        flat = t.view(-1)
        if how in ("each", "step"):
            first, last = (n * flat.numel() // self.call.num_steps for n in (begin, end))
            flat = flat[first:last]
        else:
            first = 0
        mine = staged.get(number)
        if mine is None or mine.numel() < flat.numel():
            mine = staged[number] = torch.empty(flat.numel(), dtype=t.dtype, device=self.device.torch_device)
        mine[: flat.numel()].copy_(flat, non_blocking=True)
        return mine.data_ptr() - first * t.element_size()

    def _out(self, staged: dict[int, Tensor], number: int, t: Tensor, begin: int, end: int) -> Tensor:
        how = (self.call.how or ["all"] * len(self.call.outputs))[number - len(self.call.inputs) - len(self.call.scheduled)]
        if t.device == self.device.torch_device:
            return t.view(-1)[begin * t.numel() // self.call.num_steps :] if how == "all" else t.view(-1)
        wanted = (end - begin) * (t.numel() // self.call.num_steps) if how == "all" else t.numel()
        mine = staged.get(number) if how == "all" else self._staged[0].get(number)
        if mine is None or mine.numel() < wanted:
            mine = torch.empty(wanted, dtype=t.dtype, device=self.device.torch_device)
            (staged if how == "all" else self._staged[0])[number] = mine
        if how == "sum" and begin == 0:
            mine.zero_()
        return mine[:wanted]

    # ---- steps ----

    def _steps(self, count: int) -> None:
        if self.whole is not None:
            self.whole(count)
            return
        while count:
            unit = UNROLLED if count >= UNROLLED and self._launches * UNROLLED <= MOST_LAUNCHES else 1
            if unit not in self.graphs:
                if 1 not in self.graphs:  # libraries set themselves up
                    self._step()
                    self.graphs[1] = None
                    count -= 1
                    continue
                self.graphs[unit] = self._captured(unit)
            graph = self.graphs[unit]
            if graph is None and unit == 1:
                graph = self.graphs[1] = self._captured(1)
            if graph is None:
                for _ in range(unit):
                    self._step()
            else:
                graph.replay()
            count -= unit

    @property
    def _launches(self) -> int:
        per_micro = len(self.micro.steps) + 2
        return per_micro * self.call.num_micro_batches + (len(self.update.steps) if self.update else 0)

    def _step(self) -> None:
        for _ in range(self.call.num_micro_batches):
            self.table.begin.launch()
            self.micro.run()
            self.table.end.launch()
            for name in self.call.watched:
                self._bad.logical_or_(self.device.memory.tensors[name].isnan().any())
        if self.update:
            self.update.run()

    def _captured(self, steps: int) -> torch.cuda.CUDAGraph | None:
        """None where something in it needs the host in between."""
        if self.device.uncapturable & {self.call.micro, self.call.update}:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.device.pool, stream=self.device.stream, capture_error_mode="thread_local"):
                for _ in range(steps):
                    self._step()
        except RuntimeError as e:
            if "captur" not in str(e) and "operation not permitted" not in str(e):
                raise
            self.device.uncapturable.add(self.call.micro)
            return None
        return graph

    def _watched(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], scheduled: Sequence[Tensor]) -> None:
        """One step at a time, and a look at the losses after each."""
        device, call = self.device, self.call
        buffers = device.memory.tensors
        random = device.randoms.get(call.seeds)
        for step in range(call.num_steps):
            before = {b: buffers[b].clone() for b in call.restored}
            drawn = random.counter if random is not None else 0
            self._bad.zero_()
            self._run(inputs, outputs, scheduled, step, step + 1)
            if bool(self._bad):
                for name, value in before.items():
                    buffers[name].copy_(value)
                if random is not None:
                    random.counter = drawn
                device.finish()  # whoever reads the weights now reads these
                raise NotANumber(step)


def explained(error: RuntimeError) -> Any:
    """What a failed call means for its caller."""
    from ...errors import MachineError, UserError

    text = str(error).splitlines()[0]
    if "device-side assert" in text or "out of bounds" in text or "illegal memory access" in text:
        return UserError("input-values", "an index in the inputs is out of range", found=text[:150],
                         fix="correct the class labels or token numbers, and start the process again: the GPU gives up a process "
                         "in which this happens")  # fmt: skip
    if "out of memory" in text.lower():
        return MachineError("memory", "the GPU's memory is full", found=text[:200], fix="use a smaller batch")
    return MachineError("native-run", f"a program failed: {text[:200]}")
