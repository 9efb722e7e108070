"""samba.session.run: inputs, sections and hyperparameters as apps give them, to calls of a tilework session."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilework
from tilework.artifact.names import Kind, is_kind
from tilework.artifact.structure import flatten
from tilework.errors import did_you_mean

from .. import logging
from .compiling import METADATA, compile_to, leaves
from .sambatensor import SambaTensor, to_torch

SECTIONS = {"fwd": "fwd", "forward": "fwd", "bckwd": "bwd", "bwd": "bwd", "backward": "bwd", "opt": "opt", "optim": "opt",
            "gradnorm": "opt", "reduce": "reduce"}  # fmt: skip
HYPER = ("lr", "momentum", "weight_decay", "p")
Gradients = Sequence[Tensor | None] | None


class Runner:
    """A loaded PEF beside the app's model and optimizers."""

    def __init__(
        self,
        path: Path | str,
        model: nn.Module,
        optimizers: Sequence[Any],
        step: Any,
        num_spatial: int,
        core: tilework.Session,
        signature: str | None = None,
    ) -> None:
        """signature: the one of the PEF's graphs that runs here, by name; by default the first."""
        self.core = core
        self.path, self.model, self.optimizers, self.step = path, model, list(optimizers), step
        self.num_spatial = num_spatial  # steps in one run with --mapping spatial
        self.manifest = m = self.core.manifest
        self.signature = core.calls_of(signature).signature if signature else m.signature
        self._which = self.signature.name if len(m.signatures) > 1 else None
        self.inference = bool(m.metadata.get(METADATA, {}).get("inference", False))
        self.traced: tuple[SambaTensor, ...] = ()  # what trace_graph returned
        self.returned: Sequence[SambaTensor] = ()  # by a run, where these are not all
        self.outputs: list[SambaTensor] = []  # of the last forward
        self.newest: Runner = self  # the one that ran last: this one, or the one for another batch size
        self._input_names = [a.name for a in self.signature.inputs]
        notes = m.metadata.get(METADATA, {})
        self._graphs = notes.get("graphs", {})  # name -> sn_name of each of its inputs; empty where there is only one graph
        self._named = list(self._graphs.get(self.signature.name) or notes.get("inputs", []))  # sn_names, as compiled
        self._dtypes = [getattr(torch, a.type.dtype) for a in self.signature.inputs]
        self._rows = self.signature.num_rows  # of one run: the batch times its micro-batches
        self._given: dict[str, float] = {}  # by hyperparam_dict, until it says something else
        self._set: dict[str, float] = {}  # what of it the session has
        self._others: dict[int, Runner] = {}  # for batches of other sizes
        self._bare = {k.split("#")[0].rsplit(".", 1)[-1] for k in m.hyperparameters}
        self._steps_forward = 1  # mini-batches of the last forward
        self._reduced = False  # whether the last backward's gradients are those of all ranks by now
        self.in_sync()

    def in_sync(self) -> None:
        """Host and device have just been made equal."""
        self._host_versions = [p._version for p in self.model.parameters()]

    def host_has_changed(self) -> bool:
        return self._host_versions != [p._version for p in self.model.parameters()]

    def close(self) -> None:
        for core in {id(r.core): r.core for r in (*self._others.values(), self)}.values():
            core.close()

    # ---- one run ----

    def run(
        self,
        input_tensors: Any = None,
        section_types: Sequence[str] | None = None,
        hyperparam_dict: Mapping[str, Any] | None = None,
        out_grads: Gradients = None,
        inference: bool = False,
    ) -> list[SambaTensor]:
        given = self._flat(input_tensors)
        sections = self._sections(section_types, inference)
        self._set_hyper(hyperparam_dict)
        rows, steps = self._rows_of(given), 1
        if "fwd" not in sections:
            if self.newest is not self:  # what the last forward kept is there
                return self._other(self.newest, given, section_types, out_grads, inference)
        elif rows is not None and self._rows is not None and rows != self._rows:
            if rows % self._rows or self.num_spatial == 1:
                other = self._compiled(rows) or self._resized(rows, given)
                return self._other(other, given, section_types, out_grads, inference)
            steps = rows // self._rows
        self.newest = self
        if "fwd" in sections:
            self._steps_forward = steps
        steps = max(steps, self._steps_forward)
        if sections == {"fwd"}:
            in_eval = self.inference or inference or not self.model.training
            return self._keep(self._forward(given, steps, in_eval))
        if out_grads is None and sections >= self._all():
            return self._keep(self.core.run(*given, num_steps=steps, signature=self._which).flat)
        if steps > 1:
            raise tilework.UserError("sambaflow-spatial", "several mini-batches in one run need all sections together",
                                     found=f"{steps} mini-batches, sections {', '.join(sorted(sections))}",
                                     fix="give one mini-batch, or leave out section_types and gradients of outputs")  # fmt: skip
        order = [s for s in ("fwd", "bwd", "reduce", "opt") if s in sections]
        if "opt" in sections and "reduce" not in sections and self.core.group is not None and self._unreduced(sections):
            order.insert(order.index("opt"), "reduce")
        self._reduced = "reduce" in order or (self._reduced and "bwd" not in order)
        result = self.core.run(
            *(given if "fwd" in sections else ()),
            sections=order,
            signature=self._which,
            out_grads=self._by_output(out_grads) if "bwd" in sections else None,
        )
        return self._keep(result.flat) if "fwd" in sections else self.outputs

    def _unreduced(self, sections: set[str]) -> bool:
        """Whether the gradients that an update is about to use are still this rank's own."""
        return "bwd" in sections or not self._reduced

    def _all(self) -> set[str]:
        return set(self.core.training_sections) - {"reduce"}

    def _by_output(self, out_grads: Gradients) -> dict[str, Tensor] | None:
        if not out_grads:
            return None
        return {a.name: g for a, g in zip(self.signature.outputs, out_grads, strict=False) if g is not None}

    # ---- inputs ----

    def _flat(self, given: Any) -> list[Tensor]:
        """Plain tensors in the artifact's order and dtypes. Names of a dict decide, and so do those of tensors that all have
        the names that were compiled; None entries fall away."""
        if given is None:
            return []
        if isinstance(given, Mapping):
            given = self._by_name(given)
        found = [g for g in (given if isinstance(given, (list, tuple)) else [given]) if g is not None]
        if any(isinstance(g, str) for g in found):
            raise tilework.UserError("sambaflow-inputs", "an input is a string", found=repr(found)[:80], expected="tensors",
                                     fix="give the tensors themselves, or a dict from names to tensors")  # fmt: skip
        if any(isinstance(g, (list, tuple, dict)) for g in found):
            found = leaves(found)
        if len(found) != len(self._dtypes):
            return [to_torch(g) for g in found]  # the engine says what is wrong
        names = [getattr(g, "sn_name", None) for g in found]
        if names != self._named and None not in names and len(set(names)) == len(names) and set(names) == set(self._named):
            found = [found[names.index(n)] for n in self._named]
        return [_as(g, dtype) for g, dtype in zip(found, self._dtypes, strict=True)]

    def _by_name(self, given: Mapping[str, Any]) -> list[Any]:
        """By the names of forward's arguments, or by those that the tensors had when they were compiled."""
        own, named = self._input_names, self._named
        tensors = {k: v for k, v in given.items() if v is not None}
        for names in (own, named):
            if set(names) == set(tensors):
                return [tensors[n] for n in names]
        unknown = sorted(set(tensors) - set(own))
        raise tilework.UserError(
            "sambaflow-inputs", "the inputs have different names than at compile time",
            found=", ".join(tensors), expected=", ".join(own) + (f" (or {', '.join(map(str, named))})" if any(named) else ""),
            fix=did_you_mean(unknown[0], own) if unknown else "",
        )  # fmt: skip

    def _rows_of(self, given: Sequence[Tensor]) -> int | None:
        """Rows of the batch, where all inputs agree on them; where they do not, the engine says what is wrong."""
        dim = self.signature.batch_dim
        if dim is None or len(given) != len(self.signature.inputs):
            return None
        micro, found = self.signature.num_micro_batches, None
        for tensor, argument in zip(given, self.signature.inputs, strict=True):
            shape = argument.type.shape
            if len(shape) > dim and tensor.dim() == len(shape) and self._rows == shape[dim] * micro:
                if found is not None and tensor.shape[dim] != found:
                    return None
                found = tensor.shape[dim]
        return found

    def _sections(self, asked: Sequence[str] | str | None, inference: bool) -> set[str]:
        if asked is None:
            return {"fwd"} if inference or self.inference else self._all()
        names = [asked] if isinstance(asked, str) else list(asked)
        unknown = [s for s in names if str(s).lower() not in SECTIONS]
        if unknown:
            raise tilework.UserError("sambaflow-section", f"no section {unknown[0]!r}",
                                     expected="fwd, bckwd, gradnorm, reduce, opt",
                                     fix=did_you_mean(str(unknown[0]).lower(), SECTIONS))  # fmt: skip
        found = {SECTIONS[str(s).lower()] for s in names} - ({"reduce"} if self.core.group is None else set())
        missing = sorted(found - self._all() - {"reduce"}) if found != {"fwd"} else []
        if missing:
            raise tilework.UserError("sambaflow-section", f"{self.path}: this PEF has no section {missing[0]!r}",
                                     found="sections: " + (", ".join(sorted(self._all())) or "fwd (inference)"),
                                     fix="compile it without --inference, with an optimizer")  # fmt: skip
        return found

    # ---- forward alone ----

    def _forward(self, given: list[Tensor], steps: int, in_eval: bool) -> list[Tensor]:
        """Batch by batch where several were given: as in eval mode, or as in training."""
        s, dim = self.signature, self.signature.batch_dim or 0
        if not in_eval:
            each = [self.core.run(*batch, sections=["fwd"], signature=self._which).flat for batch in self._chunks(given, steps)]
            if steps == 1:
                return each[0]
            return [torch.stack(p) if p[0].dim() == 0 else torch.cat(p, dim) for p in zip(*each, strict=True)]
        count = steps * s.num_micro_batches
        outputs = list(flatten(self.core.infer(*given, num_batches=count, signature=self._which))[0])
        return [self._a_step(o, steps) if count > steps and o.shape == (count,) and o.is_floating_point() else o for o in outputs]

    def _a_step(self, losses: Tensor, steps: int) -> Tensor:
        """Of each micro-batch -> of each step; a single one is a scalar, as in training."""
        each = losses.reshape(steps, -1)
        one = each.sum(1) if self.signature.accumulate == "sum" else each.mean(1)
        return one if steps > 1 else one[0]

    def _chunks(self, given: Sequence[Tensor], steps: int) -> Any:
        dim = self.signature.batch_dim or 0
        batched = [len(a.type.shape) > dim and steps > 1 for a in self.signature.inputs]
        each = [g.chunk(steps, dim) if b else [g] * steps for g, b in zip(given, batched, strict=True)]
        return zip(*each, strict=True)

    def _keep(self, raw: Sequence[Tensor]) -> list[SambaTensor]:
        self.outputs = made = [t.as_subclass(SambaTensor) for t in raw]
        for tensor, argument in zip(made, self.signature.outputs, strict=False):
            tensor.sn_name = argument.name
        return made

    # ---- hyperparameters ----

    def _set_hyper(self, given: Mapping[str, Any] | None) -> None:
        """What hyperparam_dict says holds until it says something else; the rest is as the host's optimizers have it now, so
        torch's schedulers work as they are."""
        if given:
            unknown = [k for k in given if k not in HYPER and k not in self._bare]
            if unknown:
                raise tilework.UserError("sambaflow-hyperparameter", f"no hyperparameter {unknown[0]!r}", found=", ".join(given),
                                         expected=", ".join(HYPER))  # fmt: skip
            self._given |= {k: _number(k, v) for k, v in given.items() if k in self._bare}
        if self._given != self._set:
            self.core.set(self._given)
            self._set = dict(self._given)
        if self.manifest.groups and self.optimizers:
            self.core.follow(*self.optimizers, but=self._given)

    # ---- other batch sizes ----

    def _compiled(self, rows: int) -> Runner | None:
        """Where the PEF has a graph for that size too (--batch-sizes): on the same weights, in the same session."""
        if rows not in self._others:
            sizes = {s.num_rows: s.name for s in self.manifest.signatures if s.name != self.signature.name}
            if self._graphs or rows not in sizes:
                return None
            self._others[rows] = Runner(self.path, self.model, self.optimizers, None, 1, self.core, sizes[rows])
        return self._others[rows]

    def _resized(self, rows: int, given: list[Tensor]) -> Runner:
        """A batch of another size (the last of an epoch, say): the same step, compiled once for that size."""
        if self.step is None:
            self.core.run(*given)  # raises, with every mismatch
        if rows not in self._others:
            logging.samba_logger.warning(f"a batch of {rows} instead of {self._rows} rows: the step is compiled once more, for "
                                         f"that size. compile --batch-sizes {self._rows},{rows} makes a PEF for both",
                                         log_limit=1)  # fmt: skip
            step = _with_examples(self.step, given)
            with tempfile.TemporaryDirectory() as folder:
                made = compile_to(step, Path(folder) / "other.pef", device=self.manifest.fingerprint.device,
                                  num_replicas=self.manifest.num_replicas)  # fmt: skip
                core = tilework.load(made.path)
                if self.core.group is not None:
                    core.join(self.core.group, **self.core.joined)
                self._others[rows] = Runner(made.path, self.model, self.optimizers, None, 1, core)
        return self._others[rows]

    def _other(self, other: Runner, given: list[Tensor], sections: Any, grads: Gradients, inference: bool) -> list[SambaTensor]:
        """A run elsewhere, on the same weights."""
        shared = other.core is self.core
        if not shared and "fwd" in self._sections(sections, inference):  # else it has the weights, and what its forward kept
            _copy_tensors(self.core, other.core)
        other._given = dict(self._given)
        self.outputs = other.run(given or None, sections, None, grads, inference)
        if not shared:
            _copy_tensors(other.core, self.core)
        self.newest = other
        return self.outputs


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise tilework.UserError("sambaflow-hyperparameter", f"{name} is not a number", found=repr(value)[:80]) from None


def _copy_tensors(source: tilework.Session, target: tilework.Session) -> None:
    """Weights and optimizer state, as far as both have them: without an optimizer there is no state, and the target's stays."""
    kept = {k: t for k, t in target.tensors().items() if is_kind(k, Kind.STATE) and k not in source.memory}
    target.load_tensors({**kept, **{k: t for k, t in source.tensors().items() if k in target.memory}})


def signature_for(manifest: Any, given: Sequence[Tensor]) -> str:
    """The name of the graph that takes inputs of these shapes; of the first one where none does."""
    wanted = [list(t.shape) for t in given]
    for s in manifest.signatures:
        shapes = [list(a.type.shape) for a in s.inputs]
        if s.batch_dim is not None:
            for shape in (shape for shape in shapes if len(shape) > s.batch_dim):
                shape[s.batch_dim] *= s.num_micro_batches
        if shapes == wanted:
            return str(s.name)
    return str(manifest.signature.name)


def _as(value: Any, dtype: torch.dtype) -> Tensor:
    """Any integers do for any numbers that can hold them; floats only for floats."""
    tensor = to_torch(value)
    if tensor.dtype is dtype:
        return tensor
    if tensor.is_floating_point() and not dtype.is_floating_point and dtype != torch.bool:
        return tensor  # not a matter of width: the engine says what is wrong
    made = tensor.to(dtype)
    if not tensor.is_floating_point() and dtype != torch.bool and not torch.equal(made.to(tensor.dtype), tensor):
        raise tilework.UserError("sambaflow-inputs", "an input has integers that its type in the PEF cannot hold",
                                 found=f"{tensor.dtype}, {int(tensor.min())} to {int(tensor.max())}", expected=f"{dtype}",
                                 fix="compile with an example of the type that is given")  # fmt: skip
    return made


def _with_examples(step: tilework.Step, given: Sequence[Tensor]) -> tilework.Step:
    """The step with the given tensors as its examples, one micro-batch of them all."""
    from dataclasses import replace

    from tilework.artifact.structure import unflatten

    structure = flatten(step.inputs)[1]
    examples = [g.detach().clone().requires_grad_(e.requires_grad) for g, e in zip(given, flatten(step.inputs)[0], strict=True)]
    return replace(step, inputs=unflatten(structure, iter(examples)), num_micro_batches=1, examples="data")
