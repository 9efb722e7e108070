"""Several forward graphs of one model in one PEF: trace_multigraph, add_graph, compile_multigraph; then init_multigraph_runtime
and session.run(..., graph_name=...). Each graph is a signature of the artifact; weights are there once."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import tilework
from tilework.errors import did_you_mean
from tilework.frontend import failures

from .affinity import tiles_asked
from .compiling import leaves, make_step, write_pef
from .devicetensors import DeviceTensors
from .graph import FwdGraph, Trace, refuse_shared_regions, traced
from .matching import check, check_graph
from .refusals import refused, say_ignored
from .running import Runner


class Graphs(DeviceTensors):
    """The part of the session that knows several graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.args = Namespace()  # of parse_app_args, or of setup
        self.seed: int | None = None
        self._traces: list[Trace] = []
        self._graphs: dict[str, FwdGraph] = {}
        self._graph_runners: dict[str, Runner] = {}
        self._graphs_core: tuple[tilework.Session, Path] | None = None
        self._graphs_pef: Path | None = None  # that this process compiled

    def trace_graph_of(self, model: nn.Module, inputs: Any, prefix: str) -> Any:
        failures.install()
        if not isinstance(model, nn.Module):
            raise tilework.UserError("sambaflow-model", "this is not a model", found=type(model).__name__,
                                     expected="a torch.nn.Module")  # fmt: skip
        if any(t.model is not model for t in self._traces):  # main is called again: graphs are of one model
            self._forget_graphs()
        trace = traced(model, inputs, prefix)
        self._traces.append(trace)
        model.output_tensors = tuple(trace.outputs)  # type: ignore[assignment]
        return trace.structured

    def add_graph(self, graph: FwdGraph, **ignored: Any) -> None:
        failures.install()
        say_ignored("add_graph", ignored)
        if not isinstance(graph, FwdGraph):
            raise refused(f"graphs that are no FwdGraph: {type(graph).__name__}")
        name = graph.name or f"graph{len(self._graphs)}"
        refuse_shared_regions({**self._graphs, name: graph})
        self._trace_of(graph, name)
        self._graphs[name] = graph

    def _trace_of(self, graph: FwdGraph, name: str) -> Trace:
        for trace in self._traces:
            if any(t is o for t in trace.outputs for o in graph.outputs):
                return trace
        raise tilework.UserError("sambaflow-graph", f"the outputs of the graph {name!r} are not traced",
                                 found=", ".join(str(o.sn_name) for o in graph.outputs) or "none",
                                 expected="what samba.utils.trace_multigraph(model, inputs) returned, of one model")  # fmt: skip

    def _step_of(self, name: str, *, run: bool, args: Namespace | None = None, metadata: Any = None) -> tilework.Step:
        trace = self._trace_of(self._graphs[name], name)
        step = make_step(trace.model, trace.inputs, None, args or self.args, inference=True, metadata=metadata, run=run)
        return replace(step, name=name)

    def compile_multigraph(
        self,
        name: str | None = None,
        config_dict: Mapping[str, Any] | None = None,
        pef_metadata: Mapping[str, Any] | None = None,
        inference: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        **ignored: Any,
    ) -> str:
        """Compiles all graphs that were added, into one PEF; returns its path."""
        failures.install()
        say_ignored("compile_multigraph", {k: v for k, v in ignored.items() if v not in (None, False)})
        if inference is False:
            raise refused("several graphs that train (compile_multigraph with inference=False)")
        if not self._graphs:
            raise tilework.UserError("sambaflow-graph", "there is no graph to compile",
                                     fix="call samba.session.add_graph(FwdGraph(inputs, outputs, name=...)) first")  # fmt: skip
        args = Namespace(**{**vars(self.args), **dict(config_dict or {})})
        named = {k: [getattr(t, "sn_name", None) for t in leaves(self._trace_of(g, k).inputs)] for k, g in self._graphs.items()}
        notes = {"metadata": {**dict(pef_metadata or {}), **dict(metadata or {})}, "graphs": named}
        first = self._trace_of(self._graphs[next(iter(self._graphs))], "").model

        def make() -> list[tilework.Step]:
            return [self._step_of(k, run=True, args=args, metadata=notes) for k in self._graphs]

        self._graphs_pef = write_pef(args, name or type(first).__name__, make)
        return str(self._graphs_pef)

    def init_multigraph_runtime(self, pef: str | Path | None = None, **ignored: Any) -> None:
        """Loads the PEF and brings the weights to the device. Without a PEF, the one that this process compiled."""
        failures.install()
        say_ignored("init_multigraph_runtime", {k: v for k, v in ignored.items() if v not in (None, False)})
        path = Path(pef) if pef else self._graphs_pef
        if path is None:
            raise tilework.UserError("sambaflow-order", "no PEF to load", fix="give its path: init_multigraph_runtime(args.pef)")
        self._forget_runtime()
        core = tilework.load(path, tiles=tiles_asked(self.args, path))
        if self.seed is not None:
            core.seed(self.seed)
        self._graphs_core = core, path
        for name in self._graphs:
            self._graph_runner(name)

    def _graph_runner(self, name: str) -> Runner | None:
        """What runs a graph. None where the session has no several graphs, and the name means nothing."""
        if name in self._graph_runners or (self._graphs_core is None and self._graphs_pef is None):
            return self._graph_runners.get(name)
        if self._graphs_core is None:
            self.init_multigraph_runtime()
        assert self._graphs_core is not None
        core, path = self._graphs_core
        known = [s.name for s in core.manifest.signatures]
        if name not in known:
            raise tilework.UserError(
                "sambaflow-graph", f"{path}: no graph {name!r} in this PEF", expected=did_you_mean(name, known)
            )
        if name not in self._graphs:
            raise tilework.UserError("sambaflow-order", f"the graph {name!r} has no model yet",
                                     fix="call trace_multigraph and add_graph with it, as for the compile")  # fmt: skip
        graph, first = self._graphs[name], not self._graph_runners
        trace, step = self._trace_of(graph, name), self._step_of(name, run=False)
        runner = Runner(path, trace.model, [], step, 1, core, name)
        check(runner, trace.model, trace.inputs, [])
        check_graph(runner, step)
        runner.traced, runner.returned = tuple(trace.outputs), graph.outputs
        for output in trace.outputs:
            output._owner = runner
        if first:
            core.to_device(trace.model)
            self._runners[id(trace.model)] = self.runner = runner
            self.model, self._inputs = trace.model, trace.inputs
        self._graph_runners[name] = runner
        return runner

    def _forget_runtime(self) -> None:
        for runner in self._graph_runners.values():
            self._runners = {k: r for k, r in self._runners.items() if r is not runner}
            self.runner = None if self.runner is runner else self.runner
            runner.close()
        self._graph_runners.clear()
        if self._graphs_core is not None:
            self._graphs_core[0].close()
        self._graphs_core = None

    def _forget_graphs(self) -> None:
        self._forget_runtime()
        self._traces.clear()
        self._graphs.clear()
        self._graphs_pef = None
