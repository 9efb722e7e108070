"""Every row of the interface's table is true."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

import poptorch
from poptorch import surface

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("row", surface.ROWS, ids=lambda r: f"{r[0]}:{r[1].split()[0]}")
def test_a_row(row) -> None:
    where, names, _, _ = row
    for name in names.split():
        surface.find(where, name)


@pytest.mark.parametrize("call", [
    lambda: poptorch.ctc_beam_search_decoder(None), lambda: poptorch.CTCBeamSearchDecoder(),
    lambda: poptorch.inferenceModel(torch.nn.Identity()).cycleCount(),
    lambda: poptorch.Options().inputReplicaGrouping(2),
])  # fmt: skip
def test_what_is_refused_is_refused_by_name(call) -> None:
    with pytest.raises(poptorch.Error) as caught:
        call()
    assert caught.value.id == "poptorch-refused"


def test_every_public_name_has_a_row() -> None:
    listed = {n for where, names, _, _ in surface.ROWS if where == "poptorch" for n in names.split()}
    assert set(poptorch.__all__) - listed - {"optim", "profiling"} == set()


def test_the_docs_have_this_table() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from write_poptorch_table import written

    text = (ROOT / "docs" / "poptorch.md").read_text()
    assert text == written(text), "docs/poptorch.md is stale: run scripts/write_poptorch_table.py"


def test_the_version_can_be_compared() -> None:
    assert Version("3.3") < Version(poptorch.__version__) < Version("4") and "tilework" in poptorch.__version__
