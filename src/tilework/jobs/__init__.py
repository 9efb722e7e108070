"""Jobs: commands in a queue. The machine's own queue where there is no Slurm, and Slurm where there is; the same calls for both.

queue = tilework.jobs.queue()
job = queue.submit(Spec(command=("python", "train.py"), tiles="2"))
queue.wait([job.id])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .spec import Job, Queue, Spec, State

if TYPE_CHECKING:
    from .choose import queue

__all__ = ["Job", "Queue", "Spec", "State", "queue"]


def __getattr__(name: str) -> Any:
    if name != "queue":
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    from .choose import queue

    return queue
