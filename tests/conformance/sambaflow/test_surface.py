"""Every row of the interface's table is true."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.version import Version

import sambaflow
import tilework
from sambaflow import surface

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("row", surface.ROWS, ids=lambda r: f"{r[0]}:{r[1].split()[0]}")
def test_a_row(row) -> None:
    where, names, status, _ = row
    for name in names.split():
        found = surface.find(where, name)
        if status == surface.REFUSED:
            with pytest.raises(tilework.UserError, match="does not have this part"):
                found(*([None] if where.endswith(".session") else []))


def test_the_log_level_comes_from_the_environment_or_the_flag(monkeypatch) -> None:
    import logging

    from sambaflow.samba.utils.argparser import parse_app_args

    monkeypatch.setenv("SF_RNT_LOG_LEVEL", "ERR")
    parse_app_args(["compile"])
    assert logging.getLogger("sambaflow").level == logging.ERROR
    parse_app_args(["compile", "--log-level", "debug"])
    assert logging.getLogger("sambaflow").level == logging.DEBUG
    monkeypatch.delenv("SF_RNT_LOG_LEVEL")
    parse_app_args(["compile"])
    assert logging.getLogger("sambaflow").level == logging.INFO


def test_the_docs_have_this_table() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from write_sambaflow_table import written

    text = (ROOT / "docs" / "sambaflow.md").read_text()
    assert text == written(text), "docs/sambaflow.md is stale: run scripts/write_sambaflow_table.py"


def test_the_version_can_be_compared() -> None:
    assert Version("1.20") < Version(sambaflow.__version__) < Version("2") and "tilework" in sambaflow.__version__
