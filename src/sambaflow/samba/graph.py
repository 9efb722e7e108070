"""FwdGraph: one of several graphs in a PEF."""

from __future__ import annotations

from typing import Any

from .sambasession import _refused


class FwdGraph:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise _refused("several graphs in one PEF (FwdGraph)")
