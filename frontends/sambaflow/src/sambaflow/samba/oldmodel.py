"""Methods that converted models had in the oldest releases. They are plain functions, so that a whole model can be pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def run(inputs: Any, section_types: Sequence[str] | None = None, grad_of_outputs: Any = None, **rest: Any) -> Any:
    """model.run(...): samba.session.run for the traced model."""
    from .sambasession import session

    return session.run(inputs, section_types=section_types, grad_of_outputs=grad_of_outputs, **rest)


def write_host_params() -> None:
    """model.write_host_params(): the newer side wins, because no public text says which way is meant. Parameters that the host
    has changed since the last sync go to the device; otherwise the device's weights come to the host."""
    from .sambasession import session

    if session._traced_runner().host_has_changed():
        session.to_rdu()
    else:
        session.to_cpu()
