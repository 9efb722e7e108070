"""From a Python function over tensors to a Graph: trace with fake tensors, lift what it closes over, make it functional.

The user's modules are traced as they are, not copied and not re-parametrised, so parameters that are reached through
closures or unregistered modules are found too: the tracer meets the very tensor objects, and we know them by identity.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from ..artifact.graph import Graph, Node, Ref, TensorType
from ..errors import BugError, Place, TileworkError, UserError
from ..process import without_warnings
from .source import line_text, short, user_line_of_exception, user_line_of_stack

aten = torch.ops.aten

# native_batch_norm does not declare that it changes the running statistics; its decomposition does so in the open.
_DECOMPOSITIONS = get_decompositions(
    [
        aten.native_batch_norm,
        aten.native_batch_norm_backward,
        aten._native_batch_norm_legit,
        aten._batch_norm_impl_index,
        aten._weight_norm_interface,
    ]
)


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """w = v g / |v|, with |v| over all dimensions but `dim`: torch has no decomposition of its backward."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad * v).sum(others, keepdim=True)
    return (g / norms) * (grad - v * along / (norms * norms)), along / norms


_DECOMPOSITIONS[aten._weight_norm_interface_backward.default] = _weight_norm_backward
_IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default,
               aten.lift.default}  # fmt: skip


class Traced:
    """A functional fx graph, the tensors it closed over, and what happens to mutated ones."""

    def __init__(self, module: torch.fx.GraphModule, closed_over: list[Tensor], num_args: int) -> None:
        self.module = module
        self.closed_over = closed_over  # placeholders after the first num_args, in order
        self.num_args = num_args


@contextmanager
def explained():  # type: ignore[no-untyped-def]
    """Turns what goes wrong while the user's code is traced into an error that points at the user's line."""
    try:
        yield
    except TileworkError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as e:
        raise _at_user_line(e, "it depends on a tensor's value, which does not exist yet when the step is compiled",
                            "choose with torch.where, or compute it on the host before the step") from e  # fmt: skip
    except Exception as e:
        if user_line_of_exception(e) is None:
            raise
        text = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise _at_user_line(e, f"tracing failed here: {type(e).__name__}: {text}",
                            "if this runs in eager PyTorch, rewrite it with other PyTorch operators") from e  # fmt: skip


def _at_user_line(e: BaseException, why: str, fix: str) -> UserError:
    at = user_line_of_exception(e) or ("?", 0)
    return UserError("capture-python", "1 place in the model cannot be captured",
                     places=[Place(short(*at), line_text(*at), why, fix)])  # fmt: skip


def trace(fn: Callable[..., Sequence[Tensor]], args: Sequence[Tensor]) -> Traced:
    """fn takes and returns flat tensors. It may close over tensors and change them in place."""
    with without_warnings():
        with fx_traceback.preserve_node_meta(), _PlainRecurrent():
            with explained():
                module = make_fx(
                    fn,
                    tracing_mode="fake",
                    decomposition_table=_DECOMPOSITIONS,  # type: ignore[arg-type]
                    _allow_non_fake_inputs=True,
                    record_stack_traces=True,
                )(*[a.detach() for a in args])
            _share_source_lines(module.graph)
            closed_over = _lift(module)
            example = [*args, *closed_over]

            def interpret(*values: Tensor) -> Any:
                return torch.fx.Interpreter(module).run(*values)

            try:
                functional = make_fx(torch.func.functionalize(interpret, remove="mutations"), tracing_mode="fake")(
                    *[e.detach() for e in example]
                )
            except RuntimeError as e:
                raise UserError(
                    "capture-overlap",
                    "the model changes a tensor in place in a way that torch cannot write without changes",
                    found=str(e).splitlines()[0][:300],
                    fix="copy it first (x = x.clone()), or write it with operators that make new tensors",
                ) from e
    return Traced(functional, closed_over, len(args))


class _PlainRecurrent(TorchFunctionMode):
    """Without oneDNN, an LSTM is traced as the plain operators that it consists of, not as one opaque operator. The switch is the
    whole process's, so it is thrown for no longer than such a call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is not torch.lstm:
            return func(*args, **(kwargs or {}))
        before = torch._C._get_mkldnn_enabled()
        torch._C._set_mkldnn_enabled(False)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch._C._set_mkldnn_enabled(before)


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """torch.autograd.grad with allow_unused. Called by that name it would be intercepted by modes over torch's functions, which
    are off inside what they intercept: parts of the model that run again in the backward pass would not be seen."""
    from torch.autograd.graph import _engine_run_backward

    return _engine_run_backward(tuple(outputs), tuple(seeds), False, False, tuple(inputs), True, accumulate_grad=False)


def keep_backward_sources(outputs: Sequence[Tensor]) -> None:
    """Lets backward nodes carry the sequence number of the forward node they belong to."""
    from torch._functorch._aot_autograd import logging_utils

    by_tensors = getattr(logging_utils, "setup_stacktrace_preservation_hooks_from_tensors", None)
    if by_tensors is not None:
        by_tensors(list(outputs))
    else:  # torch 2.11
        logging_utils.setup_stacktrace_preservation_hooks([o.grad_fn for o in outputs if o.grad_fn is not None])


def _share_source_lines(graph: torch.fx.Graph) -> None:
    """Gives backward nodes the source line of the forward node with their sequence number."""
    by_number: dict[int, str] = {}
    for node in graph.nodes:
        backward = node.meta.get("autograd_backward") or node.meta.get("partitioner_tag") == "is_backward"
        number, stack = node.meta.get("seq_nr"), node.stack_trace
        if not backward and number is not None and user_line_of_stack(stack):
            by_number.setdefault(number, stack)
        elif backward and number in by_number:
            node.meta["stack_trace"] = by_number[number]
            node.meta["custom_backward"] = True
            node.stack_trace = by_number[number]


def _lift(module: torch.fx.GraphModule) -> list[Tensor]:
    """Turns every tensor that the graph holds as an attribute into a placeholder; returns those tensors."""
    graph = module.graph
    last = [n for n in graph.nodes if n.op == "placeholder"]
    anchor = last[-1] if last else None
    lifted: dict[int, torch.fx.Node] = {}
    values: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        value = getattr(module, str(node.target))
        if not isinstance(value, Tensor):
            raise BugError("capture-attribute", f"the trace holds an attribute that is no tensor: {node.target}")
        if id(value) not in lifted:
            inserting = graph.inserting_after(anchor) if anchor else graph.inserting_before(next(iter(graph.nodes)))
            with inserting:
                anchor = lifted[id(value)] = graph.placeholder(f"lifted_{len(values)}")
            values.append(value)
        node.replace_all_uses_with(lifted[id(value)])
        graph.erase_node(node)
    graph.set_codegen(torch.fx.graph.CodeGen())
    graph.lint()
    module.recompile()
    return values


def to_graph(name: str, traced: Traced, reads: Sequence[str], results: Sequence[str | None], section: str) -> Graph:
    """A Graph whose placeholders are the buffers `reads`, and whose i-th result is written to buffer `results[i]`.

    In-place changes of placeholders (buffers that forward updates) become writes as well.
    """
    nodes: list[Node] = []
    env: dict[torch.fx.Node, str] = {}
    types: dict[str, TensorType] = {}
    placeholders = iter(reads)
    writes: dict[str, str] = {}
    taken = set(reads)

    def arg(value: Any) -> Any:
        if isinstance(value, torch.layout) and value != torch.strided:
            raise UserError("capture-operator", f"the model uses sparse tensors ({value}), for which no device has code",
                            fix="use dense tensors, for example nn.Embedding(sparse=False)")  # fmt: skip
        if isinstance(value, torch.fx.Node):
            return Ref(env[value])
        if isinstance(value, (list, tuple)):
            return [arg(v) for v in value]
        if isinstance(value, torch.SymInt):
            return int(value)
        return value

    for node in traced.module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(placeholders)
            types[env[node]] = TensorType.of(node.meta["val"])
        elif node.op == "output":
            flat = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
            for buffer, value in zip(results, flat, strict=True):
                if buffer is not None and value is not None:
                    writes[buffer] = env[value]
                    types.setdefault(buffer, TensorType.dense(*_plain(value.meta["val"])))  # one that is read keeps its layout
        elif node.target is aten.copy_.default and node.args[0].op == "placeholder":
            writes[env[node.args[0]]] = env[node.args[1]]
        elif node.target in _IDENTITIES:
            env[node] = env[node.args[0]]
        elif node.op == "call_function":
            n = _node(node, arg, taken, section)
            env[node] = n.name
            nodes.append(n)
        else:
            raise BugError("capture-node", f"unexpected node in a trace: {node.format_node()}")
    graph = Graph(name, tuple(reads), tuple(nodes), tuple(writes.items()), types).prune()
    graph.verify()
    return graph


def _plain(value: Tensor) -> tuple[str, tuple[int, ...]]:
    t = TensorType.of(value)
    return t.dtype, t.shape


def _node(node: torch.fx.Node, arg: Callable[[Any], Any], taken: set[str], section: str) -> Node:
    at = user_line_of_stack(node.stack_trace)
    target = "getitem" if node.target is operator.getitem else str(node.target)
    if not (target == "getitem" or target.startswith(("aten.", "prims.", "tilework."))):
        raise UserError(
            "capture-operator", f"operator {target} is not one of PyTorch's own, so no backend has code for it",
            places=[Place(short(*at), line_text(*at), "no backend has code for it", "write it with PyTorch's operators")]
            if at else (),
        )  # fmt: skip
    name, count = node.name, 0
    while name in taken:
        count += 1
        name = f"{node.name}_{count}"
    taken.add(name)
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return Node(
        name=name,
        op=target,
        args=tuple(arg(a) for a in node.args),
        kwargs={k: arg(v) for k, v in node.kwargs.items()},
        types=tuple(TensorType.of(v) if isinstance(v, (Tensor, FakeTensor)) else None for v in values),
        where=short(*at) if at else "",
        source=line_text(*at) if at else "",
        section=section,
    )
