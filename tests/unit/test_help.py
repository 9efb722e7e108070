"""What the command says of itself: help on 80 columns, choices, completion, `tilework explain`. None of it imports torch."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilework.cli
from tilework.cli.explain import parse, sections
from tilework.cli.main import VERBS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import write_errors  # noqa: E402


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tilework", *args], capture_output=True, text=True, timeout=120,
                          env=os.environ | {"COLUMNS": "80"} | env)  # fmt: skip


def complete(words: str) -> list[str]:
    """What the shell offers for the last word of a command line."""
    count = len(words.split()) - (0 if words.endswith(" ") else 1)
    done = command(_TILEWORK_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_verb_is_in_the_list() -> None:
    modules = [m.name for m in pkgutil.iter_modules(tilework.cli.__path__)]
    verbs = [m for m in modules if hasattr(importlib.import_module(f"tilework.cli.{m}"), "NAME")]
    assert sorted(VERBS) == sorted(verbs)


JOBS = ("submit", "list", "show", "logs", "cancel", "label", "wait", "taskprolog")


@pytest.mark.parametrize("verb", ["", *VERBS, *(f"job {verb}" for verb in JOBS)])
def test_help_fits_80_columns_and_cuts_nothing(verb: str) -> None:
    text = command(*verb.split(), "--help").stdout
    assert text.startswith(f"Usage: tilework {verb}".rstrip())
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in re.sub(r"[\]}]\.\.\.", "", text)  # [ARGS]..., {COMMAND}...: one or more
    for line in VERBS.values() if not verb else ():
        assert line in text


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ("tilework co", ["compile"]),
        ("tilework compile --weights ", ["separate", "inside", "none"]),
        ("tilework compile --programs ", ["all", "fused", "sections"]),
        ("tilework compile --opt-level ", ["0", "1", "2", "3"]),
        ("tilework compile --isa b", ["baseline"]),
        ("tilework run m.pef --device re", ["reference"]),
        ("tilework run m.pef --data d", ["digits"]),
        ("tilework site ", ["install", "remove"]),
        ("tilework explain capture-py", ["capture-python"]),
    ],
)
def test_completion(words: str, some: list[str]) -> None:
    assert complete(words) == some


def test_choices_are_choices() -> None:
    for option, wrong in (("--weights", "cloud"), ("--programs", "some"), ("--isa", "mmx"), ("--opt-level", "4")):
        done = command("compile", "model.py:build", option, wrong)
        assert done.returncode == 2 and option in done.stderr and wrong in done.stderr
        assert "tilework compile --help" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["explain"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_no_torch_for_a_word_of_help(words: list[str]) -> None:
    code = f"import sys, tilework.cli.main as m\ntry: m.main({words})\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_explain() -> None:
    text = command("explain", "capture-python").stdout
    assert "torch.where" in text and "### " not in text
    found = json.loads(command("explain", "artifact-version", "--json").stdout)
    assert found["chapter"] == "Artifacts" and "artifact-format.md" in found["text"]
    listed = json.loads(command("explain", "--json").stdout)
    assert {one["id"] for one in listed} == set(sections()) and all(one["summary"] for one in listed)
    names = command("explain").stdout
    assert all(id in names for id in sections())
    wrong = command("explain", "[captur-python]")
    assert wrong.returncode == 2 and "did you mean capture-python" in wrong.stderr


def test_the_page_of_errors_is_what_explain_prints() -> None:
    page = write_errors.PAGE.read_text()
    assert page == write_errors.page(), "run python scripts/write_errors.py"
    assert parse(page) == sections()


def test_sections_are_found_in_any_order() -> None:
    found = parse("# Top\n\n## One\n\n### a-b\nText.\n\nMore.\n\n## Two\n\n### c\nOther `x`. Rest.\n")
    assert found["a-b"].text == "Text.\n\nMore." and found["a-b"].chapter == "One"
    assert found["c"].summary == "Other x."
