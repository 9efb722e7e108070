"""A stand-in for torchvision while timm is imported: timm's models use none of it, its data pipeline asks for these names."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from torch import nn

DATASETS = ("CIFAR100", "CIFAR10", "MNIST", "KMNIST", "FashionMNIST", "ImageFolder")
InterpolationMode = enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")


def _package() -> dict[str, ModuleType]:
    functional = {"InterpolationMode": InterpolationMode}
    contents = {
        "": {},
        ".datasets": {name: type(name, (), {}) for name in DATASETS},
        ".ops": {},
        ".ops.misc": {"FrozenBatchNorm2d": type("FrozenBatchNorm2d", (nn.Module,), {})},
        ".transforms": {"ToTensor": type("ToTensor", (), {}), **functional},
        ".transforms.functional": functional,
    }
    modules = {f"torchvision{path}": ModuleType(f"torchvision{path}") for path in contents}
    for (name, module), names in zip(modules.items(), contents.values(), strict=True):
        module.__dict__.update(names, __path__=[])
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    return modules


@contextmanager
def torchvision_stub() -> Iterator[None]:
    """Taken out again afterwards, so that no other library believes torchvision is there."""
    fake = _package()
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torchvision"}
    sys.modules.update(fake)
    try:
        yield
    finally:
        for name in fake:
            sys.modules.pop(name, None)
        sys.modules.update(real)
