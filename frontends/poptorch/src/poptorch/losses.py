"""Which tensor of forward is the loss. It need not be returned: torch's own losses and identity_loss are seen as they are called,
and the one that no other is made of is where backward begins."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .errors import Error, WrongValue

_NAMES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
    "smooth_l1_loss", "huber_loss", "ctc_loss", "poisson_nll_loss", "gaussian_nll_loss", "hinge_embedding_loss",
    "cosine_embedding_loss", "margin_ranking_loss", "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss",
)  # fmt: skip
LOSSES: frozenset[Any] = frozenset(getattr(F, name) for name in _NAMES)
# What computes in 16 bits as soon as one of its operands has 16: torch itself would refuse the mixture.
_MIXED: frozenset[Any] = frozenset({
    F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.matmul,
    torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__,
    F.layer_norm, F.group_norm, F.scaled_dot_product_attention, F.multi_head_attention_forward, F.prelu, torch.lstm_cell,
    torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell,
})  # fmt: skip
# They also write their running statistics, in the type that these have.
_WITH_STATISTICS: frozenset[Any] = frozenset({F.batch_norm, F.instance_norm})

# Nodes of autograd whose output has the elements of its input, in their order or another, and nothing else.
_COPIES = frozenset({
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2",
    "UnsqueezeBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "AliasBackward0", "CloneBackward0",
    "ToCopyBackward0", "LiftFreshBackward0", "torch::autograd::CopyBackwards",
    "GeneratedBackwardFor_tilework_recompute_from_defaultBackward",  # poptorch.recomputationCheckpoint
})  # fmt: skip
# The same, where the loss has one element.
_COPIES_OF_ONE = frozenset({
    "ExpandBackward0", "RepeatBackward0", "AsStridedBackward0", "SelectBackward0", "SliceBackward0", "IndexBackward0",
    "SplitBackward0", "UnbindBackward0", "StackBackward0", "CatBackward0",
})  # fmt: skip
_REDUCTIONS = frozenset({"SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"})

_current = threading.local()


class Watching(TorchFunctionMode):
    """Around the user's forward: losses in the order in which they are made, blocks as they begin, operands of 16 and 32 bits."""

    def __init__(self, observer: Any = None, *, training: bool = False) -> None:
        super().__init__()
        self.training = training
        self.losses: list[Tensor] = []
        self.observer = observer  # only in the first look at the model
        self._makes_half = False  # the recurrent layer that is running

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_STATISTICS:
            return _normalized(func, *args, **kwargs)
        if func in _MIXED:
            args, kwargs = _halved(args, kwargs)
        result = func(*args, **kwargs)
        if func in LOSSES:
            self.losses.append(result)
        return result

    def __enter__(self) -> Watching:
        self._before = getattr(_current, "watching", None)
        _current.watching = self
        self._hooks = (register_module_forward_pre_hook(self._recurrent), register_module_forward_hook(self._recurred))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        _current.watching = self._before

    def _recurrent(self, module: nn.Module, args: Any) -> Any:
        """LSTM, GRU and RNN refuse 16 bits beside 32 before they call a function: they compute in the type of their weights."""
        if not isinstance(module, nn.RNNBase) or watching() is not self:
            return None
        self._makes_half = _are_mixed((args, list(module.parameters())))
        return _cast(args, next(module.parameters()).dtype) if self._makes_half else None

    def _recurred(self, module: nn.Module, args: Any, result: Any) -> Any:
        if not isinstance(module, nn.RNNBase) or watching() is not self or not self._makes_half:
            return None
        self._makes_half = False
        return _cast(result, torch.float16)


def watching() -> Watching | None:
    """Not None while a wrapped model's forward is looked at or traced."""
    return getattr(_current, "watching", None)


def _normalized(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Of 16 bits with weights or statistics of 32: computed in 32."""
    others = {a.dtype for a in (*args, *kwargs.values()) if isinstance(a, Tensor)}
    if input.dtype == torch.float16 and torch.float32 in others:
        return func(input.float(), *args, **kwargs).half()
    return func(input, *args, **kwargs)


def _halved(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast((args, kwargs), torch.float16) if _are_mixed((args, kwargs)) else (args, kwargs)


def _are_mixed(tree: Any) -> bool:
    given = {a.dtype for a in tree_leaves(tree) if isinstance(a, Tensor) and a.is_floating_point()}
    return given == {torch.float16, torch.float32}


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    both = (torch.float16, torch.float32)
    return tree_map(lambda a: a.to(dtype) if isinstance(a, Tensor) and a.dtype in both else a, tree)


def identity_loss(x: Tensor, reduction: Any) -> Tensor:
    """Marks where backward begins, and reduces: "sum", "mean" or "none"."""
    reduced: dict[Any, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "mean": torch.mean, "none": torch.clone}
    if reduction not in reduced:
        raise WrongValue("poptorch-loss", "Unsupported reduction type!", found=repr(reduction), expected="sum, mean or none")
    result = reduced[reduction](x)
    if (now := watching()) is not None:
        now.losses.append(result)
    return result


def final_loss(losses: Sequence[Tensor]) -> int:
    """The position of the one loss that feeds no other."""
    able = [i for i, loss in enumerate(losses) if isinstance(loss, Tensor) and loss.grad_fn is not None]
    if not able:
        if losses:
            raise Error("poptorch-loss", "Couldn't find a loss in graph!", found="losses that depend on no parameter that "
                                                                                 "is trained",
                        fix="check that forward detaches nothing and that some parameters require a gradient")  # fmt: skip
        raise Error(
            "poptorch-loss",
            "Couldn't find a loss in graph!",
            expected="one of torch's losses, or poptorch.identity_loss, in forward",
        )
    nodes = {losses[i].grad_fn: i for i in able}
    feeding = {nodes[node] for i in able for node in _made_of(losses[i]) if nodes.get(node, i) != i}
    final = [i for i in dict.fromkeys(nodes.values()) if i not in feeding]
    if len(final) != 1:
        raise Error("poptorch-loss", "Multiple independent losses found in graph. Graph must have one final loss. Wrap the "
                                     "final loss in "
                    "poptorch.identity_loss to mark it.", found=f"{len(final)} losses that feed no other")  # fmt: skip
    return final[0]


def require_unchanged(loss: Tensor, returned: Sequence[Tensor]) -> None:
    """Backward begins at the loss as its function gave it, on the original as well. A program that returns something made of it,
    and not the loss itself, probably means that. What was computed decides, not its value: a penalty may be zero at first."""
    made = [t for t in returned if t.grad_fn is not None and loss.grad_fn in _made_of(t)]
    kept = [t for t in returned if t is loss or (t.grad_fn is not None and _is_copy(t, loss))]
    if made and not kept:
        raise Error("poptorch-loss", "The loss is changed after its function has computed it: that change would not be trained",
                    found=f"{_described(made[0])} is returned, made of the loss {_described(loss)}",
                    fix="wrap what is to be trained: poptorch.identity_loss(x, reduction='none'), or 'mean' or 'sum'; to train "
                    "the loss itself, return it as well, or detach what is made of it")  # fmt: skip


def _is_copy(t: Tensor, loss: Tensor) -> bool:
    """Whether nothing but views, copies and casts of the whole loss lie between the two."""
    single = loss.numel() == 1
    node, output = t.grad_fn, t.output_nr
    while node is not loss.grad_fn:
        name = node.name()  # type: ignore[union-attr]
        of_one = name in _COPIES_OF_ONE or (name in _REDUCTIONS and _elements(node) == 1)
        before = [edge for edge in node.next_functions if edge[0] is not None]  # type: ignore[union-attr]
        if not (name in _COPIES or (single and of_one)) or len(before) != 1:
            return False
        node, output = before[0]
    return output == loss.output_nr


def _elements(node: Any) -> int:
    """Of what a reduction was given."""
    return math.prod(node._saved_self_sym_sizes)


def _described(t: Tensor) -> str:
    return f"{t.item():.6g}" if t.numel() == 1 else f"a tensor of shape {list(t.shape)}"


def _made_of(t: Tensor) -> set[Any]:
    """The nodes of autograd that come before a tensor's own."""
    stack, seen = [n for n, _ in t.grad_fn.next_functions], set[Any]()  # type: ignore[union-attr]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
    return seen
