"""cpu: every program becomes a shared library of native code, compiled by g++ from what Inductor generates."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ... import operators, random
from ...errors import MachineError
from ...plan.plan import Plan
from .. import codegen_cpu, lowerings, memory, toolchain
from ..cache import Cache, Found, disk_errors
from . import Built, Report

DRIVER = Path(__file__).parent.parent / "driver.cpp"


@functools.cache
def _own_code() -> str:
    """SHA-256 of all of our own code that decides what native code comes out for a graph."""
    files: list[Any] = [
        codegen_cpu.__file__,
        lowerings.__file__,
        toolchain.__file__,
        random.__file__,
        operators.__file__,
        memory.__file__,
        *sorted(toolchain.KERNELS.glob("*.h")),
    ]
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()


class CpuBackend:
    def build(self, name: str, plan: Plan, cache: Cache | None, report: Report) -> Built:
        if platform.system() != "Linux":
            raise MachineError("device-platform", "the cpu device needs Linux", found=platform.system(),
                               fix="use --device reference")  # fmt: skip
        cache = cache or Cache()
        options = plan.options
        common = {
            "torch": torch.__version__,
            "compiler": toolchain.compiler_version(),
            "flags": " ".join(toolchain.flags(options)),
            "features": " ".join(toolchain.needed_features(options)),
            "codegen": json.dumps(codegen_cpu.settings(options), sort_keys=True),
            "tilework": _own_code(),
        }
        header: Path | None = None

        def compile_source(source: str, program: str, scratch: Path) -> bytes:
            return toolchain.shared_library(source, options, scratch, program, header, cache.folder / "headers")

        def build_driver(scratch: Path) -> bytes:
            return toolchain.shared_library(DRIVER.read_text(), options, scratch, "driver", None, cache.folder / "headers")

        # Code is generated here, one program after the other (Inductor is Python); g++ works beside it.
        waiting: dict[str, tuple[dict[str, str], str]] = {}
        found: dict[str, Found] = {}
        for program, graph in plan.programs.items():
            parts = {**common, "graph": graph.digest(), "abi": graph.abi()}
            hit = cache._read(cache.key(parts))
            if hit is not None:
                found[program] = Found(hit, True, "")
                cache._remember(f"{name}.{program}", parts)
            else:
                waiting[program] = (parts, "")
        with ThreadPoolExecutor(max_workers=2) as pool:
            futures = {}
            driver_parts = {**common, "driver": DRIVER.read_text()}
            driver = pool.submit(cache.get, "driver", driver_parts, build_driver)
            if waiting:
                report("preparing the compiler's headers (once)")
                with cache.lock("header"), disk_errors(f"writing to {cache.folder}"):
                    header = toolchain.precompiled_header(options, cache.folder / "headers")
            for i, (program, (parts, _)) in enumerate(waiting.items()):
                report(f"generating code for {program} ({i + 1} of {len(waiting)})")
                source = codegen_cpu.generate(plan.programs[program], options, cache.folder / "inductor")
                job = partial(compile_source, source, program)
                futures[program] = pool.submit(cache.get, f"{name}.{program}", parts, job)
            for program, future in futures.items():
                report(f"compiling {program}")
                found[program] = future.result()
            driver_code = driver.result().code
        code = {program: found[program].code for program in plan.programs}
        return Built(
            code=code,
            driver=driver_code,
            features=toolchain.needed_features(options),
            glibc=toolchain.glibc_needed([*code.values(), driver_code]),
            notes={p: "from the cache" if f.hit else f"compiled ({f.why})" for p, f in found.items()},
        )


backend = CpuBackend()
