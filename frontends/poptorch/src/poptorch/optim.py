"""poptorch.optim: torch's optimizers with the arguments that PopTorch adds. No Python code of an optimizer runs in training; its
update rule is compiled, and its values are sent to the device by setOptimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import tilework

from .errors import StateError, WrongValue


class VariableAttributes:
    """Which attributes may change after the compile. lr always may; what the program gave may; defaults may not."""

    def __init__(self, known: Iterable[str], variable: Iterable[str]) -> None:
        self._known = set(known)
        self._variable = {"lr", *variable} & self._known

    def _check(self, name: str) -> None:
        if name not in self._known:
            raise WrongValue(
                "poptorch-optimizer", f"unknown attribute {name!r} of the optimizer", expected=", ".join(sorted(self._known))
            )

    def isConstant(self, name: str) -> bool:
        self._check(name)
        return name not in self._variable

    def markAsConstant(self, name: str) -> None:
        self._check(name)
        self._variable.discard(name)

    def markAsVariable(self, name: str) -> None:
        self._check(name)
        self._variable.add(name)


NO_EFFECT = ("loss_scaling", "velocity_scaling")  # in groups as well; the update is the same with any value
# What torch leaves out of copies and pickles.
_KEPT = ("variable_attrs", "loss_scaling", "velocity_scaling", "max_grad_norm", "use_combined_accum", "accum_type",
         "velocity_accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type")  # fmt: skip


class Optimizer:
    """What the optimizers of this module have in common. They are optimizers of torch as well."""

    variable_attrs: VariableAttributes
    loss_scaling: float
    max_grad_norm: float | None
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    _state_of: Any = None  # a weak reference to the executor whose device has the state
    _loaded: tuple[Any, Any] | None = None  # (ipu_state, ipu_param) that no device has: loaded, or brought back from one

    def _set_up(self, given: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            if name.endswith("accum_type") and value not in (None, torch.float16, torch.float32):
                raise WrongValue("poptorch-optimizer", f"{name} is torch.float16 or torch.float32", found=repr(value))
            vars(self)[name] = value
        if extra.get("loss_scaling") is None:
            self.loss_scaling = 1.0
        hyper = {k for k in self.defaults if k not in ("params", "foreach", "capturable", "differentiable", "fused")}
        self.variable_attrs = VariableAttributes(hyper | set(extra), [k for k, v in given.items() if v is not None])
        self.defaults |= {k: 1.0 if extra[k] is None else extra[k] for k in NO_EFFECT if k in extra}
        self._fill_groups()

    def _fill_groups(self) -> None:
        for group in self.param_groups:
            for name in NO_EFFECT:
                if name in self.defaults:
                    group.setdefault(name, self.defaults[name])

    def _state_now(self) -> tuple[Any, Any] | None:
        """(ipu_state, ipu_param), wherever they are. None before the compile."""
        executor = self._state_of() if self._state_of is not None else None
        if self._loaded is not None or executor is None:
            return self._loaded
        found: tuple[Any, Any] | None = executor._optimizer_state()
        return found

    def state_dict(self) -> dict[str, Any]:
        """torch's, with the device's own under ipu_state and ipu_param: None before the compile."""
        state, param = self._state_now() or (None, None)
        return {**super().state_dict(), "ipu_state": state, "ipu_param": param}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "ipu_state" not in state_dict:
            raise StateError("poptorch-optimizer", "Only IPU optimizer states can be loaded onto IPU.",
                             fix="load the state_dict() of an optimizer of poptorch.optim")  # fmt: skip
        own = {k: v for k, v in state_dict.items() if k not in ("ipu_state", "ipu_param")}
        super().load_state_dict(own)  # type: ignore[misc]
        self._fill_groups()
        self._loaded = state_dict["ipu_state"], state_dict.get("ipu_param")
        executor = self._state_of() if self._state_of is not None else None
        if executor is not None:
            executor._take_loaded(self)

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles: with the clip, and with the state that the device has now."""
        kept = {k: v for k, v in vars(self).items() if k in _KEPT}
        return {**super().__getstate__(), **kept, "_state_of": None, "_loaded": self._state_now()}  # type: ignore[misc, dict-item]


class SGD(Optimizer, torch.optim.SGD):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        given = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "loss_scaling": loss_scaling,
                 "velocity_scaling": velocity_scaling, "max_grad_norm": max_grad_norm}  # fmt: skip
        super().__init__(params, lr=lr, momentum=momentum or 0, dampening=dampening or 0, weight_decay=weight_decay or 0,
                         nesterov=bool(nesterov), maximize=bool(maximize))  # fmt: skip
        self._set_up(given, {"loss_scaling": loss_scaling, "velocity_scaling": velocity_scaling, "accum_type": accum_type,
                             "use_combined_accum": bool(use_combined_accum), "velocity_accum_type": velocity_accum_type,
                             "max_grad_norm": max_grad_norm})  # fmt: skip


class Adam(Optimizer, torch.optim.Adam):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        _no_amsgrad(amsgrad)
        given = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "loss_scaling": loss_scaling,
                 "max_grad_norm": max_grad_norm}  # fmt: skip
        super().__init__(params, lr=lr, betas=betas or (0.9, 0.999), eps=1e-8 if eps is None else eps,
                         weight_decay=weight_decay or 0, maximize=bool(maximize))  # fmt: skip
        self._set_up(given, {"loss_scaling": loss_scaling, "accum_type": accum_type, "max_grad_norm": max_grad_norm,
                             "first_order_momentum_accum_type": first_order_momentum_accum_type,
                             "second_order_momentum_accum_type": second_order_momentum_accum_type})  # fmt: skip


class AdamW(Optimizer, tilework.optim.AdamW):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        bias_correction: bool = True,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        _no_amsgrad(amsgrad)
        given = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "loss_scaling": loss_scaling,
                 "max_grad_norm": max_grad_norm}  # fmt: skip
        super().__init__(
            params,
            lr=lr,
            betas=betas or (0.9, 0.999),
            eps=1e-8 if eps is None else eps,
            maximize=bool(maximize),
            weight_decay=0.01 if weight_decay is None else weight_decay,
            bias_correction=bias_correction,
        )
        self._set_up(given, {"loss_scaling": loss_scaling, "accum_type": accum_type, "max_grad_norm": max_grad_norm,
                             "first_order_momentum_accum_type": first_order_momentum_accum_type,
                             "second_order_momentum_accum_type": second_order_momentum_accum_type})  # fmt: skip


class RMSprop(Optimizer, tilework.optim.RMSprop):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        given = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "loss_scaling": loss_scaling}
        super().__init__(params, lr=lr, alpha=0.99 if alpha is None else alpha, eps=1e-8 if eps is None else eps,
                         weight_decay=weight_decay or 0, momentum=momentum or 0, centered=bool(centered), maximize=bool(maximize),
                         use_tf_variant=bool(use_tf_variant))  # fmt: skip
        self._set_up(given, {"loss_scaling": loss_scaling, "accum_type": accum_type, "max_grad_norm": None,
                             "first_order_momentum_accum_type": first_order_momentum_accum_type,
                             "second_order_momentum_accum_type": second_order_momentum_accum_type})  # fmt: skip


class LAMB(Optimizer, tilework.optim.LAMB):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool = True,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        given = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "loss_scaling": loss_scaling,
                 "max_weight_norm": max_weight_norm}  # fmt: skip
        super().__init__(
            params,
            lr=lr,
            betas=betas or (0.9, 0.999),
            eps=1e-8 if eps is None else eps,
            weight_decay=weight_decay or 0.0,
            bias_correction=bias_correction,
            max_weight_norm=max_weight_norm,
        )
        self._set_up(given, {"loss_scaling": loss_scaling, "accum_type": accum_type, "max_grad_norm": None,
                             "first_order_momentum_accum_type": first_order_momentum_accum_type,
                             "second_order_momentum_accum_type": second_order_momentum_accum_type})  # fmt: skip


def _no_amsgrad(amsgrad: bool | None) -> None:
    if amsgrad:
        raise WrongValue(
            "poptorch-optimizer", "Only non-amsgrad Adam/AdamW optimizers are supported.", fix="leave out amsgrad=True"
        )
