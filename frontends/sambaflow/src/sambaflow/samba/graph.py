"""FwdGraph: one of several graphs in a PEF."""

from __future__ import annotations

from typing import Any

from .refusals import refused


class FwdGraph:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise refused("several graphs in one PEF (FwdGraph)")
