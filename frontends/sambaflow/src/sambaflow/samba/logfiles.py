"""The log files beside a PEF, and the lines of `compile` that users look for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def log_files(path: Path) -> Iterator[Any]:
    """<name>.samba.log and .mac.log beside the PEF: what was done, and when; .plasma_compile.log: native code alone."""
    logs = {kind: path.with_suffix(f".{kind.lower()}.log") for kind in ("SAMBA", "MAC", "PLASMA_COMPILE")}
    for kind, log in logs.items():
        log.write_text("")
        if kind != "PLASMA_COMPILE":
            print(f"[Info][{kind}]# Placing log files in {log.resolve()}", flush=True)
    begin = time.perf_counter()

    def report(line: str) -> None:
        stamp = f"{time.perf_counter() - begin:9.3f} s  "
        for kind, log in logs.items():
            if kind == "PLASMA_COMPILE" and not any(w in line for w in ("compil", "code", "operators")):
                continue
            with log.open("a") as f:
                f.write(stamp + line + "\n")
        if sys.stderr.isatty():
            print(f"\r\033[K{line.splitlines()[0] if line else ''}", end="", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    print("Compilation succeeded for partition_0_0")
    print(f"Logs are generated in {path.parent.resolve()}", flush=True)
