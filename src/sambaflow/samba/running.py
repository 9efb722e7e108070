"""samba.session.run: inputs, sections and hyperparameters as apps give them, to one call of a tilework session."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilework
from tilework.artifact.structure import flatten
from tilework.errors import did_you_mean

from .. import logging
from .compiling import METADATA, compile_to, leaves
from .sambatensor import SambaTensor, to_torch

SECTIONS = {"fwd": "fwd", "forward": "fwd", "bckwd": "bwd", "bwd": "bwd", "backward": "bwd", "opt": "opt", "optim": "opt",
            "gradnorm": "opt", "reduce": "reduce"}  # fmt: skip
HYPER = ("lr", "momentum", "weight_decay", "p")


class Runner:
    """A loaded PEF beside the app's model and optimizers."""

    def __init__(self, path: Path | str, model: nn.Module, optimizers: Sequence[Any], step: Any, num_spatial: int) -> None:
        self.core = tilework.load(path)
        self.path, self.model, self.optimizers, self.step = path, model, list(optimizers), step
        self.num_spatial = num_spatial  # steps in one run with --mapping spatial
        self.manifest = m = self.core.manifest
        for optimizer in self.optimizers:  # a scheduler checks that steps were made: they are, on the device
            optimizer._opt_called = True
        self.inference = bool(m.metadata.get(METADATA, {}).get("inference", False))
        self.outputs: list[SambaTensor] = []  # of the last forward
        self._dtypes = [self.core.buffers[f"input/{a.name}"].dtype for a in m.inputs]
        self._rows = self._batch_rows()
        self._given: dict[str, float] = {}  # by hyperparam_dict, until it says something else
        self._set: dict[str, Any] = {}
        self._others: dict[int, Runner] = {}  # for batches of other sizes
        self._bare = {k.split("#")[0].rsplit(".", 1)[-1] for k in m.hyperparameters}

    def _batch_rows(self) -> int | None:
        """Rows of one run: the batch of the artifact times its micro-batches."""
        dim = self.manifest.batch_dim
        if dim is None:
            return None
        sizes = [a.type.shape[dim] for a in self.manifest.inputs if len(a.type.shape) > dim]
        return sizes[0] * self.manifest.num_micro_batches if sizes else None

    # ---- one run ----

    def run(
        self,
        input_tensors: Any = None,
        section_types: Sequence[str] | None = None,
        hyperparam_dict: Mapping[str, Any] | None = None,
        out_grads: Sequence[Tensor | None] | None = None,
        inference: bool = False,
    ) -> list[SambaTensor]:
        given = self._flat(input_tensors)
        sections = self._sections(section_types, inference)
        self._set_hyper(hyperparam_dict)
        rows, steps = self._rows_of(given), 1
        if rows is not None and self._rows is not None and rows != self._rows and "fwd" in sections:
            if rows % self._rows or self.num_spatial == 1:
                return self._other(rows, given, section_types, hyperparam_dict, out_grads, inference)
            steps = rows // self._rows
        if sections == {"fwd"}:
            in_eval = self.inference or inference or not self.model.training
            return self._keep(self._forward(given, steps, in_eval))
        if out_grads is None and sections >= self._all():
            return self._keep(self.core.run(*given, num_steps=steps).flat)
        order = [s for s in ("fwd", "bwd", "opt") if s in sections]
        grads = (
            {a.name: g for a, g in zip(self.manifest.outputs, out_grads, strict=False) if g is not None} if out_grads else None
        )
        result = self.core.run(
            *(given if "fwd" in sections else ()), sections=order, out_grads=grads if "bwd" in sections else None
        )
        return self._keep(result.flat) if "fwd" in sections else self.outputs

    def _all(self) -> set[str]:
        return set(self.core.training_sections) - {"reduce"}

    def _flat(self, given: Any) -> list[Tensor]:
        """Plain tensors in the artifact's order and dtypes. Names of a dict decide; None entries fall away."""
        if given is None:
            return []
        if isinstance(given, Mapping):
            given = self._by_name(given)
        found = [g for g in (given if isinstance(given, (list, tuple)) else [given]) if g is not None]
        if any(isinstance(g, (list, tuple, dict)) for g in found):
            found = leaves(found)
        if len(found) != len(self._dtypes):
            return [to_torch(g) for g in found]  # the engine says what is wrong
        return [_as(g, dtype) for g, dtype in zip(found, self._dtypes, strict=True)]

    def _by_name(self, given: Mapping[str, Any]) -> list[Any]:
        """By the names of forward's arguments, or by those that the tensors had when they were compiled."""
        own = [a.name for a in self.manifest.inputs]
        named = self.manifest.metadata.get(METADATA, {}).get("inputs", [])
        tensors = {k: v for k, v in given.items() if v is not None}
        for names in (own, named):
            if set(names) == set(tensors):
                return [tensors[n] for n in names]
        unknown = sorted(set(tensors) - set(own))
        raise tilework.UserError(
            "sambaflow-inputs", "the inputs have other names than were compiled",
            found=", ".join(tensors), expected=", ".join(own) + (f" (or {', '.join(map(str, named))})" if any(named) else ""),
            fix=did_you_mean(unknown[0], own) if unknown else "",
        )  # fmt: skip

    def _rows_of(self, given: Sequence[Tensor]) -> int | None:
        dim = self.manifest.batch_dim
        if dim is None or len(given) != len(self.manifest.inputs):
            return None
        for tensor, argument in zip(given, self.manifest.inputs, strict=True):
            if len(argument.type.shape) > dim and tensor.dim() == len(argument.type.shape):
                return tensor.shape[dim]
        return None

    def _sections(self, asked: Sequence[str] | str | None, inference: bool) -> set[str]:
        if asked is None:
            return {"fwd"} if inference or self.inference else self._all()
        names = [asked] if isinstance(asked, str) else list(asked)
        unknown = [s for s in names if str(s).lower() not in SECTIONS]
        if unknown:
            raise tilework.UserError("sambaflow-section", f"no section {unknown[0]!r}",
                                     expected="fwd, bckwd, gradnorm, reduce, opt",
                                     fix=did_you_mean(str(unknown[0]).lower(), SECTIONS))  # fmt: skip
        found = {SECTIONS[str(s).lower()] for s in names} - {"reduce"}
        missing = sorted(found - self._all()) if found != {"fwd"} else []
        if missing:
            raise tilework.UserError("sambaflow-section", f"{self.path}: this PEF has no section {missing[0]!r}",
                                     found="sections: " + (", ".join(sorted(self._all())) or "fwd (inference)"),
                                     fix="compile it without --inference, with an optimizer")  # fmt: skip
        return found

    def _forward(self, given: list[Tensor], steps: int, in_eval: bool) -> list[Tensor]:
        """Forward alone, batch by batch where several were given: as in eval mode, or as in training."""
        count, dim = steps * self.manifest.num_micro_batches, self.manifest.batch_dim or 0
        if in_eval:
            outputs = list(flatten(self.core.infer(*given, num_batches=count))[0])
        elif count == 1:
            outputs = self.core.run(*given, sections=["fwd"]).flat
        else:
            batches = zip(*(g.chunk(count, dim) for g in given), strict=True)
            parts = [self.core.run(*batch, sections=["fwd"]).flat for batch in batches]
            outputs = [torch.stack(p) if p[0].dim() == 0 else torch.cat(p, dim) for p in zip(*parts, strict=True)]
        return [self._a_step(o, steps) if count > steps and o.shape == (count,) and o.is_floating_point() else o for o in outputs]

    @staticmethod
    def _a_step(losses: Tensor, steps: int) -> Tensor:
        """Of each micro-batch -> of each step; a single one is a scalar, as in training."""
        mean = losses.reshape(steps, -1).mean(1)
        return mean if steps > 1 else mean[0]

    def _keep(self, raw: Sequence[Tensor]) -> list[SambaTensor]:
        self.outputs = made = [t.as_subclass(SambaTensor) for t in raw]
        for tensor, argument in zip(made, self.manifest.outputs, strict=False):
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
            self._given |= {k: float(v) for k, v in given.items() if k in self._bare}
        now = dict(self._given)
        for i, optimizer in enumerate(self.optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for key in ("lr", "momentum", "weight_decay"):
                    if key in group and key not in self._given and f"opt{i}.g{j}.{key}" in self.manifest.hyperparameters:
                        now[f"opt{i}.g{j}.{key}"] = float(group[key])
        if now != self._set:
            self.core.set(now)
            self._set = now

    # ---- other batch sizes ----

    def _other(self, rows: int, given: list[Tensor], *rest: Any) -> list[SambaTensor]:
        """A batch of another size (the last of an epoch, say): the same step, captured once for that size and replayed by
        PyTorch, on the same weights."""
        if self.step is None:
            self.core.run(*given)  # raises, with every mismatch
        if rows not in self._others:
            logging.samba_logger.warning(f"a batch of {rows} instead of {self._rows} rows: the step is captured once more for "
                                         "that size and runs on the reference device, which is slower", log_limit=1)  # fmt: skip
            step = _resized(self.step, self.manifest, given)
            with tempfile.TemporaryDirectory() as folder:
                made = compile_to(step, Path(folder) / "other.pef", lambda _: None, inference=self.inference, device="reference")
                self._others[rows] = Runner(made.path, self.model, self.optimizers, None, 1)
        other = self._others[rows]
        _copy_tensors(self.core, other.core)
        section_types, hyper, grads, inference = rest
        other._given = dict(self._given)
        outputs = other.run(given, section_types, hyper, grads, inference)
        _copy_tensors(other.core, self.core)
        self.outputs = outputs
        return outputs


def _copy_tensors(source: tilework.Session, target: tilework.Session) -> None:
    """Weights and optimizer state, as far as both have them: without an optimizer there is no state."""
    target.load_tensors({k: t for k, t in source.tensors().items() if k in target.buffers})


def _as(value: Any, dtype: torch.dtype) -> Tensor:
    tensor = to_torch(value)
    if tensor.dtype is dtype:
        return tensor
    if tensor.is_floating_point() != dtype.is_floating_point and dtype != torch.bool:
        return tensor  # not a matter of width: the engine says what is wrong
    return tensor.to(dtype)


def _resized(step: tilework.Step, manifest: Any, given: Sequence[Tensor]) -> tilework.Step:
    """The step with the given tensors as its examples, one micro-batch of them all."""
    from dataclasses import replace

    from tilework.artifact.structure import unflatten

    structure = flatten(step.inputs)[1]
    examples = [g.detach().clone().requires_grad_(e.requires_grad) for g, e in zip(given, flatten(step.inputs)[0], strict=True)]
    return replace(step, inputs=unflatten(structure, iter(examples)), num_micro_batches=1)
