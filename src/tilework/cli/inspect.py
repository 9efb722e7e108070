"""tilework inspect: what an artifact is, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from .output import out, print_json

if TYPE_CHECKING:
    from ..artifact.manifest import Manifest, Signature

NAME = "inspect"
HELP = "Show an artifact: sections, shapes, memory, operators with their source lines. Runs nothing."
EXAMPLE = "Example: tilework inspect out/lenet.pef --graph fwd"


def command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="The .pef file.")],
    graph: Annotated[str | None, typer.Option(metavar="PROGRAM", help="Print this program's graph, with source lines.")] = None,
    operators: Annotated[bool, typer.Option("--operators", help="Count operators by source line.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Accept a file that other users could have changed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    from ..artifact.names import Buffer
    from ..artifact.reader import read_artifact
    from ..errors import UserError, did_you_mean
    from ..runtime.fitting import compare

    a = read_artifact(artifact, trust=trust)
    m = a.manifest
    if graph is not None:
        if graph not in a.graphs:
            raise UserError("run-program", f"no program {graph!r}", found=did_you_mean(graph, a.graphs))
        print(a.graphs[graph].to_text(), end="")
        return
    parts = compare(m.fingerprint, m.fingerprint.device)
    if json:
        print_json({"digest": a.digest, "members": a.members, "fits": [vars(p) for p in parts], **msgspec.to_builtins(m)})
        return
    out.print(f"{m.name}: format {m.format[0]}.{m.format[1]}, {m.producer}, {m.created}, for {m.fingerprint.device}")
    out.print(f"sha256 {a.digest}")
    replicas = f", for {m.num_replicas} replicas" if m.num_replicas > 1 else ""
    out.print(f"precision {m.precision}, weights {m.weights.where}{replicas}")
    for signature in m.signatures:
        _signature(signature)
    _parameters(m)
    _programs(m)
    memory: dict[str, int] = {}
    for name, entry in m.buffers.items():
        kind = str(Buffer(name).kind)
        memory[kind] = memory.get(kind, 0) + entry.type().num_bytes
    out.print("memory   " + ", ".join(f"{k} {v / 1e6:.3f} MB" for k, v in sorted(memory.items(), key=lambda kv: -kv[1])))
    if m.hyperparameters:
        out.print("hyper    " + ", ".join(f"{k}={v:g}" for k, v in m.hyperparameters.items()), markup=False)
    for group in m.groups:
        name, state = group.counter or group.prefix, ", ".join(group.state) or "none"
        out.print(f"{name}  {group.rule}, {len(group.params)} parameters, state: {state}")
    for p in parts:
        out.print(f"{'ok ' if p.ok else 'NO '} {p.name}: needs {p.needs}; here: {p.has}", markup=False)
    if operators:
        _operators(a)


def _signature(s: Signature) -> None:
    micro = f", {s.num_micro_batches} micro-batches per step" if s.num_micro_batches > 1 else ""
    out.print(f"signature {s.name}: {', '.join(s.programs.values())}{micro}", markup=False)
    trains = any(role not in ("infer", "opt") for role in s.programs)
    table = _table()
    for i, argument in enumerate(s.inputs if trains else s.inputs[: s.num_model_inputs]):
        table.add_row("input" if i < s.num_model_inputs else "target", argument.name, str(argument.type.type()))
    for argument in s.outputs if trains else s.infer_outputs:
        table.add_row("output", argument.name, str(argument.type.type()), "loss" if argument.name in s.losses and trains else "")
    out.print(table)


def _parameters(m: Manifest) -> None:
    table = _table()
    for p in m.parameters:
        table.add_row("parameter", p.name, str(p.type.type()), p.group or ("" if p.trainable else "frozen"))
    out.print(table)


def _table() -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in ("", "name", "type", ""):
        table.add_column(column)
    return table


def _programs(m: Manifest) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("program", "sections", "Mflop", "MB moved", "temporary MB", "threads"):
        table.add_column(column, justify="left" if column in ("program", "sections") else "right")
    for name, p in m.programs.items():
        table.add_row(
            name, "+".join(p.sections), f"{p.flops / 1e6:.3f}", f"{p.bytes / 1e6:.3f}", f"{p.temporary_bytes / 1e6:.3f}",
            "all" if p.parallel else "one",
        )  # fmt: skip
    out.print(table)


def _operators(a: object) -> None:
    counts: dict[tuple[str, str], dict[str, int]] = {}
    graph = a.graphs.get("step") or next(iter(a.graphs.values()))  # type: ignore[attr-defined]
    for node in graph.nodes:
        if node.op != "getitem":
            ops = counts.setdefault((node.where or f"({node.section or 'none'})", node.source), {})
            key = f"{node.section}:{node.op.split('.')[1]}"
            ops[key] = ops.get(key, 0) + 1
    table = Table(box=None, pad_edge=False)
    for column in ("where", "source", "operators"):
        table.add_column(column)
    for (where, source), ops in counts.items():
        table.add_row(where, source, ", ".join(k if v == 1 else f"{k} x{v}" for k, v in ops.items()))
    out.print(table)
