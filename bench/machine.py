"""What the numbers were measured on: processor, cores, versions. No names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata


def describe_machine() -> dict[str, str | int]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "cores_allowed": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("tilework", "torch", "jax", "jaxlib", "numpy")},
        "compiler": _compiler(),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
    }


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _compiler() -> str:
    return _output("g++", "--version").split("\n")[0] if shutil.which("g++") else "none"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
