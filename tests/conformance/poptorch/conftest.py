"""Each test is a small program in the style of those that exist. They run on the reference device unless they say otherwise: the
interface is what is tested here, the devices are tested elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import poptorch


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEWORK_DEVICE", "reference")
    for name in ("POPTORCH_CACHE_DIR", "POPTORCH_DEFAULT_OPTIONS", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(5)
    poptorch.setLogLevel("ERR")
    yield
    poptorch.setLogLevel("WARN")
