"""Devices: ours, and those that other distributions bring. Each is a backend, which compiles, and a device, which runs.

A distribution brings one with two entry points of the same name, in the groups tilework.backends and tilework.devices; each
names a module, which has what compiler/backends/<name>.py or runtime/devices/<name>.py of ours has."""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points
from types import ModuleType
from typing import Literal

OURS = ("cpu", "cuda", "reference", "null")
_ROOMS = {"backends": "tilework.compiler.backends", "devices": "tilework.runtime.devices"}


@functools.cache
def _foreign(group: str) -> dict[str, str]:
    return {e.name: e.value for e in entry_points(group=f"tilework.{group}") if e.name not in OURS}


def device_names() -> tuple[str, ...]:
    return (*OURS, *sorted(_foreign("devices")))


def module_of(group: Literal["backends", "devices"], device: str) -> ModuleType:
    """The module of a device whose name is among device_names()."""
    return importlib.import_module(_foreign(group).get(device) or f"{_ROOMS[group]}.{device}")
