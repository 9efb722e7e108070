"""cuda: every program becomes a list of launches, of kernels that Triton compiles and of calls of torch's library; small training
steps also a kernel that runs a whole loop. No GPU is needed for it; where there is one, kernels are timed."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from ...artifact import operators, random
from ...artifact.graph import Graph
from ...errors import BugError, MachineError
from ...plan.options import Options
from ...plan.plan import Plan
from .. import inductor_fixes, lowerings, to_fx
from ..cache import Cache, Parts
from ..workers import num_workers
from . import Built, Report

CUDA = Path(__file__).parent.parent / "cuda"
LOOP = CUDA / "loop.cu"


@functools.cache
def _own_code() -> str:
    """SHA-256 of all of our own code that decides what comes out for a graph."""
    files: list[Any] = [*sorted(CUDA.rglob("*.py")), *sorted(CUDA.rglob("*.cu*")), to_fx.__file__, lowerings.__file__,
                        inductor_fixes.__file__, random.__file__, operators.__file__, __file__]  # fmt: skip
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()


class CudaBackend:
    passes = ("sums",)
    computes = True
    generates = False

    def build(self, name: str, plan: Plan, cache: Cache | None, report: Report) -> Built:
        from ..cuda import target as targets

        targets.require_toolchain()
        if torch.version.cuda is None:
            raise MachineError("cuda-toolchain", "compiling for a GPU needs a build of torch with CUDA; a GPU it does not need",
                               found=f"torch {torch.__version__}", fix="install torch from its own index for CUDA, or compile "
                               "where there is a GPU")  # fmt: skip
        target = targets.target_for(plan.options.isa)
        cache = cache or Cache()
        common = self._common(plan.options, target)
        if not target.present:
            report(f"no {target.architecture} here: kernels are compiled, not timed")
        members: dict[str, bytes] = {}
        code_of: dict[str, str] = {}
        notes: dict[str, str] = {}
        loop = {**common, "source": LOOP.read_text()}
        members["native/loop.cubin"] = cache.get("loop", loop, lambda _: _nvrtc(LOOP.read_text(), "loop", target)).code
        for i, (program, graph) in enumerate(plan.programs.items()):
            parts: Parts = {**common, f"graph of {program}": f"{graph.digest()} {graph.abi()}",
                            "role": plan.roles[program] if plan.options.whole_loop else "no whole loop"}  # fmt: skip
            report(f"compiling {program} ({i + 1} of {len(plan.programs)})")
            found = cache.get(f"{name}.{program}", parts, lambda _, g=graph: _packed(_program(g, plan, target, report)))  # type: ignore[misc]
            made, launch_plan = _unpacked(found.code)
            members |= made
            code_of[program] = f"native/{program}.plan"
            members[code_of[program]] = launch_plan
            notes[program] = "from the cache" if found.hit else f"compiled ({found.why})"
        return Built(members, code_of, {"architecture": target.architecture}, notes)

    def _common(self, options: Options, target: Any) -> Parts:
        import triton

        from ..cuda import attention, launches, nvrtc

        return {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "nvrtc": nvrtc.version(),
            "gpu": repr(target),
            "attention": "cudnn" if attention.by_cudnn() else "torch",
            "codegen": json.dumps(launches.settings(), sort_keys=True),
            "tilework": _own_code(),
        }


def _program(graph: Graph, plan: Plan, target: Any, report: Report) -> tuple[dict[str, bytes], dict[str, Any]]:
    """(members, launch plan)"""
    from ..cuda import kernels, launches, tuning

    try:
        made = launches.launches(graph, target)
    except BugError:
        raise
    except Exception as e:
        raise BugError("compile-inductor", f"program {graph.name} could not be compiled for a GPU",
                       found=f"{type(e).__name__}: {str(e)[:500]}",
                       fix="compile with --device cpu or reference to go on, and report this") from e  # fmt: skip
    ways = kernels.compiled(made.kernels, target, num_workers(), every_way=target.present)
    chosen, timed = tuning.choose(made, ways) if target.present else ({n: w[0] for n, w in ways.items()}, {})
    members = {kernels.member(w.code): w.code for w in chosen.values()}
    as_launched = {n: {"function": w.function, "member": kernels.member(w.code), "threads": w.threads, "shared": w.shared,
                       "takes": w.takes, "grid": w.grid} for n, w in chosen.items()}  # fmt: skip
    text = launches.as_json(made, as_launched)
    text["ways"] = {n: f"{w.what}{timed.get(n, '')}" for n, w in chosen.items()}
    if plan.options.whole_loop and plan.roles[graph.name] in ("step", "infer"):
        code, entry = _whole(graph, target, report)
        members |= code
        text |= entry
    return members, text


def _whole(graph: Graph, target: Any, report: Report) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The kernel of a whole loop, or why there is none."""
    from ..cuda import kernels
    from ..cuda.persistent import best
    from ..cuda.persistent.formulas import NotSmall

    try:
        code, emitted, owned, how = best.best(graph, target)
    except NotSmall as e:
        return {}, {"whole_loop": f"not one kernel: {e}"}
    except BugError as e:
        if e.id != "compile-nvrtc":
            raise
        report(f"{graph.name}: the kernel of its whole loop could not be compiled, which is a bug: please report it ({e.found})")
        return {}, {"whole_loop": f"not one kernel: {e.summary}"}
    report(f"{graph.name}: one kernel for the loop, {owned.num_barriers} barriers a step, {owned.blocks} blocks; {how}")
    entry = {"function": best.NAME, "member": kernels.member(code), "blocks": emitted.blocks, "threads": emitted.threads,
             "shared": emitted.shared, "scratch": emitted.scratch, "buffers": list(emitted.buffers),
             "cluster": emitted.cluster, "barriers": owned.num_barriers, "estimate": owned.estimate, "chosen": how}  # fmt: skip
    return {kernels.member(code): code}, {"whole": entry}


def _nvrtc(source: str, name: str, target: Any) -> bytes:
    from ..cuda import nvrtc

    return nvrtc.compile_cubin(source, name, target.architecture)


def _packed(made: tuple[dict[str, bytes], dict[str, Any]]) -> bytes:
    """One file for the cache: lengths and names as JSON in the first line, then the members."""
    members, plan = made
    text = _readable(plan)
    head = json.dumps([*([n, len(c)] for n, c in members.items()), ["", len(text)]]).encode()
    return b"\n".join([head, b"".join([*members.values(), text])])


def _readable(plan: dict[str, Any]) -> bytes:
    """JSON, a step a line."""
    rest = json.dumps({k: v for k, v in plan.items() if k != "steps"}, indent=1)
    steps = ",\n  ".join(json.dumps(step) for step in plan["steps"])
    return f'{rest[:-2]},\n "steps": [\n  {steps}\n ]\n}}\n'.encode()


def _unpacked(data: bytes) -> tuple[dict[str, bytes], bytes]:
    head, _, rest = data.partition(b"\n")
    found: dict[str, bytes] = {}
    at = 0
    for name, size in json.loads(head):
        found[name], at = rest[at : at + size], at + size
    return found, found.pop("")


backend = CudaBackend()
