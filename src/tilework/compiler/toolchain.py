"""g++: flags, the precompiled header, object files, shared libraries. Nothing here knows what the code is for."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence, Set
from pathlib import Path

import torch

from ..artifact.fingerprint import machine_features
from ..errors import BugError, MachineError, UserError
from ..plan.options import Options

_TORCH = Path(torch.__file__).parent
INCLUDES = [str(_TORCH / "include"), str(_TORCH / "include/torch/csrc/api/include")]

# Strict IEEE, contraction-free, trap-free. Not -fno-signed-zeros, which Inductor has: with it g++ 12 takes a vector times 0 for
# 0 where it is NaN. -fwrapv: integers wrap.
_FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-DNDEBUG",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fwrapv",
    "-fno-tree-loop-vectorize",
    "-fopenmp",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-w",
    "-DTORCH_INDUCTOR_CPP_WRAPPER",
    "-DSTANDALONE_TORCH_HEADER",
    "-DC10_USING_CUSTOM_GENERATED_MACROS",
]

# What each level promises, in /proc/cpuinfo's names (x86-64 psABI).
_V3 = ["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"]
_V4 = [*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]
_LEVELS = {"baseline": [], "x86-64-v3": _V3, "x86-64-v4": _V4}
# fmt: off
_NATIVE = [
    *_V4, "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bitalg", "avx512_vpopcntdq", "avx512_bf16", "avx512_fp16",
    "avx512ifma", "avx_vnni", "amx_bf16", "amx_tile", "amx_int8", "gfni", "vaes", "vpclmulqdq", "sha_ni", "adx", "rdseed",
    "sse4a",
]
# fmt: on
_NO_INSTRUCTIONS = {"evtstrm", "cpuid"}  # aarch64 lists them among its features; no code can depend on them


@functools.cache
def cpu_features() -> frozenset[str]:
    return frozenset(machine_features())


def needed_features(options: Options) -> list[str]:
    """Instruction-set extensions that code compiled with these options may use."""
    return features_of(options.isa, platform.machine(), cpu_features())


def features_of(isa: str, architecture: str, has: Set[str]) -> list[str]:
    """Of what a machine has, what code for this instruction set may use."""
    if isa != "native":
        return _LEVELS[isa]
    if architecture == "x86_64":
        return [f for f in _NATIVE if f in has]
    # -march=native may use all that an aarch64 machine has; elsewhere it is not asked for (see march)
    return sorted(has - _NO_INSTRUCTIONS) if architecture == "aarch64" else []


def march(isa: str, architecture: str) -> list[str]:
    """The compiler's flag for an instruction set, of those that plan/options.py knows on this architecture. On one whose
    features we cannot read it is the compiler's default, which every machine of the kind has."""
    if architecture == "x86_64":
        return [f"-march={'x86-64' if isa == 'baseline' else isa}"]
    if architecture == "aarch64":
        return [f"-march={'armv8-a' if isa == 'baseline' else isa}"]
    return []


@functools.cache
def compiler() -> str:
    """Path of g++. TILEWORK_CXX names another one; $CXX is only used where there is no g++."""
    for name in (os.environ.get("TILEWORK_CXX"), "/usr/bin/g++", "g++", os.environ.get("CXX"), "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise MachineError(
        "compiler-missing",
        "compiling for the cpu device needs a C++ compiler, and none was found",
        expected="g++ 10 or later",
        fix="apt-get install g++   (not needed to run an artifact, or with --device reference)",
    )


@functools.cache
def compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True).stdout.splitlines()[0]


def extra_flags() -> list[str]:
    """TILEWORK_CXXFLAGS: flags of the user's, last in every compile and link. Meant for sanitizers."""
    text = os.environ.get("TILEWORK_CXXFLAGS", "")
    try:
        return shlex.split(text)
    except ValueError as e:
        raise UserError("options", f"TILEWORK_CXXFLAGS cannot be read: {e}", found=text[:200],
                        expected="flags as in a shell: -fsanitize=address -g") from e  # fmt: skip


def flags(options: Options) -> list[str]:
    features = set(needed_features(options))
    capability = "AVX512" if "avx512f" in features else "AVX2" if "avx2" in features else "DEFAULT"
    return [*_FLAGS, f"-O{options.opt_level}", *march(options.isa, platform.machine()), f"-DCPU_CAPABILITY={capability}",
            f"-DCPU_CAPABILITY_{capability}", *(f"-I{i}" for i in INCLUDES), *extra_flags()]  # fmt: skip


def run(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(list(command), capture_output=True, text=True)
    except OSError as e:
        raise MachineError("compiler-failed", f"{what}: the compiler could not be started: {e}") from e
    if done.returncode == 0:
        return
    text = (done.stderr or done.stdout).strip()
    if "No space left on device" in text:
        raise MachineError("disk-full", f"{what}: no space left on the device", fix="free some space, or set TILEWORK_CACHE")
    if done.returncode < 0:
        raise MachineError("compiler-failed", f"{what}: the compiler was killed by signal {-done.returncode}",
                           fix="check memory; a smaller model or --opt-level 1 needs less")  # fmt: skip
    first = next((line for line in text.splitlines() if "error" in line), text[:300])
    raise BugError("compile-native", f"{what}: the compiler rejected the generated code", found=first[:500],
                   fix="try without TILEWORK_CXXFLAGS" if extra_flags() else "")  # fmt: skip


KERNELS = Path(__file__).parent / "kernels"
CALLS, GEMM, TEAM = Path(__file__).parent / "calls.cpp", KERNELS / "gemm.cpp", KERNELS / "team.cpp"
REPLICAS = KERNELS / "replicas.cpp"
# Code of ours that is compiled once a machine and linked to libraries whose source has this in it.
LINKED = {
    CALLS: re.compile(r"tilework::open_calls\("),
    GEMM: re.compile(r"tilework::(batch_product|update_by_product|product|small_conv)"),
    TEAM: re.compile(r"tilework_run_"),
    REPLICAS: re.compile(r"tilework::over_replicas\("),
}
# OpenMP's functions as team.cpp has them: all that programs and kernels call.
_WRAPPED = ["GOMP_parallel", "GOMP_barrier", "GOMP_single_start",
            *(f"omp_{name}" for name in ("get_thread_num", "get_num_threads", "get_max_threads", "in_parallel"))]  # fmt: skip


@functools.cache
def header_text() -> str:
    """What every program includes: torch's C interface and our kernels, in one piece."""
    ours = [re.sub(r'^#(pragma once|include ").*\n', "", (KERNELS / f"{name}.h").read_text(), flags=re.M)
            for name in ("vectors", "workspace", "pieces", "gemm", "products", "convolutions", "pooling", "calls",
                         "replicas")]  # fmt: skip
    return "\n".join(
        [
            "#pragma once",
            "#include <cstdio>",
            # what aoti_include/cpu.h has, without its container: that alone doubles the time of a small compile
            "#include <array>",
            "#include <optional>",
            "#include <torch/csrc/inductor/aoti_runtime/utils.h>",
            "#include <torch/csrc/inductor/aoti_runtime/scalar_to_tensor.h>",
            "#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>",
            "#include <torch/csrc/inductor/cpp_prefix.h>",
            *ours,
        ]
    )


def precompiled_header(options: Options, folder: Path) -> Path:
    """The header that every program includes, compiled once a set of flags (about 6 s and 150 MB). Returns its path."""
    key = hashlib.sha256("\n".join([*flags(options), compiler_version(), torch.__version__, header_text()]).encode()).hexdigest()
    header = folder / f"tilework-{key[:16]}.h"
    compiled = header.with_suffix(".h.gch")
    if not compiled.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{os.getpid()}-{header.name}"
        part.write_text(header_text())
        out = folder / f".{os.getpid()}-{compiled.name}"
        try:
            run([compiler(), *flags(options), "-x", "c++-header", str(part), "-o", str(out)], "precompiled header")
            part.replace(header)
            out.replace(compiled)
        finally:
            part.unlink(missing_ok=True)
            out.unlink(missing_ok=True)
    return header


def empty_libraries(folder: Path) -> list[str]:
    """Empty libraries with the names of torch's. The linker only has to note which libraries the code needs; reading torch's
    own, of some hundred MB, would take longer than all the rest. Symbols are looked up when the code is opened."""
    made = []
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libtorch_cpu.so", "libc10.so"):
        path = folder / name
        if not path.exists():
            part = folder / f".{os.getpid()}-{threading.get_ident()}-{name}"
            run([compiler(), "-shared", "-nostdlib", "-o", str(part), f"-Wl,-soname,{name}", "-x", "c", "/dev/null"], name)
            part.replace(path)
        made.append(str(path))
    return made


def needed_code(source: str) -> set[Path]:
    """Which of our own files (LINKED) a source needs."""
    return {path for path, mark in LINKED.items() if mark.search(source)}


def own_object(path: Path, options: Options, folder: Path) -> Path:
    """A file of our own, compiled once a set of flags (some seconds)."""
    chosen = flags(options)
    if path == CALLS:  # torch's headers, as torch itself is compiled
        not_here = ("-DTORCH_INDUCTOR", "-DSTANDALONE", "-DC10_", "-DCPU_CAPABILITY", "-O", "-march")
        chosen = [f for f in chosen if not f.startswith(not_here)] + ["-O2"]
    chosen.append(f"-I{CALLS.parent}")
    read = "".join(p.read_text() for p in (path, *sorted(KERNELS.glob("*.h"))))
    key = hashlib.sha256("\n".join([*chosen, compiler_version(), torch.__version__, read]).encode()).hexdigest()
    made = folder / f"{path.stem}-{key[:16]}.o"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{os.getpid()}-{threading.get_ident()}-{made.name}"
        run([compiler(), *chosen, "-c", str(path), "-o", str(part)], path.stem)
        part.replace(made)
    return made


def shared_library(source: str, options: Options, scratch: Path, name: str, header: Path | None, folder: Path) -> bytes:
    """Compile one source file and link it. `folder` keeps what every library needs."""
    obj = object_file(source, options, scratch, name, header)
    return linked([obj], needed_code(source), options, scratch, name, folder)


def object_file(source: str, options: Options, scratch: Path, name: str, header: Path | None) -> Path:
    cpp, obj = scratch / f"{name}.cpp", scratch / f"{name}.o"
    cpp.write_text(source)
    include = ["-include", str(header)] if header else []
    run([compiler(), *flags(options), *include, "-c", str(cpp), "-o", str(obj)], f"program {name}")
    return obj


def linked(objects: Sequence[Path], needed: Set[Path], options: Options, scratch: Path, name: str, folder: Path) -> bytes:
    """A shared library, linked with `needed`, files of our own, and against torch's C interface. OpenMP is torch's own copy."""
    so = scratch / f"{name}.so"
    own = [str(own_object(path, options, folder)) for path in sorted(needed)]
    extra = extra_flags() or ["-Wl,-s"]  # names are stripped, unless somebody wants to look inside
    libraries = ["-Wl,--no-as-needed", *empty_libraries(folder)]
    if TEAM in needed:
        libraries += [f"-Wl,--wrap={name}" for name in _WRAPPED]
    run([compiler(), "-shared", "-o", str(so), *map(str, objects), *own, *libraries, *extra], f"program {name}")
    return so.read_bytes()


def glibc_needed(libraries: Sequence[bytes]) -> list[int]:
    """The newest glibc version that the libraries ask for, read from their symbol versions."""
    found = [tuple(map(int, m.split(b"."))) for lib in libraries for m in re.findall(rb"GLIBC_(\d+\.\d+)\0", lib)]
    return list(max(found, default=(2, 17)))


def own_library(file: Path, options: Options, scratch: Path, *, folder: Path) -> bytes:
    """A file of ours that artifacts carry as a library of its own: the driver, the exchange."""
    return shared_library(file.read_text(), options, scratch, file.stem, None, folder)
