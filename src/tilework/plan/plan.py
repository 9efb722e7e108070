"""plan(StepGraph, Options) -> Plan: which programs there will be, what memory they need, what they cost.

A pure function. A Plan can be printed before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ..artifact.graph import Graph, TensorType
from ..artifact.manifest import Signature
from ..artifact.names import OWN, SUMMED, Buffer, Kind, is_kind
from ..capture.capture import StepGraph
from ..errors import BugError, UserError
from .convolutions import small_convolutions
from .cost import Cost, cost_of
from .join import accumulate, join
from .layout import channels_last
from .options import Options
from .pieces import Cut, cut
from .products import products
from .recompute import recompute, unmarked
from .shards import parts
from .sums import sums
from .updates import updates
from .verify import verify


@dataclass(frozen=True)
class Plan:
    steps: tuple[StepGraph, ...]  # one for each signature, over the same weights
    signatures: tuple[Signature, ...]
    options: Options
    programs: dict[str, Graph]  # name -> graph over buffers; those of the first signature are called after what they do
    sections: dict[str, tuple[str, ...]]  # program -> the sections it carries out
    buffers: dict[str, TensorType]  # every buffer that a session allocates
    costs: dict[str, Cost]
    # program -> operators that have no generated code there but are called through torch's dispatcher; "*": all of them
    called: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)  # programs that are made of pieces

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind of buffer, and the largest program's temporaries: what a session will need."""
        total: dict[str, int] = {}
        for name, kind in self.buffers.items():
            group = str(Buffer(name).kind)
            total[group] = total.get(group, 0) + kind.num_bytes
        total["temporary"] = max((c.temporary_bytes for c in self.costs.values()), default=0)
        return total

    @property
    def step(self) -> StepGraph:
        return self.steps[0]

    @property
    def roles(self) -> dict[str, str]:
        """Program -> what it does for its signature: step, accumulate, fwd, bwd, opt or infer."""
        return {name: role for s in self.signatures for role, name in s.programs.items()}

    def siblings(self, program: str) -> dict[str, str]:
        """Role -> program, of the signature that a program belongs to."""
        return next(s.programs for s in self.signatures if program in s.programs.values())

    def __str__(self) -> str:
        lines = []
        for name, graph in self.programs.items():
            cost = self.costs[name]
            sections = "+".join(self.sections[name])
            lines.append(
                f"{name:<11} {sections:<12} {len(graph.nodes):>5} operators  {cost.flops / 1e6:>9.2f} Mflop  "
                f"{cost.bytes / 1e6:>8.2f} MB moved" + (f"  {self.cuts[name]}" if name in self.cuts else "")
            )
        memory = self.memory
        lines.append(f"memory {sum(memory.values()) / 1e6:.2f} MB: " + ", ".join(
            f"{k} {v / 1e6:.2f}" for k, v in sorted(memory.items(), key=lambda kv: -kv[1]) if v))  # fmt: skip
        return "\n".join(lines)


def _each(change: Callable[[Graph], Graph]) -> Callable[[Mapping[str, Graph]], dict[str, Graph]]:
    return lambda programs: {program: change(graph) for program, graph in programs.items()}


# Passes over all programs, in order.
CHANGES: dict[str, Callable[[Mapping[str, Graph]], dict[str, Graph]]] = {
    "sums": _each(sums),
    "small_convolutions": _each(small_convolutions),
    "products": _each(products),
    "updates": _each(updates),
    "channels_last": channels_last,
}


def plan(steps: Sequence[StepGraph], options: Options, passes: Sequence[str] = ()) -> Plan:
    """`passes`: those that the device's backend asks for, of CHANGES and "pieces"."""
    programs: dict[str, Graph] = {}
    carries: dict[str, tuple[str, ...]] = {}
    signatures: list[Signature] = []
    for step in steps:
        prefix = step.signature.name if signatures else ""
        roles: dict[str, str] = {}
        for role, (graph, carried) in _programs(step, options).items():
            graph = graph.with_buffers(lambda b, p=prefix: f"{p}:{b}" if p and is_kind(b, *OWN) else b)  # type: ignore[misc]
            same = next((p for p, g in programs.items() if carries[p] == carried and _equal(g, graph)), None)
            roles[role] = name = same or _named(role, prefix)
            if same is None and name in programs:
                raise UserError("signatures", "two signatures would have programs with the same name", found=name,
                                fix="give them different names: Step(name=...)")  # fmt: skip
            if same is None:
                programs[name], carries[name] = replace(graph, name=name), carried
        signatures.append(msgspec.structs.replace(step.signature, prefix=prefix, programs=roles))
    seen: dict[Any, Any] = {}
    for graph in programs.values():
        verify(graph, "capture", None, seen)
    again = unmarked if "recompute" in options.disable else recompute  # of every device: marks say what is kept, and do nothing
    programs = {name: _verified(again(graph), "pass recompute", graph, seen) for name, graph in programs.items()}
    for name, change in CHANGES.items():
        if name in passes and name not in options.disable:
            changed = change(programs)
            for program, graph in changed.items():
                verify(graph, f"pass {name}", programs[program], seen)
            programs = changed
    buffers: dict[str, TensorType] = {}
    for graph in programs.values():
        for buffer, kind in graph.types.items():
            if buffers.setdefault(buffer, kind) != kind:
                raise BugError(
                    "plan-types", f"programs disagree about buffer {buffer}: {buffers[buffer]} and {kind} in {graph.name}"
                )
    for step, signature in zip(steps, signatures, strict=True):
        for argument in signature.inputs:
            buffers.setdefault(signature.buffer(Kind.INPUT, argument.name), argument.type.type())
        for buffer, tensor in step.weights.items():
            buffers.setdefault(buffer, TensorType.of(tensor))
    costs = {name: cost_of(graph) for name, graph in programs.items()}
    cuts = {}
    if "pieces" in passes and "pieces" not in options.disable:
        cuts = {name: made for name, graph in programs.items() if (made := cut(graph, options.piece_size)) is not None}
    return Plan(tuple(steps), tuple(signatures), options, programs, carries, buffers, costs, cuts=cuts)


def _verified(graph: Graph, stage: str, before: Graph, seen: dict[Any, Any]) -> Graph:
    if graph is not before:
        verify(graph, stage, before, seen)
    return graph


def _named(role: str, prefix: str) -> str:
    """step, step_16; infer_8 also where that is already the signature's own name."""
    return f"{role}_{prefix.removeprefix(f'{role}_')}" if prefix else role


def _equal(a: Graph, b: Graph) -> bool:
    return a.buffers == b.buffers and len(a.nodes) == len(b.nodes) and a.abi() == b.abi() and a.digest() == b.digest()


def _programs(step: StepGraph, options: Options) -> dict[str, tuple[Graph, tuple[str, ...]]]:
    """Role -> (graph, the sections that it carries out), for one signature."""
    sections, made = step.sections, dict[str, tuple[Graph, tuple[str, ...]]]()
    fuse = "fuse" not in options.disable and options.programs != "sections"
    micro = step.signature.num_micro_batches
    if micro > 1 and step.train and not step.signature.losses:
        raise UserError(
            "accumulate-loss",
            "gradient accumulation needs a loss that is computed on the device",
            found="no loss: forward returns no scalar, and no loss function was given",
            expected="loss=... (a function, or the position of the loss among forward's outputs)",
        )
    split = micro > 1 or options.num_replicas > 1 or ("join" in options.disable and "opt" in sections)
    if "joint" in sections and (fuse or micro > 1):
        if split:
            made["accumulate"] = accumulate(sections["joint"]), ("fwd", "bwd")
        elif "opt" in sections:
            graph = join(
                "step", [sections["joint"], sections["opt"]], lambda b: options.keep_gradients or not is_kind(b, *SUMMED)
            )
            made["step"] = graph, ("fwd", "bwd", "opt")
        else:  # gradients only: no optimizer
            made["step"] = join("step", [sections["joint"]], lambda _: True), ("fwd", "bwd")
    if options.programs in ("all", "sections") or "joint" not in sections or not fuse:
        made |= {name: (sections[name], (name,)) for name in ("fwd", "bwd") if name in sections}
    if "opt" in sections and ("bwd" in made or "accumulate" in made):
        made["opt"] = sections["opt"], ("opt",)
        if options.num_shards > 1:
            made |= {role: (graph, ("opt",)) for role, graph in parts(sections["opt"], options.num_shards).items()}
    made["infer"] = sections["infer"], ("infer",)
    return made
