"""What both sides say about a machine: parts of a fingerprint, each with what it needs and what there is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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


def version(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts))
