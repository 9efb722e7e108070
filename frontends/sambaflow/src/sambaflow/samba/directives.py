"""Hints for the vendor's compiler, as context managers: they change nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..logging import samba_logger


@contextmanager
def _ignored(name: str) -> Iterator[None]:
    samba_logger.info(f"directives.{name} has no meaning here and is ignored", log_limit=1)
    yield


def op_fusion(*_: Any, **__: Any) -> Any:
    return _ignored("op_fusion")


def sdpa_directives(*_: Any, **__: Any) -> Any:
    return _ignored("sdpa_directives")
