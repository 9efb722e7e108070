"""Can this machine run this artifact? Each part of the fingerprint says what it needs; the machine says what it has.

The rule for every part is needs <= has: a newer torch runs code built with an older one of the same major version, a CPU
with more instruction sets runs code that uses fewer. All parts that fail are reported together.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..artifact.fingerprint import Part, version
from ..artifact.manifest import FORMAT_VERSION, Fingerprint
from ..errors import MachineError, UserError, did_you_mean
from ..found import device_names
from .devices import device_class


def compare(fingerprint: Fingerprint, device: str) -> list[Part]:
    """Every part, in order; `device` is the one asked for."""
    parts = [
        Part("format", version(fingerprint.format), version(FORMAT_VERSION),
             fingerprint.format[0] == FORMAT_VERSION[0] and fingerprint.format[1] <= FORMAT_VERSION[1],
             "compile again with this version of Tilework"),
    ]  # fmt: skip
    if device not in device_names():
        return [*parts, Part("device", device, ", ".join(device_names()), False, f"install what brings the device {device}")]
    kind = device_class(device)
    fits = kind.replays or device == fingerprint.device
    parts.append(Part("device", fingerprint.device, device, fits, f"compile with --device {device}"))
    if kind.replays or not fits:
        return parts  # graphs are replayed, or nothing is done: no native code is opened
    has = [int(p) for p in torch.__version__.split("+")[0].split(".")[:2]]
    needs = fingerprint.torch[:2]
    parts.append(Part("torch", version(needs), version(has), has[0] == needs[0] and has >= needs,
                      f"install torch {version(needs)} or later, or compile again here"))  # fmt: skip
    return parts + kind.fits(fingerprint.needs)


def require(fingerprint: Fingerprint, device: str, path: Path) -> None:
    """MachineError that names every part which does not fit; UserError for a device that nobody knows."""
    if device != fingerprint.device and device not in device_names():
        raise UserError("options", f"no device {device!r}", expected=did_you_mean(device, device_names()))
    wrong = [p for p in compare(fingerprint, device) if not p.ok]
    if wrong:
        lines = "\n".join(f"    {p.name}: needs {p.needs}; here: {p.has}. {p.fix}" for p in wrong)
        raise MachineError("artifact-fingerprint", f"{path}: this machine cannot run this artifact\n{lines}")
