"""What the host has changed since the compile, and a session cannot know by itself: said once, before it trains."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from .. import hosts
from ..artifact.names import Buffer, Kind
from ..artifact.reader import Artifact
from ..errors import TileworkWarning
from .sync import host_tensors

_SHOWN = 5  # names in one message


def advise(artifact: Artifact, followed: Sequence[torch.optim.Optimizer], sets_hyper: bool, stacklevel: int) -> None:
    """sets_hyper: the caller gives the session hyperparameters himself, so what a scheduler does to the host's is his business.
    stacklevel: of the caller's own line, counted from here."""
    host = hosts.host_of(artifact.digest)
    if host is None:
        return
    updated = {Kind.PARAM.of(p.name) for p in artifact.manifest.parameters if p.group is not None}
    tensors = host_tensors(host.model, host.loss)
    frozen = [Buffer(k).name for k, t in tensors.items() if k in updated and not t.requires_grad]
    if frozen:
        more = f" and {len(frozen) - _SHOWN} more" if len(frozen) > _SHOWN else ""
        warnings.warn(
            f"{artifact.path}: these parameters were frozen (requires_grad=False) after the compile, and this session goes on "
            f"training them: {', '.join(frozen[:_SHOWN])}{more}. To keep them as they are, compile again.",
            TileworkWarning, stacklevel=stacklevel + 1,
        )  # fmt: skip
    if not sets_hyper and any(_has_scheduler(o) and all(o is not f for f in followed) for o in host.optimizers):
        warnings.warn(
            f"{artifact.path}: the optimizer has a learning-rate scheduler, and this session does not see what it does. "
            "session.follow(optimizer) takes its hyperparameters before each call; session.set(lr=...) and hyper= give them by "
            "hand.",
            TileworkWarning, stacklevel=stacklevel + 1,
        )  # fmt: skip


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """torch's schedulers leave their marks on the groups that they look after, and on step()."""
    marked = any("initial_lr" in group for group in optimizer.param_groups)
    return marked or getattr(optimizer.step, "_wrapped_by_lr_sched", False)
