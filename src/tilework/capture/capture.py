"""capture(step) -> StepGraph: what the user's training step is, once PyTorch is out of the way."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..artifact.graph import Graph, TensorType
from ..artifact.manifest import Argument, Check, Signature
from ..artifact.manifest import Tensor as TensorEntry
from ..artifact.names import SEED, Buffer, Hyper, Kind, hyper_kind, is_kind
from ..artifact.structure import Structure, flatten, flatten_outputs, names, unflatten
from ..errors import UserError
from ..hosts import steps_made
from ..step import Step
from .chance import Gate
from .examples import few_rows, settled
from .losses import from_losses
from .opt import opt_graph
from .optimizers import Group, groups_of
from .partition import label_sections, partition
from .pooling import pooling
from .probe import Probe, evaluate, preserved, refuse, run_probe
from .reached import as_tensor
from .reads import Answers, Read
from .rewrites import captured
from .seeded import seeded
from .shapes import NeedsValues, Shapes, with_memory
from .synchronised import synchronised
from .trace import gradients, keep_backward_sources, to_graph, trace
from .watch import Findings, WatchFunctions, WatchOperators


@dataclass(frozen=True)
class StepGraph:
    """The step as graphs over named buffers. Printable, hashable by content, and free of the user's objects."""

    sections: dict[str, Graph]  # fwd, bwd, opt; joint = fwd+bwd for the known loss; infer = forward in eval mode
    signature: Signature  # inputs and outputs; no programs yet
    params: dict[str, dict[str, Any]]  # name -> trainable, optimizer group, aliases
    groups: list[dict[str, Any]]
    hyper: dict[str, float]  # run-time scalars and their defaults
    constants: dict[str, Tensor]  # const/... values, which go into the artifact
    aliases: dict[str, str]  # other names of tied tensors
    transient: list[str]  # buffers that are not in the model's state_dict
    precision: str
    train: bool
    metadata: dict[str, Any]
    weights: dict[str, Tensor] = field(repr=False)  # the user's own tensors, by buffer name, to be saved or synced

    def __str__(self) -> str:
        lines = [f"{name}: {len(g.nodes)} operators, {len(g.reads)} reads, {len(g.writes)} writes" for name, g in
                 self.sections.items()]  # fmt: skip
        return "\n".join(lines)


def capture(
    step: Step,
    *,
    keep_momentum: bool = False,
    grad_norm: bool = False,
    num_replicas: int = 1,
    sync_batch_norm: bool = False,
    sections: bool = True,
    constants: Constants | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> StepGraph:
    """Trace the step. The user's model, optimizer and tensors are left as they were.

    sections=False: no fwd and bwd of their own, where the loss is known; only the two together (joint).
    constants: those of the steps that were captured before it, for the same artifact."""
    together = synchronised(step.modules, everywhere=sync_batch_norm) if num_replicas > 1 else nullcontext()
    constants = constants or Constants()
    with _one_at_a_time, together:
        placed, known = with_memory(step), len(constants.values)
        if step.examples == "shapes" or placed is not step:
            try:
                return _Capture(placed, keep_momentum, grad_norm, constants, report, shapes_only=True).run(sections)
            except NeedsValues as e:
                constants.keep_first(known)
                if placed is not step:
                    raise UserError("model-meta", "the model is on the meta device, and shapes are not enough to capture it",
                                    found=str(e), fix="give it weights: model.to_empty(device='cpu') and its own "
                                    "initialization, or load_state_dict()") from e  # fmt: skip
                report(f"looking at the model with values: {e}")
        return _Capture(settled(step), keep_momentum, grad_norm, constants, report).run(sections)


_one_at_a_time = threading.RLock()  # torch traces in one thread of a process at a time, or fails


class Constants:
    """Tensors that models hold outside of their parameters and buffers. One tensor is one constant, in whichever step it is met:
    a model may change it."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []  # so that an id stays its own

    def keep_first(self, count: int) -> None:
        """Forget those that came later: of a capture that was given up."""
        self._held, self.values = self._held[:count], dict(list(self.values.items())[:count])
        self._names = {id(t): name for t, name in zip(self._held, self.values, strict=True)}

    def name_of(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name = Kind.CONST.of(str(len(self.values)))
            self.values[name] = tensor.detach().clone()
            self._held.append(tensor)
        return self._names[id(tensor)]


def _argument_names(function: Any, structure: Structure, prefix: str) -> list[str]:
    """Names for the leaves of a call's arguments, after the function's own parameters where that is possible."""
    plain = names(structure, prefix)
    kind, *items = structure
    if kind not in ("tuple", "list"):
        return plain
    try:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        return plain
    found: list[str] = []
    for i, item in enumerate(items):
        name = parameters[i].name if i < len(parameters) else f"{prefix}{i}"
        found += [name if n == name else f"{name}.{n.removeprefix(name)}" for n in names(item, name)]
    return found


def _ordered_unique(wanted: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in wanted:
        candidate, i = name, 1
        while candidate in found:
            i += 1
            candidate = f"{name}_{i}"
        found.append(candidate)
    return found


class _Capture:
    def __init__(
        self, step: Step, keep_momentum: bool, grad_norm: bool, constants: Constants, report: Callable[[str], None], *,
        shapes_only: bool = False,
    ) -> None:  # fmt: skip
        self.step = step
        self.shapes = Shapes() if shapes_only else None
        self.keep_momentum, self.grad_norm = keep_momentum, grad_norm
        self.report = report
        self.constants = constants
        self.checks: dict[Literal["fwd", "infer"], list[Check]] = {}
        call = step.inputs if isinstance(step.inputs, (tuple, list, dict)) else (step.inputs,)
        targets = step.targets if isinstance(step.targets, (tuple, list)) else (step.targets,)
        self.example_inputs, input_structure = flatten(call)
        self.example_targets, target_structure = flatten(tuple(targets))
        self.input_structure, self.target_structure = input_structure, target_structure
        loss = step.loss_function
        wanted = _argument_names(step.model.forward, input_structure, "input")
        if loss is not None:
            forward = loss.forward if isinstance(loss, nn.Module) else loss
            shifted = ["tuple", ["value", None], *target_structure[1:]]
            wanted += _argument_names(forward, shifted, "target")
        self.input_names = _ordered_unique(wanted)
        # Input buffers are dense, whatever the strides of the examples: a call copies the caller's memory as it lies.
        self.flat = [_dense(t.detach()).requires_grad_(t.requires_grad) for t in (*self.example_inputs, *self.example_targets)]
        if not self.flat:
            raise UserError("inputs-none", "the step has no input tensors", fix="give example inputs: inputs=(x, ...)")

    def run(self, with_sections: bool) -> StepGraph:
        step = self.step
        self.report("looking at the model")
        with ExitStack() as stack:
            if not step.train:  # as it will be run: some models fail in training mode on what they infer, such as one row
                stack.enter_context(preserved(step))
                for _, root in step.modules:
                    root.eval()
            self.probe = probe = self._looked_at()
        self._name_buffers(probe)
        self.formulas = list(dict.fromkeys(probe.when.values()))
        ran = {k: Kind.RAN.of(str(self.formulas.index(formula))) for k, formula in probe.when.items()}
        self.groups = groups_of(step, probe.trainable, self.keep_momentum, ran)
        self._check_optimizers()
        if self.grad_norm and step.train and not any(g.params for g in self.groups):
            raise UserError("options", "grad_norm: the norm is computed in the update, and this step has none",
                            found="no optimizer" if not step.optimizers else "no parameter that the optimizer updates",
                            fix="give the step an optimizer; or leave out grad_norm (--grad-norm), keep the gradients, and "
                            "take the norm on the host: session.gradients()")  # fmt: skip
        self.hyper = self._hyper()
        sections: dict[str, Graph] = {}
        self.changing = list(probe.changing)
        with preserved(step, self.changing):
            if step.train and probe.trainable and any(probe.differentiable):
                self.report("tracing forward and backward")
                joint, losses = None, [self._output_names()[i] for i in probe.losses]
                if with_sections or not losses:
                    any_outgrads = self._joint(with_outgrads=True)
                    sections["fwd"], sections["bwd"] = partition(any_outgrads)
                    joint = from_losses(any_outgrads, losses, self._scale) if losses else None
                if losses:
                    sections["joint"] = label_sections(joint or self._joint(with_outgrads=False))
                if self.groups:
                    self.report("tracing the optimizer")
                    # Where the loss is known, parameters that it does not reach have no gradient: they stay as they are.
                    sections["opt"] = self._opt(sections.get("joint") or sections["bwd"])
            self._take_optimizer_state(sections)
            self.report("tracing inference")
            sections["infer"], infer_structure = self._infer()
        self._check_memory(sections)
        return self._graph(sections, infer_structure)

    # ---- the parts ----

    def _looked_at(self) -> Probe:
        """What a run shows: of shapes, where the examples are only shapes and that is enough; or a real one. Where there are many
        rows, some of them are enough; unless Python reads values, which may be of as many rows as there are."""
        self.few: list[Tensor] | None = None
        if self.shapes is not None:
            return self.shapes.probe(self.step, lambda: self._fresh(self.shapes.of(self.flat)))  # type: ignore[union-attr]
        few = few_rows(self.step, self.flat)
        if few is not None:
            probe = run_probe(self.step, lambda: self._fresh([t.detach().clone() for t in few]))
            if not probe.reads and not probe.chances:
                self.few = few
                return replace(probe, outputs=self._outputs_of_all_rows(probe))
        return run_probe(self.step, self._fresh)

    def _outputs_of_all_rows(self, probe: Probe) -> list[Tensor]:
        """Like the outputs, in shape and type."""

        def forward(*args: Tensor) -> list[Tensor]:
            inputs, targets = self._fresh(args[: len(self.flat)])
            with captured(masks=probe.masks), seeded(args[len(self.flat)], args[len(self.flat) + 1 :]):
                return [o.detach() for o in evaluate(self.step, inputs, targets)[0]]

        args = [*self.flat, torch.tensor(1), *(torch.tensor(s.p, dtype=torch.float64) for s in probe.sites)]
        with preserved(self.step, probe.changing):
            traced = trace(forward, args)
        results = next(n for n in traced.module.graph.nodes if n.op == "output").args[0]
        kinds = [r.meta["val"] for r in results[: len(probe.outputs)]]
        return [torch.zeros((), dtype=k.dtype).expand(k.shape) for k in kinds]

    def _fresh(self, flat: Sequence[Tensor] | None = None) -> tuple[Any, Any]:
        """(inputs, targets) in the user's structure, as leaves of their own."""
        flat = self.flat if flat is None else flat
        leaves = [f.detach().clone() if f is e else f for f, e in zip(flat, self.flat, strict=True)]
        leaves = [leaf.detach().requires_grad_() if e.requires_grad else leaf for leaf, e in zip(leaves, self.flat, strict=True)]
        self.last_leaves = leaves
        n = len(self.example_inputs)
        return unflatten(self.input_structure, iter(leaves[:n])), unflatten(self.target_structure, iter(leaves[n:]))

    def _name_buffers(self, probe: Probe) -> None:
        """id of every tensor that the trace may close over -> its buffer's name."""
        self.known: dict[int, str] = {}
        self.weights: dict[str, Tensor] = {}
        for kind, tensors in (("param", {**probe.trainable, **probe.frozen}), ("buffer", probe.buffers)):
            for name, tensor in tensors.items():
                self.known[id(tensor)] = f"{kind}/{name}"
                self.weights[f"{kind}/{name}"] = tensor

    def _check_optimizers(self) -> None:
        unknown = 0
        used = {id(t) for t in (*self.probe.trainable.values(), *self.probe.frozen.values())}
        for opt in self.step.optimizers:
            for group in opt.param_groups:
                unknown += sum(id(p) not in used for p in group["params"])
        if unknown and not any(g.params for g in self.groups):
            raise UserError(
                "optimizer-foreign",
                "the optimizer holds none of the model's trainable parameters",
                found=f"{unknown} parameters that the model does not use",
                expected="an optimizer made from model.parameters()",
                fix="make the optimizer after the model's final form (for example after model.bfloat16())",
            )

    def _check_memory(self, sections: dict[str, Graph]) -> None:
        """Tensors that lie in the same memory would be copies of their own in a session: right only if none is changed."""
        written = frozenset(b for graph in sections.values() for b in graph.written)
        held = [(name, t) for name, t in self.weights.items() if is_kind(name, Kind.PARAM, Kind.BUFFER)]
        for (name, t), (other, u) in combinations(held, 2):
            if t.untyped_storage()._cdata == u.untyped_storage()._cdata and {name, other} & written and _overlap(t, u):
                raise UserError(
                    "memory-shared",
                    "two tensors of the model share memory, and the step changes it",
                    found=f"{name.split('/', 1)[1]} and {other.split('/', 1)[1]}",
                    expected="tensors with memory of their own (a tensor registered twice under two names is one tensor)",
                    fix="keep one of them and take views of it in forward, or clone() the other",
                )

    def _hyper(self) -> dict[str, float]:
        hyper: dict[str, float] = {}
        for group in self.groups:
            hyper |= {f"{group.prefix}.{k}": float(v) for k, v in group.rule.hyper.items()}
        for name in ("clip_norm", "clip_value"):
            value = getattr(self.step, name)
            if value is not None and self.groups:
                hyper[name] = float(value)
        hyper |= {site.name: site.p for site in self.probe.sites}
        return hyper

    def _output_names(self) -> list[str]:
        own = names(self.probe.structure, "output")
        return _ordered_unique((["loss"] if self.step.loss_function else []) + own)

    def _replaced_buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers that forward re-assigned (self.ema = ...) instead of changing in place, with their new values."""
        now = {f"{p}{k}": b for p, root in self.step.modules for k, b in root.named_buffers(remove_duplicate=False)}
        return [(k, now[k]) for k, b in self.probe.buffers.items() if k in now and now[k] is not b]

    @property
    def _scale(self) -> float:
        """What gradients begin with at the losses: the mean over micro-batches, as if each loss were divided by their number."""
        return 1.0 / self.step.num_micro_batches if self.step.accumulate == "mean" else 1.0

    def _joint(self, *, with_outgrads: bool) -> Graph:
        """Forward and backward in one trace: from the losses, or from a gradient given for every output."""
        probe, n, num_p = self.probe, len(self.flat), len(self.probe.sites)
        outs = self._output_names()
        trainable = list(probe.trainable.values())
        wanted_inputs = [i for i, e in enumerate(self.flat) if e.requires_grad]
        sources = [i for i, d in enumerate(probe.differentiable) if d] if with_outgrads else list(probe.losses)
        outgrads = [torch.ones_like(probe.outputs[i]) for i in sources] if with_outgrads else []
        replaced: list[str] = []

        def joint(*args: Tensor) -> list[Any]:
            inputs, targets = self._fresh(args[:n])
            # Around the backward pass as well: it may run parts of the model again, or draw random numbers of its own.
            with ExitStack() as stack:
                stack.enter_context(captured(masks=probe.masks))
                stack.enter_context(seeded(args[n], args[n + 1 : n + 1 + num_p]))
                gate = Gate(self.step.modules, probe.chances, replaces=True)
                if probe.chances:
                    stack.enter_context(gate.watching())
                answers = stack.enter_context(Answers(probe.reads, gate.decide))
                outputs, _ = evaluate(self.step, inputs, targets)
                keep_backward_sources([outputs[i] for i in sources])
                seeds = list(args[n + 1 + num_p :]) or [torch.full_like(outputs[i], self._scale) for i in sources]
                leaves = [self.last_leaves[i] for i in wanted_inputs]
                grads = gradients([outputs[i] for i in sources], [*trainable, *leaves], seeds)
            new = self._replaced_buffers()
            replaced[:] = [k for k, _ in new]
            ran = [as_tensor(formula, gate.skips) for formula in self.formulas]
            return [*(o.detach() for o in outputs), *(b.detach() for _, b in new), *answers.values(), *ran, *grads]

        args = [*self.flat, torch.tensor(1), *(torch.tensor(s.p, dtype=torch.float64) for s in probe.sites), *outgrads]
        with torch.enable_grad(), preserved(self.step, self.changing):
            traced = trace(joint, args)
        reads = [Kind.INPUT.of(i) for i in self.input_names] + [SEED] + [Kind.HYPER.of(s.name) for s in probe.sites]
        reads += [Kind.OUTGRAD.of(outs[i]) for i in sources] if with_outgrads else []
        reads += [self._closed_over(t) for t in traced.closed_over]
        results = [Kind.OUTPUT.of(o) for o in outs] + [Kind.BUFFER.of(k) for k in replaced] + self._checked("fwd", probe.reads)
        results += [Kind.RAN.of(str(i)) for i in range(len(self.formulas))]
        results += [Kind.GRAD.of(k) for k in probe.trainable] + [Kind.INPUT_GRAD.of(self.input_names[i]) for i in wanted_inputs]
        return pooling(to_graph("joint", traced, reads, results, ""))

    def _closed_over(self, tensor: Tensor) -> str:
        return self.known.get(id(tensor)) or self.constants.name_of(tensor)

    def _checked(self, section: Literal["fwd", "infer"], reads: Sequence[Read]) -> list[str]:
        """The buffer for what the section's checks find, where it has any."""
        checks = [read.check for read in reads if read.check is not None]
        if checks:
            self.checks[section] = checks
        return [Kind.CHECK.of(section)] if checks else []

    def _opt(self, bwd: Graph) -> Graph:
        have = {Buffer(b).name for b in bwd.written if is_kind(b, Kind.GRAD)}
        hyper = [name for name in self.hyper if hyper_kind(name) != Hyper.DROPOUT]
        graph, self.updated = opt_graph(self.groups, self.probe.trainable, have, hyper, grad_norm=self.grad_norm)
        return graph

    def _take_optimizer_state(self, sections: dict[str, Graph]) -> None:
        """An optimizer that has already made steps: its state belongs to the initial weights."""
        if "opt" not in sections:
            return
        for g in self.groups:
            state = self.step.optimizers[int(g.optimizer.removeprefix("opt"))].state
            own = {k: state.get(self.probe.trainable[k], {}) for k in g.params if k in self.updated}
            for k, values in own.items():
                for name in (*g.rule.state, *g.rule.numbers):
                    if isinstance(values.get(name), Tensor) and Kind.STATE.of(f"{k}/{name}") in sections["opt"].types:
                        # A copy: whoever steps the optimizer and puts its state back gives it other tensors.
                        self.weights[Kind.STATE.of(f"{k}/{name}")] = values[name].detach().clone()
            made = steps_made(own, g.prefix, g.rule.kind, "dampening" in g.rule.hyper)
            if made:
                self.weights[Kind.STATE.of(f"{g.counter}/step")] = torch.tensor(made)

    def _infer(self) -> tuple[Graph, Structure]:
        """The model alone, in eval mode: what a training artifact runs for inference."""
        n = len(self.example_inputs)
        structure: Structure = []
        replaced: list[str] = []
        mode: WatchOperators | Answers

        def infer(*args: Tensor) -> list[Tensor]:
            nonlocal structure
            inputs, _ = self._fresh([*args[:n], *self.flat[n:]])
            if isinstance(mode, WatchOperators):
                mode.takes(self.last_leaves)
            with seeded(args[n]), captured(masks=self.probe.masks), self.step.autocast(), mode:
                outputs, structure, _ = flatten_outputs(self.step.call_model(inputs))
            new = self._replaced_buffers()
            replaced[:] = [k for k, _ in new]
            values = mode.values() if isinstance(mode, Answers) else []
            return [*(o.detach() for o in outputs), *(b.detach() for _, b in new), *values]

        with preserved(self.step, self.changing), torch.set_grad_enabled(self.probe.differentiates):
            for _, root in self.step.modules:
                root.eval()
            # For real first: what the model keeps for later must not be made of traced tensors.
            held = [(m._buffers, dict(m._buffers)) for _, root in self.step.modules for m in root.modules()]
            findings = Findings()
            mode = watch = WatchOperators(findings, self.weights.values())
            with self.shapes.watching() if self.shapes is not None else nullcontext(), WatchFunctions(watch):
                examples = self.shapes.of(self.flat) if self.shapes is not None else self.few or self.flat
                infer(*examples[:n], torch.tensor(1))
            watch.put_back()
            refuse(findings)
            for buffers, before in held:  # forward may have put new tensors in their place
                buffers.update(before)
            mode = Answers(watch.reads)
            with preserved(self.step, watch.changing):
                traced = trace(infer, [*self.flat[:n], torch.tensor(1)])
        reads = [Kind.INPUT.of(i) for i in self.input_names[:n]] + [SEED]
        reads += [self._closed_over(t) for t in traced.closed_over]
        self.infer_names = _ordered_unique(names(structure, "output"))
        results = [Kind.INFER.of(o) for o in self.infer_names] + [Kind.BUFFER.of(k) for k in replaced]
        results += self._checked("infer", watch.reads)
        return pooling(to_graph("infer", traced, reads, results, "fwd")), structure

    def _aliases(self) -> dict[str, str]:
        found = {}
        for prefix, root in self.step.modules:
            for name, t in [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]:
                own = self.known.get(id(t), "").partition("/")[2]
                if own and own != f"{prefix}{name}":
                    found[f"{prefix}{name}"] = own
        return found

    def _graph(self, sections: dict[str, Graph], infer_structure: Structure) -> StepGraph:
        step, probe = self.step, self.probe
        outs = self._output_names()
        group_of = {k: g.prefix for g in self.groups for k in g.params}
        return StepGraph(
            sections=sections,
            signature=Signature(
                name=step.signature_name,
                prefix="",
                inputs=[_argument(i, t) for i, t in zip(self.input_names, self.flat, strict=True)],
                num_model_inputs=len(self.example_inputs),
                input_structure=["tuple", self.input_structure, self.target_structure],
                outputs=[_argument(o, t) for o, t in zip(outs, probe.outputs, strict=True)],
                output_structure=probe.structure,
                infer_outputs=[
                    Argument(name=o, type=TensorEntry.of(sections["infer"].types[Kind.INFER.of(o)])) for o in self.infer_names
                ],
                infer_structure=infer_structure,
                losses=[outs[i] for i in probe.losses],
                separate_loss=step.loss_function is not None,
                batch_dim=step.batch_dim,
                num_micro_batches=step.num_micro_batches,
                accumulate=step.accumulate,
                checks=self.checks,
                skips=[chance.skip for chance in probe.chances],
            ),
            params={
                **{k: {"trainable": True, "group": group_of.get(k)} for k in probe.trainable},
                **{k: {"trainable": False, "group": None} for k in probe.frozen},
            },
            groups=[_describe(g) for g in self.groups],
            hyper=self.hyper,
            constants=dict(self.constants.values),
            aliases=self._aliases(),
            transient=[
                f"{prefix}{path}.{k}" if path else f"{prefix}{k}"
                for prefix, root in step.modules
                for path, m in root.named_modules()
                for k in sorted(m._non_persistent_buffers_set)
                if m._buffers.get(k) is not None
            ],
            precision=step.precision,
            train=step.train,
            metadata=dict(step.metadata),
            weights=self.weights,
        )


def _argument(name: str, t: Tensor) -> Argument:
    return Argument(name=name, type=TensorEntry.of(TensorType.of(t).as_dense()))


def _dense(t: Tensor) -> Tensor:
    """With the strides that its shape has by itself; contiguous() leaves those of dimensions of size 1 as they are."""
    dense = t.contiguous()
    return dense if TensorType.of(dense) == TensorType.of(dense).as_dense() else torch.empty(t.shape, dtype=t.dtype).copy_(t)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage have bytes in common, by their first and last."""
    (a0, a1), (b0, b1) = (
        (t.storage_offset() * t.element_size(), (t.storage_offset() + TensorType.of(t).extent) * t.element_size()) for t in (a, b)
    )
    return a0 < b1 and b0 < a1


def _describe(g: Group) -> dict[str, Any]:
    return {
        "prefix": g.prefix,
        "optimizer": g.optimizer,
        "rule": g.rule.kind,
        "params": list(g.params),
        "state": [*g.rule.state, *g.rule.numbers],
        "initial": dict(g.rule.numbers),
        "counter": "" if g.counter == g.prefix else g.counter,
    }
