"""An optimizer's state by itself, between torch and a session; and a model's parameters by name."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from ..reach import hidden_parameters
from ..runtime import sync
from ..runtime.session import Session


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """With those that no module has registered."""
    return {**hidden_parameters(model), **dict(model.named_parameters())}


def state_to_device(session: Session, model: nn.Module, optimizer: Optimizer) -> None:
    """The state, and no weights. `model` says which parameter is which."""
    sync.optimizers_to_device(session.memory, [optimizer], sync.by_buffer(session.manifest, sync.host_tensors(model)))


def state_to_host(session: Session, model: nn.Module, optimizer: Optimizer) -> None:
    sync.optimizers_to_host(session.memory, [optimizer], sync.by_buffer(session.manifest, sync.host_tensors(model)))
