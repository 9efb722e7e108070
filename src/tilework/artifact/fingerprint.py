"""Can this machine run this artifact? Each part of the fingerprint says what it needs; the machine says what it has.

The rule for every part is needs <= has: a newer torch runs code built with an older one of the same major version, a CPU
with more instruction sets runs code that uses fewer. All parts that fail are reported together.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import MachineError
from .manifest import FORMAT_VERSION, Fingerprint


@dataclass(frozen=True)
class Part:
    name: str
    needs: str
    has: str
    ok: bool
    fix: str = ""


def machine_features() -> set[str]:
    """Instruction-set extensions of this CPU, as /proc/cpuinfo names them."""
    try:
        return features_in(Path("/proc/cpuinfo").read_text())
    except OSError:
        return set()


def features_in(cpuinfo: str) -> set[str]:
    """What all cores have that are listed: the line is called flags on x86 and Features on aarch64, where cores may differ."""
    lines = set(re.findall(r"^(?:flags|Features)[ \t]*:(.*)$", cpuinfo, re.M))
    return set.intersection(*(set(line.split()) for line in lines)) if lines else set()


def _version(parts: list[int]) -> str:
    return ".".join(map(str, parts))


def compare(fingerprint: Fingerprint, device: str) -> list[Part]:
    """Every part, in order; `device` is the one asked for."""
    parts = [
        Part("format", _version(fingerprint.format), _version(list(FORMAT_VERSION)),
             fingerprint.format[0] == FORMAT_VERSION[0] and fingerprint.format[1] <= FORMAT_VERSION[1],
             "compile again with this version of Tilework"),
    ]  # fmt: skip
    native = fingerprint.device in ("cpu", "cuda")
    if device != fingerprint.device and device not in ("reference", "null"):
        parts.append(Part("device", fingerprint.device, device, False, f"compile with --device {device}"))
    else:
        parts.append(Part("device", fingerprint.device, device, True))
    if not native or device in ("reference", "null"):
        return parts  # graphs are replayed, or nothing is done: no native code is opened
    has = [int(p) for p in torch.__version__.split("+")[0].split(".")[:2]]
    needs = fingerprint.torch[:2]
    parts.append(Part("torch", _version(needs), _version(has), has[0] == needs[0] and has >= needs,
                      f"install torch {_version(needs)} or later, or compile again here"))  # fmt: skip
    parts.append(Part("architecture", fingerprint.architecture, platform.machine(),
                      fingerprint.architecture == platform.machine(), "compile again on this kind of machine"))  # fmt: skip
    missing = sorted(set(fingerprint.features) - machine_features())
    wider = "x86-64-v3" if platform.machine() == "x86_64" else "baseline"
    parts.append(Part("instruction set", " ".join(fingerprint.features) or "none beyond the architecture's",
                      f"all but {' '.join(missing)}" if missing else "all of them", not missing,
                      f"compile again here, or with --isa {wider} for a wider range of machines"))  # fmt: skip
    libc = [int(p) for p in (platform.libc_ver()[1] or "0").split(".")[:2]]
    parts.append(Part("glibc", _version(fingerprint.glibc), _version(libc), libc >= fingerprint.glibc,
                      "compile again on this machine"))  # fmt: skip
    return parts


def require(fingerprint: Fingerprint, device: str, path: Path) -> None:
    """MachineError that names every part which does not fit."""
    wrong = [p for p in compare(fingerprint, device) if not p.ok]
    if wrong:
        lines = "\n".join(f"    {p.name}: needs {p.needs}; here: {p.has}. {p.fix}" for p in wrong)
        raise MachineError("artifact-fingerprint", f"{path}: this machine cannot run this artifact\n{lines}")
