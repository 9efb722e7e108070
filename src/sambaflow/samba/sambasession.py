"""samba.session: the one session of a program. It remembers what was compiled or traced, and finds tensors by name."""

from __future__ import annotations

import os
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tilework
from tilework.errors import did_you_mean

from ..logging import samba_logger
from . import distributed
from .compiling import METADATA, as_call, compile_to, leaves, make_step, pef_path
from .profiler import Profiler
from .running import Runner
from .sambatensor import SambaTensor, to_torch


class SambaSession:
    def __init__(self, pef_path: str = "") -> None:
        self.pef_path = pef_path
        self.args = Namespace()  # of parse_app_args, or of setup
        self.tracing = False
        self.enabled_pinned_memory = False
        self.profiler = Profiler()
        self.seed: int | None = None
        self.runner: Runner | None = None
        self.model: nn.Module | None = None
        self._inputs: Any = ()
        self._compiled: dict[int, Path] = {}  # id of a model -> the file that this process compiled for it
        self._aux: dict[str, Tensor] = {}

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
        _say_ignored("session.compile", {k: v for k, v in ignored.items() if v not in (None, False)})
        args = Namespace(**{**vars(self.args), **dict(config_dict or {})})
        forward_only = bool(getattr(args, "inference", False)) if inference is None else inference
        optimizers = optim if optimizers is None else optimizers
        notes = {"metadata": {**dict(pef_metadata or {}), **dict(metadata or {})}}
        path = pef_path(args, name or type(model).__name__)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _log_files(path) as report:
            step = make_step(model, inputs, optimizers, args, loss_indices=loss_indices, inference=forward_only, metadata=notes)
            done = compile_to(step, path, report, inference=forward_only)
            report(str(done))
        self._compiled[id(model)] = path
        self._inputs, self.model = inputs, model
        print(f"[info   ] PEF file {path.resolve()} created", flush=True)
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
        args = self.args
        several = [] if optimizers is None else list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        path = Path(pef) if pef else self._compiled.get(id(model))
        if path is None:
            import tempfile

            self._folder = tempfile.TemporaryDirectory()
            traced = make_step(model, inputs, optimizers, args, loss_indices=loss_indices, inference=not several)
            path = compile_to(traced, Path(self._folder.name) / "traced.pef", lambda _: None, inference=not several).path
        step = make_step(model, inputs, several, args, loss_indices=[0], inference=not several)
        spatial = int(getattr(args, "num_spatial_batches", 1) or 1) if getattr(args, "mapping", None) == "spatial" else 1
        runner = Runner(path, model, several, step, spatial)
        _check(runner, model, inputs, several)
        if several:
            step.loss = [o.name for o in runner.manifest.outputs if o.name in runner.manifest.losses]
        if self.seed is not None:
            runner.core.seed(self.seed)
        if transfer_device:
            runner.core.to_device(model, several or None)
        self.runner, self.model, self._inputs = runner, model, inputs
        outputs = tuple(_traced(a) for a in (runner.manifest.outputs or runner.manifest.infer_outputs))
        model.output_tensors = outputs  # type: ignore[assignment]
        if pef:
            now = time.strftime("%Y-%m-%dT%H:%M:%S")
            print(f"{now} : [INFO][LIB][{os.getpid()}]: sn_create_session: PEF File: {pef}", flush=True)
        return outputs

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
        """Runs the sections, all of them by default; returns the outputs in the order in which forward returns them."""
        runner = self._traced_runner()
        if ignored:
            _say_ignored("session.run", ignored)
        if data_parallel and distributed.get_world_size() > 1:
            raise _refused("data parallel over several ranks: gradients are not averaged yet")
        if section_ids is not None and section_types is None:
            section_types = self._section_types(section_ids)
        grads: list[Tensor | None] | None = None
        if grad_of_outputs is not None:
            grads = [None if g is None else to_torch(g).detach() for g in grad_of_outputs]
        elif section_types is None or any(str(s).lower().startswith("b") for s in section_types):
            grads = self._seeded_outputs(output_tensors)
        inference = bool(getattr(self.args, "inference", False))
        return runner.run(input_tensors, section_types, hyperparam_dict, grads, inference)

    def _seeded_outputs(self, output_tensors: Any) -> list[Tensor | None] | None:
        """Gradients that the app has assigned to sn_grad of an output: of the traced ones, or of those that run returned."""
        assert self.runner is not None and self.model is not None
        given = (
            output_tensors if isinstance(output_tensors, (list, tuple)) else () if output_tensors is None else (output_tensors,)
        )
        for outputs in (given, getattr(self.model, "output_tensors", ()) or (), self.runner.outputs):
            grads = [getattr(o, "_own_sn_grad", None) for o in outputs]
            if any(g is not None for g in grads):
                for o in outputs:
                    o._own_sn_grad = None
                return grads
        return None

    def _section_types(self, ids: Sequence[int]) -> list[str]:
        """Sections by number: in the order in which they run."""
        known = [s for s in ("fwd", "bwd", "opt") if s in self._traced_runner().core.training_sections] or ["fwd"]
        wrong = [i for i in ids if not 0 <= int(i) < len(known)]
        if wrong:
            raise tilework.UserError("sambaflow-section", f"no section with id {wrong[0]}", expected=", ".join(
                f"{i} ({s})" for i, s in enumerate(known)))  # fmt: skip
        return [known[int(i)] for i in ids]

    def _traced_runner(self) -> Runner:
        if self.runner is None:
            raise tilework.UserError("sambaflow-order", "nothing is traced yet, so nothing can run",
                                     fix="call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) first")  # fmt: skip
        return self.runner

    # ---- between host and device ----

    def to_cpu(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        """Device to host: parameters, buffers, and optimizer state where optimizers are given."""
        self._traced_runner().core.to_host(self._model(model), optimizers)

    def to_rdu(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        """Host to device."""
        self._traced_runner().core.to_device(self._model(model), optimizers)

    def to_device(self, model: nn.Module | None = None, optimizers: Any = None) -> None:
        runner = self._traced_runner()
        runner.core.to_device(self._model(model), optimizers if optimizers is not None else runner.optimizers or None)

    def _model(self, model: Any) -> nn.Module:
        found = model if isinstance(model, nn.Module) else self.model
        assert found is not None
        return found

    def _buffer_of(self, tensor: Any) -> str | None:
        """The engine's name for a tensor of the app: a parameter or buffer by identity, anything else by its sn_name."""
        if self.runner is None:
            return None
        buffers = self.runner.core.buffers
        if self.model is not None:
            for kind, named in (("param", self.model.named_parameters()), ("buffer", self.model.named_buffers())):
                for path, t in named:
                    if t is tensor:
                        return f"{kind}/{path}"
        return self._buffer_named(getattr(tensor, "sn_name", None), buffers)

    def _buffer_named(self, name: str | None, buffers: Mapping[str, Tensor]) -> str | None:
        if name is None:
            return None
        if self.model is not None:
            for path, p in self.model.named_parameters():
                if getattr(p, "sn_name", None) == name:
                    return f"param/{path}"
        notes = self.runner.manifest.metadata.get(METADATA, {}).get("inputs", []) if self.runner else []
        if self.runner is not None and name in notes:
            return f"input/{self.runner.manifest.inputs[notes.index(name)].name}"
        return next((b for kind in ("param", "buffer", "input", "output") if (b := f"{kind}/{name}") in buffers), None)

    def device_gradient(self, tensor: Any) -> Tensor | None:
        name = self._buffer_of(tensor)
        if name is None or self.runner is None:
            return None
        grad = f"grad/{name.removeprefix('param/')}"
        if grad not in self.runner.core.buffers or not self.runner.core.has_gradients:
            return None
        return self.runner.core.buffers[grad].clone()

    def device_value(self, tensor: Any) -> Tensor:
        name = self._buffer_of(tensor)
        if name is None or self.runner is None or name not in self.runner.core.buffers:
            raise tilework.UserError("sambaflow-name", "the device has no copy of this tensor",
                                     found=str(getattr(tensor, "sn_name", None)),
                                     fix="it must be a parameter, buffer or input of the traced model")  # fmt: skip
        return self.runner.core.buffers[name].clone()

    def set_device_value(self, tensor: Any, value: Tensor) -> None:
        name = self._buffer_of(tensor)
        self.device_value(tensor)  # raises where there is none
        assert self.runner is not None and name is not None
        self.runner.core.buffers[name].copy_(value)

    def pull(self, tensor: Any) -> None:
        name = self._buffer_of(tensor)
        if name is not None and self.runner is not None and name.startswith(("param/", "buffer/")):
            with torch.no_grad():
                to_torch(tensor).data.copy_(self.runner.core.buffers[name])

    def push(self, tensor: Any) -> None:
        name = self._buffer_of(tensor)
        if name is not None and self.runner is not None and name in self.runner.core.buffers:
            self.runner.core.buffers[name].copy_(to_torch(tensor).detach())

    def get_tensors(self, output_tensors: Any) -> list[SambaTensor]:
        wanted = output_tensors if isinstance(output_tensors, (list, tuple)) else [output_tensors]
        return self.get_tensors_by_name([t.sn_name for t in wanted])

    def get_tensors_by_name(self, names: Sequence[str] | str) -> list[SambaTensor]:
        """Device values by sn_name, by the names of inputs and outputs, or by the path of a parameter."""
        runner, found = self._traced_runner(), []
        for name in [names] if isinstance(names, str) else names:
            buffer = self._buffer_named(name, runner.core.buffers)
            if buffer is None and name in self._aux:
                found.append(SambaTensor(self._aux[name], name=name))
                continue
            if buffer is None:
                known = list(self.tensor_dict)
                raise tilework.UserError(
                    "sambaflow-name", f"no tensor {name!r} on the device", expected=did_you_mean(name, known)
                )
            found.append(SambaTensor(runner.core.buffers[buffer].clone(), name=name))
        return found

    @property
    def tensor_dict(self) -> dict[str, SambaTensor]:
        """Everything on the device by name."""
        runner, model = self._traced_runner(), self.model
        names = {p: getattr(t, "sn_name", None) or p for p, t in model.named_parameters()} if model is not None else {}
        found = {}
        for buffer, tensor in runner.core.buffers.items():
            kind, _, path = buffer.partition("/")
            if kind in ("param", "buffer", "input", "output"):
                found[names.get(path, path)] = SambaTensor(tensor.clone(), name=names.get(path, path))
        return found

    @property
    def buffer_dict(self) -> dict[str, SambaTensor]:
        model = self.model
        return {} if model is None else {k: SambaTensor(b, name=k) for k, b in model.named_buffers()}

    @property
    def output_dict(self) -> dict[str, SambaTensor]:
        return {str(o.sn_name): o for o in getattr(self.model, "output_tensors", ())}

    @property
    def optim_dict(self) -> dict[str, Any]:
        return {f"optim{i}": o for i, o in enumerate(self.runner.optimizers)} if self.runner else {}

    def _traced_tensors(self) -> dict[str, Any]:
        runner = self._traced_runner()
        grads = {k.removeprefix("grad/"): t.clone() for k, t in runner.core.buffers.items() if k.startswith("grad/")}
        return {"inputs": leaves(as_call(self._inputs)), "outputs": list(self.output_dict.values()), "grads": grads,
                "params": dict(self.model.named_parameters()) if self.model is not None else {}}  # fmt: skip

    @property
    def ctx(self) -> SambaSession:
        return self

    def set_tensors(self, values: Mapping[str, np.ndarray]) -> None:
        runner = self._traced_runner()
        for name, value in values.items():
            buffer = self._buffer_named(name, runner.core.buffers)
            if buffer is None:
                raise tilework.UserError("sambaflow-name", f"no tensor {name!r} on the device",
                                         expected=did_you_mean(name, list(self.tensor_dict)))  # fmt: skip
            runner.core.buffers[buffer].copy_(torch.as_tensor(value))

    # ---- the rest ----

    def setup(self, args: Any) -> None:
        """Instead of parse_app_args: a CompileArgs or RunArgs, a Namespace or a dict."""
        fields = args if isinstance(args, Mapping) else args.model_dump() if hasattr(args, "model_dump") else vars(args)
        self.args = Namespace(**dict(fields))

    def reset(self) -> None:
        """Forget what was traced."""
        if self.runner is not None:
            self.runner.core.close()
        self.runner, self.model, self._inputs = None, None, ()
        self._compiled.clear()
        self._aux.clear()

    def set_seed(self, seed: int) -> None:
        self.seed = seed = int(os.environ.get("SAMBA_SEED", seed))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.runner is not None:
            self.runner.core.seed(seed)

    def start_samba_profile(self) -> None:
        self.profiler.reset()

    def end_samba_profile(self, path: str | None = None) -> None:
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

    def add_graph(self, *_: Any, **__: Any) -> None:
        raise _refused("several graphs in one PEF (add_graph, compile_multigraph)")

    compile_multigraph = add_graph
    init_multigraph_runtime = add_graph
    create_dynamic_dim = add_graph
    load_dynamic_dims_config = add_graph
    dynamic_dims: Any = ()


def _refused(what: str) -> Exception:
    return tilework.UserError("sambaflow-refused", f"Tilework does not have this part of SambaFlow: {what}",
                              fix="docs/sambaflow.md says what there is, and what to use instead")  # fmt: skip


def _say_ignored(where: str, arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        samba_logger.info(f"{where}: {name} has no meaning here and is ignored", log_limit=1)


def _check(runner: Runner, model: nn.Module, inputs: Any, optimizers: Sequence[Any]) -> None:
    """The PEF fits the app's model, inputs and optimizers; otherwise every difference at once."""
    m, problems = runner.manifest, []
    compiled = m.metadata.get(METADATA)
    if compiled is not None:
        here = {k: type(x).__name__ for k, x in model.named_modules()}
        there = compiled.get("modules", here)
        for k in dict.fromkeys([*there, *here]):
            if here.get(k) != there.get(k):
                problems.append(f"module {k or '(the model)'}: found {here.get(k, 'none')}, expected {there.get(k, 'none')}")
    own = {f"param/{k}": p for k, p in model.named_parameters()} | {f"buffer/{k}": b for k, b in model.named_buffers()}
    for name, t in own.items():
        entry = m.buffers.get(name)
        if entry is not None and list(entry.shape) != list(t.shape):
            problems.append(f"{name}: found {list(t.shape)}, expected {list(entry.shape)}")
    for parameter in m.parameters:
        if f"param/{parameter.name}" not in own:
            problems.append(f"param/{parameter.name}: the model has no such parameter")
    given = leaves(as_call(inputs))
    if len(given) != len(m.inputs):
        problems.append(f"inputs: found {len(given)}, expected {len(m.inputs)}: {', '.join(a.name for a in m.inputs)}")
    for t, a in zip(given, m.inputs, strict=False):
        shape = list(a.type.shape)
        if m.batch_dim is not None and len(shape) > m.batch_dim:
            shape[m.batch_dim] *= m.num_micro_batches
        if list(t.shape) != shape:
            problems.append(f"input {a.name}: found {list(t.shape)}, expected {shape} (batch size {_batch(m)})")
    if optimizers and m.groups and len(optimizers) != len({g.optimizer for g in m.groups}):
        problems.append(f"optimizers: found {len(optimizers)}, expected {len({g.optimizer for g in m.groups})}")
    if problems:
        raise tilework.UserError(
            "sambaflow-mismatch",
            f"{runner.path}: this PEF was compiled for something else:\n    " + "\n    ".join(problems[:20]),
            fix="compile again with this model, batch size and inputs",
        )


def _batch(m: Any) -> int:
    sizes = [a.type.shape[m.batch_dim or 0] for a in m.inputs if len(a.type.shape) > (m.batch_dim or 0)]
    return int(sizes[0] * m.num_micro_batches) if sizes else 1


def _traced(argument: Any) -> SambaTensor:
    made = SambaTensor(shape=argument.type.shape, dtype=getattr(torch, argument.type.dtype), name=argument.name)
    return made


@contextmanager
def _log_files(path: Path) -> Iterator[Any]:
    """<name>.samba.log and .mac.log beside the PEF: what was done, and when."""
    logs = {kind: path.with_suffix(f".{kind.lower()}.log") for kind in ("SAMBA", "MAC")}
    for kind, log in logs.items():
        log.write_text("")
        print(f"[Info][{kind}]# Placing log files in {log.resolve()}", flush=True)
    begin = time.perf_counter()

    def report(line: str) -> None:
        stamp = f"{time.perf_counter() - begin:9.3f} s  "
        for log in logs.values():
            with log.open("a") as f:
                f.write(stamp + line + "\n")
        if sys.stderr.isatty():
            print(f"\r\033[K{line.splitlines()[0] if line else ''}", end="", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    print("Compilation succeeded for partition_0_0")
    print(f"Logs are generated in {path.parent.resolve()}", flush=True)


session = SambaSession()
