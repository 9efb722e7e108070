"""samba.session: the one session of a program. It remembers what was compiled or traced, and finds tensors by name."""

from __future__ import annotations

import os
import random
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tilework
from tilework.errors import did_you_mean
from tilework.frontend import failures

from ..logging import samba_logger
from . import distributed
from .affinity import tiles_asked
from .compiling import as_call, compile_to, leaves, make_step, write_pef
from .graph import tensors_in
from .matching import check, check_graph
from .multigraph import Graphs
from .profiler import Profiler
from .refusals import refused, say_ignored
from .running import Runner, signature_for
from .sambatensor import SambaTensor, to_torch


class SambaSession(Graphs):
    def __init__(self, pef_path: str = "") -> None:
        super().__init__()
        self.pef_path = pef_path
        self.tracing = False
        self.enabled_pinned_memory = False
        self.profiler = Profiler()
        self._profiling = False  # between start_ and end_..._profile: every run is an event
        self._compiled: dict[int, Path] = {}  # id of a model -> the file that this process compiled for it

    # ---- compiling ----

    def compile(
        self,
        model: nn.Module,
        inputs: Any,
        optimizers: Any = None,
        name: str | None = None,
        app_dir: str | None = None,
        init_output_grads: bool = False,
        squeeze_bs_dim: bool = False,
        config_dict: Mapping[str, Any] | None = None,
        pef_metadata: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        inference: bool | None = None,
        loss_indices: Sequence[int] | None = None,
        optim: Any = None,
        **ignored: Any,
    ) -> str:
        """Traces, compiles, writes the PEF and returns its path."""
        say_ignored("session.compile", {k: v for k, v in ignored.items() if v not in (None, False)})
        args = Namespace(**{**vars(self.args), **dict(config_dict or {})})
        forward_only = bool(getattr(args, "inference", False)) if inference is None else inference
        optimizers = optim if optimizers is None else optimizers
        notes = {"metadata": {**dict(pef_metadata or {}), **dict(metadata or {})}}
        failures.install()  # also where an app does not use parse_app_args

        def make() -> tilework.Step:
            return make_step(model, inputs, optimizers, args, loss_indices=loss_indices, inference=forward_only, metadata=notes)

        path = write_pef(args, name or type(model).__name__, make)
        self._compiled[id(model)] = path
        self._inputs, self.model = inputs, model
        return str(path)

    # ---- tracing: a PEF, a model and its optimizers come together ----

    def trace(
        self,
        model: nn.Module,
        inputs: Any,
        optimizers: Any = None,
        pef: str | Path | None = None,
        transfer_device: bool = True,
        loss_indices: Sequence[int] | None = None,
    ) -> tuple[SambaTensor, ...]:
        failures.install()
        args = self.args
        group = distributed.group_for(args)
        several = [] if optimizers is None else list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        path = Path(pef) if pef else self._compiled.get(id(model))
        if path is None:
            import tempfile

            self._folder = tempfile.TemporaryDirectory()
            traced = make_step(model, inputs, optimizers, args, loss_indices=loss_indices, inference=not several)
            path = compile_to(traced, Path(self._folder.name) / "traced.pef").path
        step = make_step(model, inputs, several, args, loss_indices=[0], inference=not several, run=False)
        spatial = int(getattr(args, "num_spatial_batches", 1) or 1) if getattr(args, "mapping", None) == "spatial" else 1
        before = self._runners.pop(id(model), None)
        if before is not None:
            before.close()
        core = tilework.load(path, tiles=tiles_asked(args, path))
        if group is not None:
            self._join(core, group)
        runner = Runner(path, model, several, step, spatial, core, signature_for(core.manifest, leaves(as_call(inputs))))
        step.train = not runner.inference
        check(runner, model, inputs, several, loss_indices)
        if several and runner.inference and not getattr(args, "inference", False):
            samba_logger.warning(f"{path} was compiled with --inference: runs are forward only, the optimizer does nothing")
        if several:
            step.loss = [o.name for o in runner.signature.outputs if o.name in runner.signature.losses]
            step.accumulate = runner.signature.accumulate  # type: ignore[assignment]
        if pef:
            check_graph(runner, step)
        if self.seed is not None:
            runner.core.seed(self.seed)
        if transfer_device:
            runner.core.to_device(model, several or None)
        self._runners[id(model)] = self.runner = runner
        self.model, self._inputs = model, inputs
        runner.traced = tuple(_traced(a, runner) for a in (runner.signature.outputs or runner.signature.infer_outputs))
        model.output_tensors = runner.traced  # type: ignore[assignment]
        if pef:
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            print(f"{now} : [INFO][LIB][{os.getpid()}]: sn_create_session: PEF File: {pef}", flush=True)
        return runner.traced

    def _join(self, core: tilework.Session, group: Any) -> None:
        """One of several replicas. A PEF for inference has nothing to reduce."""
        if core.fused is None:
            return
        try:
            core.join(group, **distributed.settings(self.args))
        except tilework.UserError as e:
            if e.id == "run-reduce":
                raise tilework.UserError(
                    "sambaflow-replicas", f"{core.artifact.path}: this PEF was not compiled for data parallel",
                    fix="compile it with --data-parallel -ws 2; it then runs with any number of ranks") from None  # fmt: skip
            raise

    # ---- running ----

    def run(
        self,
        input_tensors: Any = None,
        output_tensors: Any = None,
        hyperparam_dict: Mapping[str, Any] | None = None,
        section_types: Sequence[str] | None = None,
        grad_of_outputs: Sequence[Tensor | None] | None = None,
        data_parallel: bool = False,
        reduce_on_rdu: bool = False,
        data_parallel_mode: Any = None,
        section_ids: Sequence[int] | None = None,
        graph_name: str | None = None,
        **ignored: Any,
    ) -> list[SambaTensor]:
        """Runs the sections, all of them by default; returns the outputs in the order in which forward returns them, or those
        of `output_tensors`, in their order, where these are some of the traced ones."""
        wanted = list(tensors_in(output_tensors))
        runner = self._graph_runner(graph_name) if graph_name is not None else None
        if graph_name is not None and runner is None:
            say_ignored("session.run with one graph", {"graph_name": graph_name})
        runner = runner or next((o._owner for o in wanted if o._owner is not None), None) or self._traced_runner()
        unknown = [k for k in ignored if k not in _HARMLESS]
        if unknown:
            raise tilework.UserError("sambaflow-argument", f"session.run has no argument {unknown[0]!r}",
                                     fix=did_you_mean(unknown[0], _RUN_ARGUMENTS))  # fmt: skip
        say_ignored("session.run", ignored)
        if runner.core.group is None and (data_parallel or distributed.get_world_size() > 1):  # the app's own group
            group = distributed.group_for(self.args, data_parallel)
            if group is not None:
                self.args.reduce_on_rdu = reduce_on_rdu or getattr(self.args, "reduce_on_rdu", False)
                self._join(runner.core, group)
        if section_ids is not None and section_types is None:
            section_types = self._section_types(section_ids)
        grads: list[Tensor | None] | None = None
        if grad_of_outputs is not None:
            grads = [None if g is None else to_torch(g).detach() for g in _several(grad_of_outputs)]
        elif section_types is None or any(str(s).lower().startswith("b") for s in section_types):
            grads = _seeds(runner, output_tensors)
        inference = bool(getattr(self.args, "inference", False))
        event = self.profiler.start_event("session.run") if self._profiling else None
        results = runner.run(input_tensors, section_types, hyperparam_dict, grads, inference)
        if event is not None:
            self.profiler.end_event(event)
        if len(wanted) == len(runner.traced) and all(a is b for a, b in zip(wanted, runner.traced, strict=True)):
            return results
        places = [i for o in wanted or runner.returned for i, t in enumerate(runner.traced) if t is o]
        return [results[i] for i in places] if places and len(places) == len(wanted or runner.returned) else results

    def _section_types(self, ids: Sequence[int]) -> list[str]:
        """Sections by number: in the order in which they run."""
        known = [s for s in ("fwd", "bwd", "opt") if s in self._traced_runner().core.training_sections] or ["fwd"]
        wrong = [i for i in ids if not 0 <= int(i) < len(known)]
        if wrong:
            raise tilework.UserError("sambaflow-section", f"no section with id {wrong[0]}", expected=", ".join(
                f"{i} ({s})" for i, s in enumerate(known)))  # fmt: skip
        return [known[int(i)] for i in ids]

    # ---- the rest ----

    def setup(self, args: Any) -> None:
        """Instead of parse_app_args: a CompileArgs or RunArgs, a Namespace or a dict."""
        fields = args if isinstance(args, Mapping) else args.model_dump() if hasattr(args, "model_dump") else vars(args)
        self.args = Namespace(**dict(fields))

    def reset(self) -> None:
        """Forget what was traced."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self.runner, self.model, self._inputs = None, None, ()
        self._compiled.clear()
        self._aux.clear()
        self._forget_graphs()

    def set_seed(self, seed: int) -> None:
        self.seed = seed = int(os.environ.get("SAMBA_SEED", seed))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.runner is not None:
            self.runner.core.seed(seed)

    def start_samba_profile(self) -> None:
        self.profiler.reset()
        self._profiling = True

    def end_samba_profile(self, path: str | None = None) -> None:
        self._profiling = False
        if path:
            Path(path).write_text(self.profiler.print_statistics(show=False) + "\n")

    start_runtime_profile = start_samba_profile
    end_runtime_profile = end_samba_profile

    def add_aux_tensor(self, tensor: Tensor, name: str) -> None:
        self._aux[name] = to_torch(tensor)

    def is_valid_aux_tensor_name(self, name: str) -> bool:
        return name in self._aux

    def disable_graphamp(self) -> None:
        self.args.graphamp_preset = None

    def _add_directives(self, directives: Any) -> None:
        samba_logger.info("compiler directives have no meaning here and are ignored", log_limit=1)

    _context_directives: Any = None

    def create_dynamic_dim(self, *_: Any, **__: Any) -> None:
        raise refused("dynamic dimensions (create_dynamic_dim): compile a graph for each size (--batch-sizes, FwdGraph)")

    load_dynamic_dims_config = create_dynamic_dim
    dynamic_dims: Any = ()


_HARMLESS = ("run_graph_only", "measure_performance", "dev_mode", "distlearn_config", "local_rank", "is_training")
_RUN_ARGUMENTS = ("input_tensors", "output_tensors", "hyperparam_dict", "section_types", "grad_of_outputs", "data_parallel",
                  "reduce_on_rdu", "data_parallel_mode", "section_ids", "graph_name")  # fmt: skip


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _traced(argument: Any, runner: Runner) -> SambaTensor:
    made = SambaTensor(shape=argument.type.shape, dtype=getattr(torch, argument.type.dtype), name=argument.name)
    made._owner = runner
    return made


def _seeds(runner: Runner, output_tensors: Any) -> list[Tensor | None] | None:
    """Gradients that the app has assigned to sn_grad of an output: of those that run
    returned, of those given, or of the traced ones, where they stay until the app assigns others."""
    for outputs in (runner.outputs, _several(output_tensors), runner.traced):
        found = {id(o): g for o in outputs if (g := getattr(o, "_own_sn_grad", None)) is not None}
        if not found:
            continue
        for order in (runner.traced, runner.outputs):  # a subset may have been given
            if any(id(o) in found for o in order):
                return [found.get(id(o)) for o in order]
        return [found.get(id(o)) for o in outputs]
    return None


session = SambaSession()
