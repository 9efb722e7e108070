"""FwdGraph: one of several graphs in a PEF, each the forward pass of the same model on inputs of other shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilework.artifact.structure import flatten_outputs, names

from .compiling import as_call, batch_dim_of, runnable
from .conversion import plain
from .refusals import refused, say_ignored
from .sambatensor import SambaTensor


@dataclass(eq=False)
class Trace:
    """What trace_multigraph saw: a model, its example inputs, and what stands for each of its outputs."""

    model: nn.Module
    inputs: Any
    outputs: list[SambaTensor]
    structured: Any  # the outputs as the model returns them


class FwdGraph:
    """inputs and outputs are those of samba.utils.trace_multigraph; name is what session.run calls it by."""

    def __init__(self, inputs: Any, outputs: Any, name: str = "", **ignored: Any) -> None:
        say_ignored("FwdGraph", ignored)
        self.inputs, self.outputs, self.name = inputs, list(tensors_in(outputs)), name


def tensors_in(value: Any) -> Iterator[SambaTensor]:
    """SambaTensors in tuples, lists and dicts, in order."""
    if isinstance(value, SambaTensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def traced(model: nn.Module, inputs: Any, prefix: str) -> Trace:
    """Runs the model once, in eval mode, for the shapes of what it returns."""
    call = runnable(model, as_call(inputs), batch_dim_of(inputs), train=False)
    training = {m: m.training for m in model.modules()}
    with plain(model), torch.no_grad():
        model.eval()
        try:
            output = model(**call) if isinstance(call, Mapping) else model(*call)
        finally:
            for module, mode in training.items():
                module.training = mode
    leaves, structure, _ = flatten_outputs(output)
    made = []
    for t, name in zip(leaves, names(structure, "output"), strict=True):
        made.append(SambaTensor(shape=t.shape, dtype=t.dtype, name=f"{prefix}__{name}" if prefix else name))
    by_id = {id(t): m for t, m in zip(leaves, made, strict=True)}
    return Trace(model, inputs, made, _replaced(output, by_id))


def _replaced(value: Any, by_id: Mapping[int, SambaTensor]) -> Any:
    """Lists stay lists; tuples and named tuples become tuples, mappings dicts: as results come back from a run."""
    if isinstance(value, Tensor):
        return by_id[id(value)]
    if isinstance(value, Mapping):
        return {k: _replaced(v, by_id) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_replaced(v, by_id) for v in value)
    return value


def refuse_shared_regions(graphs: Mapping[str, FwdGraph]) -> None:
    """Tensors of one region would be one memory, written by one graph and read by another."""
    held: dict[str, SambaTensor] = {}
    for graph in graphs.values():
        for t in (*tensors_in(graph.inputs), *graph.outputs):
            region = t.sn_region_name
            if region and held.setdefault(region, t) is not t:
                raise refused(f"tensors that share storage: {held[region].sn_name} and {t.sn_name} have the region {region!r} "
                              "(sn_region_name). Hand the outputs of one graph to the other as inputs")  # fmt: skip
