"""Where the verbs print: text and tables, JSON. Nothing here imports torch, so that the tools start at once."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, NoReturn

from rich.console import Console

from ..tiles.view import duration as duration


class Screen(Console):
    """A console that ends quietly where nobody reads on: `tilework tiles | head`."""

    def on_broken_pipe(self) -> None:
        nobody_reads()


def nobody_reads() -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer has somewhere to go
    raise SystemExit(0)


out = Screen(highlight=False, soft_wrap=True, emoji=False)  # a command with :x: in it is shown as it is
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    try:
        print(json.dumps(strict(value), indent=1, default=str), flush=True)
    except BrokenPipeError:
        nobody_reads()


def strict(value: Any) -> Any:
    """Without NaN and infinities, which are no JSON: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    return [strict(v) for v in value] if isinstance(value, (list, tuple)) else value


def count(number: int, thing: str) -> str:
    """'1 tile', '2 tiles'."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return ""
