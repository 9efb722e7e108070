"""tilework doctor: what this machine can do, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from typing import Annotated, Any

import typer

from .output import out, print_json

NAME = "doctor"
HELP = "Check what this machine can do and what is missing."
EXAMPLE = "Example: tilework doctor --json"


def command(json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False) -> None:
    checks = _checks()
    if json:
        print_json(checks)
    else:
        for c in checks:
            mark = {True: "ok     ", False: "MISSING", None: "-      "}[c["ok"]]
            out.print(f"{mark} {c['name']}: {c['found']}" + (f"\n          fix: {c['fix']}" if c["fix"] else ""), markup=False)
    if any(c["ok"] is False for c in checks):
        raise typer.Exit(3)


def _checks() -> list[dict[str, Any]]:
    import torch

    from ..artifact.fingerprint import machine_features
    from ..compiler.cache import cache_folder, others_reach

    found: list[dict[str, Any]] = []

    def check(name: str, ok: bool | None, what: str, fix: str = "") -> None:
        found.append({"name": name, "ok": ok, "found": what, "fix": "" if ok is not False else fix})

    check("python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or later")
    version = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    check("torch", (2, 11) <= version < (2, 14), torch.__version__, "pip install torch==2.13.0")
    check(
        "system",
        platform.system() == "Linux",
        f"{platform.system()} {platform.machine()}",
        "the cpu device needs Linux",
    )
    check("cores", True, f"{len(os.sched_getaffinity(0))} for this process, torch uses {torch.get_num_threads()} threads")
    features = machine_features()
    level = "AVX-512" if "avx512f" in features else "AVX2" if "avx2" in features else "baseline"
    check("instruction set", True, level + (" with bf16" if "avx512_bf16" in features else ""))
    compiler = shutil.which("g++")
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[0] if compiler else "none"
    check("g++ (only for compiling)", compiler is not None, text, "apt-get install g++")
    folder = cache_folder()
    probe = folder if folder.exists() else next(p for p in folder.parents if p.exists())
    free = shutil.disk_usage(probe).free
    problem = others_reach(folder) if folder.exists() else ""
    check(
        "cache",
        os.access(probe, os.W_OK) and not problem,
        f"{folder}, {problem or f'{free / 1e9:.1f} GB free'}",
        "set TILEWORK_CACHE to a folder that you alone can write to",
    )
    check(
        "disk",
        free > 1e9,
        f"{free / 1e9:.1f} GB free",
        "free at least 1 GB: headers and programs are kept in the cache",
    )
    with open("/proc/meminfo") as f:
        memory = next(int(line.split()[1]) for line in f if line.startswith("MemAvailable")) * 1024
    check("memory", memory > 1e9, f"{memory / 1e9:.1f} GB available", "at least 1 GB is needed to compile")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    check("gpu", None, gpu)
    return found
