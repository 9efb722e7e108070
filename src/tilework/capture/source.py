"""From a running frame, or from a recorded stack, to the user's own line: file, number, text."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import traceback
from types import FrameType

import torch

from ..errors import not_the_users

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_TILEWORK = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN_MODELS = os.path.join(_TILEWORK, "zoo") + os.sep  # models we ship count as user code
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_CALLERS = {os.path.join(_TILEWORK, *name.split("/")) for name in ("step.py", "capture/probe.py", "capture/capture.py")}
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def is_user_file(path: str) -> bool:
    return _is_user_file(path) and not os.path.abspath(path).startswith(tuple(not_the_users))


@functools.cache
def _is_user_file(path: str) -> bool:
    path = os.path.abspath(path)
    if path.startswith(_OWN_MODELS):
        return True
    if path.startswith((_TORCH, _TILEWORK)) or "<" in os.path.basename(path):
        return False
    return not path.startswith(_STDLIB) or "site-packages" in path


def line_text(path: str, number: int) -> str:
    return linecache.getline(path, number).strip()


def short(path: str, number: int) -> str:
    """file:line, relative to where the user stands, if the file is below that."""
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{number}"


def user_frame(frame: FrameType | None = None) -> tuple[str, int] | None:
    """(path, line) of the innermost frame that is in the user's code; None where the model has none, as in a backward pass."""
    frame = frame or sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _CALLERS:
        if is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def user_line_of_stack(stack: str | None) -> tuple[str, int] | None:
    """The same, from the stack text that torch.fx records on a node."""
    for path, number in reversed(_FRAME.findall(stack or "")):
        if is_user_file(path):
            return path, int(number)
    return None


def user_line_of_exception(error: BaseException) -> tuple[str, int] | None:
    found = None
    for entry in traceback.extract_tb(error.__traceback__):
        if is_user_file(entry.filename):
            found = (entry.filename, entry.lineno or 0)
    return found
