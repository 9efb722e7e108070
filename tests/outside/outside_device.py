"""A device that lives in another distribution, with memory that is nobody else's: one block of bytes, whose addresses the host
does not know. Tensors of the host are copied in and out; programs are read from the members that its backend has packed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilework.artifact.fingerprint import Part
from tilework.artifact.graph import DTYPES, Graph, Ref, TensorType
from tilework.artifact.random import next_seed
from tilework.artifact.reader import Artifact
from tilework.errors import UserError
from tilework.runtime.devices import Call, Needs, NotANumber, inference_base
from tilework.runtime.devices.reference import operator_named

HERE = "far"


class Far:
    """All buffers in one block, those of a bucket side by side."""

    def __init__(self, artifact: Artifact) -> None:
        m = artifact.manifest
        self.types: dict[str, TensorType] = {name: entry.type() for name, entry in m.buffers.items()}
        order = [*(b for bucket in m.buckets for b in bucket.buffers), *self.types]
        self.places: dict[str, int] = {}
        self.num_bytes = 0
        for name in dict.fromkeys(order):
            self.places[name] = self.num_bytes
            self.num_bytes += self.types[name].num_bytes
        self._block = np.zeros(self.num_bytes, dtype=np.uint8)
        self.buckets = []
        for bucket in m.buckets:
            first, last = bucket.buffers[0], bucket.buffers[-1]
            place = self._block[self.places[first] : self.places[last] + self.types[last].num_bytes]
            self.buckets.append(torch.from_numpy(place).view(DTYPES[bucket.dtype]))
        self.copied = 0  # bytes that crossed

    def read(self, buffer: str) -> Tensor:
        kind = self.types[buffer]
        start = self.places[buffer]
        raw = self._block[start : start + kind.num_bytes].copy()
        self.copied += len(raw)
        dense = torch.from_numpy(raw).view(DTYPES[kind.dtype]).reshape(kind.shape)
        return torch.empty_strided(kind.shape, kind.stride, dtype=dense.dtype).copy_(dense)

    def write(self, buffer: str, value: Tensor) -> None:
        kind = self.types[buffer]
        dense = torch.empty(kind.shape, dtype=DTYPES[kind.dtype]).copy_(value.detach())
        raw = dense.reshape(-1).view(torch.uint8).numpy() if kind.num_bytes else np.zeros(0, dtype=np.uint8)
        self._block[self.places[buffer] : self.places[buffer] + kind.num_bytes] = raw
        self.copied += len(raw)

    def fill(self, buffer: str, value: float) -> None:
        self.write(buffer, torch.full((), value, dtype=torch.float64))

    def synchronize(self) -> None:
        pass


class Device:
    replays, computes = False, True

    def __init__(self, artifact: Artifact, num_threads: int | None) -> None:
        self.memory = Far(artifact)
        self.programs = {
            name: Graph.from_json(json.loads(zlib.decompress(artifact.native[str(program.code)])))
            for name, program in artifact.manifest.programs.items()
        }
        self.draws = "rng/seed" in self.memory.types

    @staticmethod
    def fits(needs: Needs) -> list[Part]:
        asked = [str(v) for v in needs.get("distance", [])]
        return [Part("distance", " ".join(asked), HERE, asked == [HERE], "compile again here")]

    def meter(self, page: Any) -> bool:
        return False

    def seed(self, base: int, counter: int = 0, inferred: int = 0) -> None:
        self.bases = {"next": base, "own": inference_base(base)}
        self.counters = {"next": counter, "own": inferred}

    def random_state(self) -> tuple[int, int, int]:
        return self.bases["next"], self.counters["next"], self.counters["own"]

    def bind(self, call: Call) -> Bound:
        return Bound(self, call)

    def close(self) -> None:
        self.programs.clear()

    def execute(self, program: str) -> None:
        graph, values = self.programs[program], dict[str, Any]()
        for name in graph.reads:
            values[name] = self.memory.read(name)

        def value(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return values[arg.name]
            return [value(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

        try:
            with torch.no_grad():
                for node in graph.nodes:
                    function = operator_named(node.op)
                    if function in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                        function = torch.ops.aten.reshape.default
                    values[node.name] = function(*map(value, node.args), **{k: value(v) for k, v in node.kwargs.items()})
        except IndexError as e:
            raise UserError("input-values", "an index in the inputs is out of range", found=str(e)[:100]) from e
        for buffer, result in graph.writes:
            self.memory.write(buffer, values[result])


class Bound:
    def __init__(self, device: Device, call: Call) -> None:
        self.device, self.call = device, call

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], scheduled: Sequence[Tensor] = ()) -> None:
        device, call, memory = self.device, self.call, self.device.memory
        shapes = [memory.types[b].shape for b in (*call.inputs, *call.outputs)]
        taken = call.taken or ("each",) * len(inputs)
        how = call.how or ("all",) * len(outputs)
        given = [t.reshape(-1, *s) for t, s in zip(inputs, shapes, strict=False)]
        wanted = [t.view(-1, *s) for t, s in zip(outputs, shapes[len(inputs) :], strict=True)]
        for at in range(call.count):
            step, first = divmod(at, call.num_micro_batches)
            if first == 0:
                kept = {b: memory.read(b) for b in call.restored}, dict(device.counters)
                for name, values in zip(call.scheduled, scheduled, strict=True):
                    memory.write(name, values[step])
                for name in call.zeroed:
                    memory.fill(name, 0.0)
            for name, source, way in zip(call.inputs, given, taken, strict=True):
                memory.write(name, source[at if way == "each" else 0])
            if call.seeds != "keep":
                if device.draws:
                    memory.write("rng/seed", torch.tensor(next_seed(device.bases[call.seeds], device.counters[call.seeds])))
                device.counters[call.seeds] += 1
            device.execute(call.micro)
            for name, target, way in zip(call.outputs, wanted, how, strict=True):
                if way == "sum":
                    target[0] += memory.read(name)
                elif way == "all" or at + 1 == call.count:
                    target[at if way == "all" else 0].copy_(memory.read(name))
            if any(bool(memory.read(b).isnan().any()) for b in call.watched):
                for name, value in kept[0].items():
                    memory.write(name, value)
                device.counters = kept[1]
                raise NotANumber(step)
            if call.update and first + 1 == call.num_micro_batches:
                device.execute(call.update)
