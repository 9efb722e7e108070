"""samba_logger: `info`, `warning` and the rest, each with log_limit= to say a thing only so many times."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from typing import Any

_LEVELS = {"TRACE": "DEBUG", "DEBUG": "DEBUG", "INFO": "INFO", "WARN": "WARNING", "WARNING": "WARNING", "ERR": "ERROR",
           "ERROR": "ERROR", "CRIT": "CRITICAL", "CRITICAL": "CRITICAL", "OFF": "CRITICAL"}  # fmt: skip


class SambaLogger(logging.LoggerAdapter):  # type: ignore[type-arg]
    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._said: Counter[str] = Counter()

    def log(  # type: ignore[override]
        self, level: int, msg: object, *args: Any, log_limit: int | None = None, **kwargs: Any
    ) -> None:
        if log_limit is not None:
            self._said[str(msg)] += 1
            if self._said[str(msg)] > log_limit:
                return
        super().log(level, msg, *args, **kwargs)

    def debug(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.log(logging.DEBUG, msg, *args, **kwargs)

    def info(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.log(logging.INFO, msg, *args, **kwargs)

    def warning(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.log(logging.WARNING, msg, *args, **kwargs)

    def error(self, msg: object, *args: Any, **kwargs: Any) -> None:
        self.log(logging.ERROR, msg, *args, **kwargs)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what sys.stderr is now, not to what it was when this was imported."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _made() -> SambaLogger:
    logger = logging.getLogger("sambaflow")
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("[%(levelname)s][SAMBA] # %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        set_level(None)
    return SambaLogger(logger)


def set_level(name: str | None) -> None:
    """None: as SF_RNT_LOG_LEVEL says, else INFO."""
    name = name or os.environ.get("SF_RNT_LOG_LEVEL")
    logging.getLogger("sambaflow").setLevel(_LEVELS.get(str(name or "INFO").upper(), "INFO"))


samba_logger = _made()
