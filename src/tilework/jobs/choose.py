"""Which queue this machine has: Slurm's where there is one, its own elsewhere."""

from __future__ import annotations

import os

from ..errors import UserError, did_you_mean
from .spec import Queue


def queue(kind: str | None = None) -> Queue:
    """kind: "slurm" or "local"; TILEWORK_QUEUE; otherwise what is there."""
    from .slurm import SlurmQueue, found

    kind = kind or os.environ.get("TILEWORK_QUEUE") or ("slurm" if found() else "local")
    if kind == "slurm":
        return SlurmQueue()
    if kind == "local":
        from .local import LocalQueue

        return LocalQueue()
    raise UserError("job-queue", "there is no such queue", found=kind, expected=did_you_mean(kind, ("local", "slurm")))
