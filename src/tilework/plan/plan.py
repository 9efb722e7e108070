"""plan(StepGraph, Options) -> Plan: which programs there will be, what memory they need, what they cost.

A pure function. A Plan can be printed before anything is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..artifact.graph import Graph, TensorType
from ..capture.capture import StepGraph
from ..errors import BugError, UserError
from .convolutions import small_convolutions
from .cost import Cost, cost_of
from .join import accumulate, join
from .layout import channels_last
from .options import Options
from .pieces import Cut, cut
from .products import products
from .sums import sums
from .updates import updates
from .verify import verify


@dataclass(frozen=True)
class Plan:
    step: StepGraph
    options: Options
    programs: dict[str, Graph]  # name -> graph over buffers
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
            group = name.split("/")[0]
            total[group] = total.get(group, 0) + kind.num_bytes
        total["temporary"] = max((c.temporary_bytes for c in self.costs.values()), default=0)
        return total

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


def plan(step: StepGraph, options: Options) -> Plan:
    sections = step.sections
    programs: dict[str, Graph] = {}
    carries: dict[str, tuple[str, ...]] = {}

    def add(name: str, graph: Graph, *carried: str) -> None:
        programs[name], carries[name] = graph, carried

    fuse = "fuse" not in options.disable and options.programs != "sections"
    micro = step.num_micro_batches
    split = micro > 1 or ("join" in options.disable and "opt" in sections)  # the update is a program of its own
    if "joint" in sections and (fuse or micro > 1):
        if split:
            add("accumulate", accumulate(sections["joint"]), "fwd", "bwd")
        elif "opt" in sections:

            def keep(buffer: str) -> bool:
                return options.keep_gradients or not buffer.startswith("grad/") or buffer.startswith("grad/input/")

            add("step", join("step", [sections["joint"], sections["opt"]], keep), "fwd", "bwd", "opt")
        else:  # gradients only: no optimizer
            add("step", join("step", [sections["joint"]], lambda _: True), "fwd", "bwd")
    if options.programs in ("all", "sections") or "joint" not in sections or not fuse:
        for name in ("fwd", "bwd"):
            if name in sections:
                add(name, sections[name], name)
    if "opt" in sections and ("bwd" in programs or "accumulate" in programs):
        add("opt", sections["opt"], "opt")
    add("infer", sections["infer"], "infer")
    if micro > 1 and not step.losses:
        raise UserError(
            "accumulate-loss",
            "gradient accumulation needs a loss that is computed on the device",
            found="no loss: forward returns no scalar, and no loss function was given",
            expected="loss=... (a function, or the position of the loss among forward's outputs)",
        )
    seen: dict[Any, Any] = {}
    for graph in programs.values():
        verify(graph, "capture", None, seen)
    if options.device == "cpu":
        for name, change in CHANGES.items():
            if name not in options.disable:
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
    for name, kind in step.inputs.items():
        buffers.setdefault(f"input/{name}", kind)
    for buffer, tensor in step.weights.items():
        buffers.setdefault(buffer, TensorType.of(tensor))
    costs = {name: cost_of(graph) for name, graph in programs.items()}
    cuts = {}
    if options.device == "cpu" and "pieces" not in options.disable:
        cuts = {name: made for name, graph in programs.items() if (made := cut(graph, options.piece_size)) is not None}
    return Plan(step, options, programs, carries, buffers, costs, cuts=cuts)
