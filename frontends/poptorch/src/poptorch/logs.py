"""The log: lines on standard error, as PopTorch's users know them. POPTORCH_LOG_LEVEL and setLogLevel choose what is shown."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from .errors import WrongValue

LEVELS = {"TRACE": 5, "TRACE_ALL": 5, "DEBUG": 10, "DEBUG_IR": 10, "INFO": 20, "WARN": 30, "ERR": 40, "CRITICAL": 50, "OFF": 100}
_NAMES = {5: "trace", 10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        when = logging.Formatter().formatTime(record, "%H:%M:%S")
        where = getattr(record, "where", "poptorch::python")
        line = f"[{when}.{int(record.msecs):03d}] [{where}] [{_NAMES.get(record.levelno, 'info')}] {record.getMessage()}"
        print(line, file=sys.stderr, flush=True)


logger = logging.getLogger("poptorch::python")
if not logger.handlers:
    logger.addHandler(_Lines())
    logger.propagate = False


def setLogLevel(level: Any) -> None:
    """TRACE, DEBUG, INFO, WARN, ERR or OFF; or their numbers, 0 to 6 as in the original."""
    numbers = dict(enumerate(("TRACE", "DEBUG", "INFO", "WARN", "ERR", "CRITICAL", "OFF")))
    name = numbers.get(level) if isinstance(level, int) else str(level).upper()
    if name not in LEVELS:
        raise WrongValue("poptorch-log", "Unknown log level", found=repr(level), expected=", ".join(LEVELS))
    logger.setLevel(LEVELS[name])


setLogLevel("WARN")
if os.environ.get("POPTORCH_LOG_LEVEL", "").upper() in LEVELS:
    setLogLevel(os.environ["POPTORCH_LOG_LEVEL"])
