"""reference: replays the artifact's graphs with eager PyTorch. Slow and right: what other devices are compared with."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...artifact.fingerprint import Part
from ...artifact.graph import RESHAPES, Graph, Ref
from ...artifact.names import SEED
from ...artifact.operators import SYNCHRONISES  # and defines our own operators
from ...artifact.random import next_seed
from ...artifact.reader import Artifact
from ...errors import MachineError, UserError
from ...tiles.page import Slot
from . import Call, Needs, NotANumber, inference_base
from .host import HostMemory

if TYPE_CHECKING:
    from ...parallel.algorithms import Algorithm
    from ...parallel.group import Group

# Our own operators that graphs are made of. Others of ours only stand in for something while native code is generated.
_OWN = frozenset(
    f"tilework.{name}"
    for name in ("product", "batch_product", "updated_by_product", "once", "kept", "after", "max_pool", "max_pool_grad",
                 "small_conv", "small_conv_input_grad", "small_conv_weight_grad", "random_bits", "ctc", "over_replicas")
)  # fmt: skip


@functools.cache
def allowed_operators() -> frozenset[str]:
    """Names (without overload) that a graph may call. A graph in an artifact is data from outside: whatever is not known to
    compute tensors from tensors, and to do nothing else, is refused."""
    lines = (Path(__file__).parent / "data" / "operators.txt").read_text().splitlines()
    return _OWN.union(*(line.partition("#")[0].split() for line in lines))


def operator_named(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    parts = name.split(".")
    if len(parts) == 3 and ".".join(parts[:2]) in allowed_operators():
        try:
            found = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
        except (AttributeError, RuntimeError):
            found = None
        if isinstance(found, torch._ops.OpOverload) and not found._schema.is_mutable:
            return found
    raise UserError("graph-operator", f"the graph names an operator that cannot be replayed: {name[:80]!r}",
                    expected="one that computes tensors from tensors and does nothing else",
                    fix="if it is one that your own model uses, compile for the device cpu, and report this")  # fmt: skip


class Replay:
    """A graph with its operators looked up once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.operators = [operator_named("aten.reshape.default" if n.op in RESHAPES else n.op) for n in graph.nodes]

    def __call__(self, buffers: dict[str, torch.Tensor]) -> None:
        env: dict[str, Any] = {b: buffers[b] for b in self.graph.reads}

        def value(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return env[arg.name]
            if isinstance(arg, (list, tuple)):
                return [value(a) for a in arg]
            return arg

        with torch.no_grad():
            for node, op in zip(self.graph.nodes, self.operators, strict=True):
                env[node.name] = op(*[value(a) for a in node.args], **{k: value(v) for k, v in node.kwargs.items()})
            # All reads see the values from before: results that are still views of buffers are copied first.
            results = [(buffer, env[v].clone()) for buffer, v in self.graph.writes]
            for buffer, result in results:
                buffers[buffer].copy_(result)


class Device:
    replays = computes = True

    def __init__(self, artifact: Artifact, num_threads: int | None) -> None:
        self.memory = HostMemory(artifact)
        self.buffers = self.memory.tensors
        self.programs = {name: Replay(graph) for name, graph in artifact.graphs.items()}
        self.seed(0)

    def seed(self, base: int, counter: int = 0, inferred: int = 0) -> None:
        self.bases = {"next": base, "own": inference_base(base)}
        self.counters = {"next": counter, "own": inferred}

    def random_state(self) -> tuple[int, int, int]:
        return self.bases["next"], self.counters["next"], self.counters["own"]

    @staticmethod
    def fits(needs: Needs) -> list[Part]:
        return []

    def meter(self, page: Slot) -> bool:
        return False

    def bind(self, call: Call) -> _Bound:
        return _Bound(self, call)

    def sum_over(self, group: Group, algorithm: Algorithm) -> None:
        def total(x: torch.Tensor) -> torch.Tensor:
            flat = x.contiguous().view(-1).clone()
            group.all_reduce(flat, algorithm)
            return flat.view(x.shape)

        for replay in self.programs.values():
            names = [n.op for n in replay.graph.nodes]
            replay.operators = [total if n == SYNCHRONISES else op for n, op in zip(names, replay.operators, strict=True)]

    def close(self) -> None:
        self.programs.clear()


class _Bound:
    def __init__(self, device: Device, call: Call) -> None:
        self.device, self.call = device, call

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scheduled: Sequence[torch.Tensor] = ()
    ) -> None:
        device, call, buffers = self.device, self.call, self.device.buffers
        sources = [
            (b, t.reshape(call.count if how == "each" else 1, *buffers[b].shape), how)
            for b, t, how in zip(call.inputs, inputs, call.taken or ["each"] * len(inputs), strict=True)
        ]
        targets = [
            (b, t.view(call.count if how == "all" else 1, *buffers[b].shape), how)
            for b, t, how in zip(call.outputs, outputs, call.how or ["all"] * len(outputs), strict=True)
        ]
        at = 0
        for step in range(call.num_steps):
            before = {b: buffers[b].clone() for b in call.restored}, dict(device.counters)
            for name, values in zip(call.scheduled, scheduled, strict=True):
                buffers[name].copy_(values[step])
            for name in call.zeroed:
                buffers[name].zero_()
            for _ in range(call.num_micro_batches):
                for buffer, source, how in sources:
                    buffers[buffer].copy_(source[at if how == "each" else 0])
                if call.seeds != "keep" and SEED in buffers:
                    buffers[SEED].fill_(next_seed(device.bases[call.seeds], device.counters[call.seeds]))
                    device.counters[call.seeds] += 1
                try:
                    device.programs[call.micro](buffers)
                except IndexError as e:
                    raise UserError("input-values", "an index in the inputs is out of range", found=str(e).split("\n")[0][:100],
                                    fix="correct the class labels or token numbers; load the weights again, "
                                    "because this step may be half done") from e  # fmt: skip
                except RuntimeError as e:
                    raise MachineError("native-run", f"a program failed: {str(e).splitlines()[0][:200]}") from e
                for buffer, target, how in targets:
                    if how == "sum":
                        target[0].add_(buffers[buffer])
                    elif how == "all" or at + 1 == call.count:
                        target[at if how == "all" else 0].copy_(buffers[buffer])
                if any(bool(buffers[loss].isnan().any()) for loss in call.watched):
                    for buffer, value in before[0].items():
                        buffers[buffer].copy_(value)
                    device.counters = before[1]
                    raise NotANumber(step)
                at += 1
            if call.update:
                device.programs[call.update](buffers)
