"""cpu: every program becomes a shared library of native code, compiled by g++ from what Inductor generates."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import shlex
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...artifact import operators, random
from ...artifact.graph import Graph
from ...errors import BugError, MachineError, TileworkWarning
from ...plan import aliases
from ...plan.options import Options
from ...plan.pieces import Cut
from ...plan.plan import CHANGES, Plan
from .. import assemble, calls, codegen_cpu, inductor_fixes, known, lowerings, memory, plain, to_fx, toolchain
from ..cache import Cache, Found, Parts, disk_errors
from ..workers import Job, num_workers, started
from . import Built, Report

FUSED = ("step", "accumulate")
PIECES = "programs"  # the library of all programs, where some are made of pieces
SHARE = 100  # operators that are worth a run of the compiler
SMALL = 600  # operators of all programs that share a library
DRIVER = Path(__file__).parent.parent / "driver.cpp"
EXCHANGE = Path(__file__).parent.parent / "exchange.cpp"  # for replicas


@functools.cache
def _own_code() -> str:
    """SHA-256 of all of our own code that decides what native code comes out for a graph."""
    files: list[Any] = [
        assemble.__file__,
        calls.__file__,
        known.__file__,
        aliases.__file__,
        plain.__file__,
        codegen_cpu.__file__,
        to_fx.__file__,
        lowerings.__file__,
        inductor_fixes.__file__,
        toolchain.__file__,
        random.__file__,
        operators.__file__,
        memory.__file__,
        *toolchain.LINKED,
        *sorted(toolchain.KERNELS.glob("*.h")),
    ]
    return hashlib.sha256(b"".join(Path(f).read_bytes() for f in files)).hexdigest()


def common_parts(options: Options) -> Parts:
    """What the cache keys of all libraries of a compile have in common: everything but the graphs."""
    return {
        "torch": torch.__version__,
        "compiler": toolchain.compiler_version(),
        "flags": shlex.join(toolchain.flags(options)),
        "features": " ".join(toolchain.needed_features(options)),
        "codegen": json.dumps(codegen_cpu.settings(options), sort_keys=True),
        **codegen_cpu.surroundings(),
        "temporaries": "own" if memory.own_temporaries() else "planned",
        "tilework": _own_code(),
    }


class CpuBackend:
    passes = (*CHANGES, "pieces")
    computes = generates = True

    def build(self, name: str, plan: Plan, cache: Cache | None, report: Report) -> Built:
        """Operators without generated code are called through torch's dispatcher."""
        while True:
            try:
                return self._build(name, plan, cache, report)
            except codegen_cpu.NoCode as e:
                before = plan.called.get(e.program, ())
                if "*" in before:
                    raise BugError(
                        "compile-inductor", str(e), fix="compile with --device reference to go on, and report this"
                    ) from e
                those = tuple(sorted({*before, *e.operators})) if set(e.operators) - set(before) else ("*",)
                if "*" in those:
                    text = f"{name}, program {e.program}: all operators are called one by one, at eager's speed"
                    warnings.warn(f"{text} ({e})", TileworkWarning, stacklevel=2)
                report(f"{e.program}: {'all operators' if '*' in those else ', '.join(those)} called through torch's dispatcher")
                plan = replace(plan, called={**plan.called, e.program: those})

    def _build(self, name: str, plan: Plan, cache: Cache | None, report: Report) -> Built:
        if platform.system() != "Linux":
            raise MachineError("device-platform", "the cpu device needs Linux", found=platform.system(),
                               fix="use --device reference")  # fmt: skip
        cache = cache or Cache()
        options = plan.options
        common = common_parts(options)
        header: Path | None = None

        def compile_sources(library: str, sources: dict[str, str], scratch: Path) -> bytes:
            text = "\n".join(sources[program] for program in libraries[library])
            return toolchain.shared_library(text, _effort(library, plan), scratch, library, header, cache.folder / "headers")

        def compile_one(source: str) -> Future[bytes]:
            def compiled() -> bytes:
                with cache.scratch() as scratch:
                    return toolchain.object_file(source, options, scratch, PIECES, header).read_bytes()

            return pool.submit(compiled)

        cuts = {p: made for p, made in plan.cuts.items() if "*" not in plan.called.get(p, ())}
        libraries = _libraries(plan, cuts)
        library_of = {p: library for library, members in libraries.items() for p in members}
        found: dict[str, Found] = {}
        waiting: dict[str, Parts] = {}
        for library, members in libraries.items():
            graphs = {f"graph of {p}": f"{plan.programs[p].digest()} {plan.programs[p].abi()}" for p in members}
            graphs |= {f"calls of {p}": " ".join(plan.called[p]) for p in members if p in plan.called}
            graphs |= {f"pieces of {p}": cuts[p].digest() for p in members if p in cuts}
            parts = {**common, **graphs, "flags": shlex.join(toolchain.flags(_effort(library, plan)))}
            hit = cache.look(f"{name}.{library}", parts)
            if hit is not None:
                found[library] = hit
            else:
                waiting[library] = parts
        pieces = _Pieces(plan, cuts) if PIECES in waiting else None
        jobs = [
            Job(
                p,
                len(plan.programs[p].nodes),
                partial(codegen_cpu.generate, plan.programs[p], options, cache.folder / "inductor", plan.called.get(p, ())),
            )
            for library in waiting
            for p in libraries[library]
            if p not in cuts
        ]
        jobs += pieces.jobs(cache.folder / "inductor") if pieces else []
        # Copies of this process are made before it starts threads. g++ works on a library as soon as its sources are there.
        with started(jobs, num_workers()) as generate, ThreadPoolExecutor(max_workers=max(2, num_workers())) as pool:
            own = {
                file.stem: pool.submit(
                    cache.get,
                    file.stem,
                    {**common, file.stem: file.read_text()},
                    partial(toolchain.own_library, file, options, folder=cache.folder / "headers"),
                )
                for file in (DRIVER, *((EXCHANGE,) if options.num_replicas > 1 else ()))
            }
            if waiting:
                report("preparing the compiler's headers (once)")
                with cache.lock("header"), disk_errors(f"writing to {cache.folder}"):
                    header = toolchain.precompiled_header(options, cache.folder / "headers")
            sources: dict[str, str] = {}
            futures: dict[str, Future[Found]] = {}
            lock = threading.Lock()

            def generated(unit: str, source: str) -> None:
                with lock:
                    sources[unit] = source
                    report(f"generated code for {unit if unit in library_of else 'a piece'} ({len(sources)} of {len(jobs)})")
                    library = library_of.get(unit, PIECES)
                    if library == PIECES and pieces is not None:
                        pieces.add(unit, source, compile_one)
                    elif all(p in sources for p in libraries[library]):
                        job = partial(compile_sources, library, sources)
                        futures[library] = pool.submit(cache.get, f"{name}.{library}", waiting[library], job)

            if jobs:
                report(f"generating code for {len(jobs)} programs and pieces")
                generate(generated)
            for library in waiting:
                report(f"compiling {library}")
                try:
                    if library == PIECES and pieces is not None:
                        pieces.collected += [assemble.assemble(made, pieces.names[p]) for p, made in cuts.items()]
                        pieces.compile(compile_one)
                        link = partial(pieces.link, options, cache.folder / "headers")
                        found[library] = cache.get(f"{name}.{library}", waiting[library], link)
                    else:
                        found[library] = futures[library].result()
                except BugError as e:  # g++ refuses what Inductor wrote
                    left = [p for p in libraries[library] if "*" not in plan.called.get(p, ())]
                    if not left:
                        raise
                    raise codegen_cpu.NoCode(left[0], (), e.found) from e
            own_code = {_member(file): made.result().code for file, made in own.items()}
        return Built(
            members={**{_member(library): found[library].code for library in libraries}, **own_code},
            code_of={p: _member(library) for p, library in library_of.items()},
            needs={
                "architecture": platform.machine(),
                "features": [*toolchain.needed_features(options)],
                "glibc": [*toolchain.glibc_needed([*(f.code for f in found.values()), *own_code.values()])],
            },
            notes={p: _note(found[library]) for p, library in library_of.items()},
            called=dict(plan.called),
        )


def _effort(library: str, plan: Plan) -> Options:
    """The third level of optimization is kept for the fused step, where it makes a few percent; it can take g++ half again
    as long. The precompiled header serves both."""
    fused = library == PIECES or plan.roles.get(library) in FUSED
    return plan.options if fused else replace(plan.options, opt_level=min(plan.options.opt_level, 2))


def _member(library: str) -> str:
    return f"native/{library}.so"


def _note(found: Found) -> str:
    return "from the cache" if found.hit else f"compiled ({found.why})"


def _libraries(plan: Plan, cuts: Mapping[str, Cut]) -> dict[str, list[str]]:
    """Which programs share a library. All do where some are made of pieces, which they share as well. Small ones do: most of what
    g++ takes for them is the same for all. Not the fused one, which is compiled beside them, and not large ones, which
    several cores can compile at once."""
    if cuts:
        return {PIECES: list(plan.programs)}
    fused = [p for p in plan.programs if plan.roles[p] in FUSED]
    small = [p for p in plan.programs if p not in fused]
    if len(small) < 2 or sum(len(plan.programs[p].nodes) for p in small) > SMALL:
        return {p: [p] for p in plan.programs}
    return {**{p: [p] for p in fused}, "sections": small}


class _Pieces:
    """The library of programs that are made of pieces. Each of several compilers gets some of the sources: reading the common
    header takes longer than compiling a small piece."""

    def __init__(self, plan: Plan, cuts: Mapping[str, Cut]) -> None:
        self.plan, self.cuts = plan, cuts
        self.graphs: dict[str, Graph] = {}  # every piece once, by a name that says what is in it
        self.program_of: dict[str, str] = {}
        self.names = {program: [self._named(piece, program) for piece in made.pieces] for program, made in cuts.items()}
        whole = [plan.programs[p] for p in plan.programs if p not in cuts]
        total = sum(len(g.nodes) for g in (*whole, *self.graphs.values()))
        self.share = max(SHARE, total / num_workers())  # nodes that one run of the compiler gets
        self.collected: list[str] = []
        self.nodes = 0
        self.needed: set[Path] = set()
        self.objects: list[Future[bytes]] = []

    def _named(self, piece: Graph, program: str) -> str:
        called = " ".join(self.plan.called.get(program, ()))
        name = "p" + hashlib.sha256(f"{piece.digest()} {piece.abi()} {called}".encode()).hexdigest()[:20]
        self.graphs[name], self.program_of[name] = replace(piece, name=name), program
        return name

    def jobs(self, scratch: Path) -> list[Job]:
        return [Job(name, len(graph.nodes), partial(self._generate, name, scratch)) for name, graph in self.graphs.items()]

    def _generate(self, name: str, scratch: Path) -> str:
        program = self.program_of[name]
        called = self.plan.called.get(program, ())
        try:
            return codegen_cpu.generate(self.graphs[name], self.plan.options, scratch, called, piece=True)
        except codegen_cpu.NoCode as e:
            raise codegen_cpu.NoCode(program, e.operators, str(e)) from e

    def add(self, name: str, source: str, compile_one: Callable[[str], Future[bytes]]) -> None:
        """A source that is ready; those that came before it are compiled as soon as they make a share."""
        self.collected.append(source)
        self.nodes += len((self.graphs.get(name) or self.plan.programs[name]).nodes)
        if self.nodes >= self.share:
            self.compile(compile_one)

    def compile(self, compile_one: Callable[[str], Future[bytes]]) -> None:
        text = "\n".join(self.collected)
        self.needed |= toolchain.needed_code(text)
        self.objects.append(compile_one(text))
        self.collected, self.nodes = [], 0

    def link(self, options: Options, folder: Path, scratch: Path) -> bytes:
        files = [scratch / f"{i}.o" for i in range(len(self.objects))]
        for file, made in zip(files, self.objects, strict=True):
            file.write_bytes(made.result())
        return toolchain.linked(files, self.needed, options, scratch, PIECES, folder)


backend = CpuBackend()
