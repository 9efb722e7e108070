"""The docs are true: their commands run, their Python runs, their links lead somewhere, every error id has its section."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md", *(ROOT / "docs").glob("*.md")])
BIN = Path(sys.executable).parent


def blocks(path: Path, pattern: str) -> list[str]:
    return re.findall(pattern, path.read_text(), re.S)


def cases(pattern: str) -> list[Any]:
    """(page, block) pairs; those of the README are in `make test`."""
    found = [(p, b) for p in PAGES for b in blocks(p, pattern)]
    return [pytest.param(p, b, marks=[] if p.name == "README.md" else [pytest.mark.slow], id=p.name) for p, b in found]


COMMANDS, PYTHON = cases(r"<!-- run -->\n```\w*\n(.*?)```"), cases(r"```python\n(.*?)```")


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) >= 3 and len(PYTHON) >= 3


@pytest.mark.parametrize(("page", "block"), COMMANDS)
def test_commands(page: Path, block: str, tmp_path: Path) -> None:
    """Each line as it stands, in an empty folder, with the project's own commands on the PATH."""
    (tmp_path / "run").mkdir(mode=0o700)
    own = {"TILEWORK_JOBS": str(tmp_path / "jobs"), "TILEWORK_RUN": str(tmp_path / "run")}  # a queue without jobs
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"} | own
    for line in block.strip().splitlines():
        command = line.split("   #")[0]
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"], cwd=tmp_path, capture_output=True, text=True, env=env
        )
        assert done.returncode == 0, f"{page.name}: {line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(("page", "block"), PYTHON)
def test_python(page: Path, block: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"{page.name}\n{block}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name) if name else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            headings = {
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            }
            assert anchor in headings, f"{page.name}: {target}"


# The engine's, and what the frontends' own are called.
ERRORS = {"UserError", "MachineError", "BugError", "RanksError", "_bad", "Error", "ArgumentError", "WrongValue", "StateError",
          "FrozenError", "UnknownOption", "ConfigFileError"}  # fmt: skip


def error_ids() -> set[str]:
    """The first argument of every error that the source raises."""
    found = set()
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "frontends").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)) and node.args):
                continue
            first = node.args[0]
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr  # UserError, tilework.UserError
            if name in ERRORS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.add(first.value)
    return found


def test_every_error_has_its_section() -> None:
    documented = set(re.findall(r"^### ([\w-]+)$", (ROOT / "docs" / "errors.md").read_text(), re.M))
    assert len(error_ids()) > 40
    assert error_ids() - documented == set(), "errors without a section in docs/errors.md"
    assert documented - error_ids() == set(), "sections without an error"


def test_the_annotated_tree_is_the_tree() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for room in (ROOT / "src" / "tilework").iterdir():
        if room.is_dir() and room.name != "__pycache__":
            assert f"  {room.name}/" in text, room.name
        elif room.suffix == ".py" and room.name != "__init__.py":
            assert room.name in text, room.name
    tree = text[text.index("## The tree") :]
    files = {p.name for folder in ("src", "frontends", "apps", "bench") for p in (ROOT / folder).rglob("*") if p.is_file()}
    named = re.findall(r"[\w-]+\.(?:py|cpp|md)\b", tree)
    assert len(named) > 80 and [n for n in named if n not in files and not (ROOT / n).exists() and n != "benchmark.md"] == []


def test_the_coverage_figures_are_those_of_the_table() -> None:
    trained, tried = re.search(r"^(\d+) of (\d+) models", (ROOT / "docs" / "coverage.md").read_text(), re.M).groups()
    for page in (ROOT / "README.md", ROOT / "docs" / "features.md"):
        assert re.search(rf"Of {tried} models .*?, {trained} train", page.read_text(), re.S), page.name


def test_dependencies_have_a_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "architecture.md").read_text()
    for requirement in [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *project["optional-dependencies"]["plot"],
        *project["optional-dependencies"]["docs"],
    ]:
        name = re.match(r"[\w-]+", requirement).group()
        assert re.search(rf"\b{name}\b", text), name
        assert ">=" in requirement and "<" in requirement, f"{requirement} is not pinned by range"
    locked = {line.split("==")[0].lower() for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line}
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement).group()
        assert name == "torch" or name in locked, name


def test_the_page_of_test_results_comes_from_a_report(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import test_results

    (tmp_path / "test_one.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
        "def test_d(record_property): record_property('mutations', {'accepted': 3, 'artifact-damaged': 7})\n"
    )
    report = tmp_path / "report.xml"
    subprocess.run([sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider",
                    f"--junitxml={report}", str(tmp_path)], capture_output=True)  # fmt: skip
    text = test_results.page(report, "make test", "abc123")
    assert "2 passed, 1 failed, 1 skipped" in text and "abc123" in text
    assert text.index("| artifact-damaged | 7 |") < text.index("| accepted | 3 |")
