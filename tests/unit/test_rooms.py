"""The rooms of the house: who may import whom."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tilework"
COMPILE_SIDE = {"capture", "plan", "compiler"}
RUN_SIDE = {"runtime", "tiles", "parallel"}
# In any file of the engine, whatever its kind.
VENDOR_WORDS = ("samba", "rdu", "poptorch", "cerebras", "cstorch", "graphcore", "bckwd", "gradnorm", "pload", "aload", "quiesce",
                "datascale", "sn10", "sn30", "popart", "popdist", "poprun", "sntilestat", "snconfig")  # fmt: skip


def imports(path: Path) -> set[str]:
    """First parts, below tilework, of everything that a file imports, wherever in the file the import stands."""
    found = set()
    package = path.relative_to(next(p for p in path.parents if p.name == "src")).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("tilework.")}
    return found


def files(*rooms: str) -> list[Path]:
    return [f for room in sorted(rooms) for f in sorted((SOURCE / room).rglob("*.py"))]


@pytest.mark.parametrize("path", files(*COMPILE_SIDE), ids=lambda p: str(p.relative_to(SOURCE)))
def test_compile_side_does_not_import_the_run_side(path: Path) -> None:
    assert not imports(path) & (RUN_SIDE | {"check", "cli", "runs", "data"})


@pytest.mark.parametrize("path", files("runtime"), ids=lambda p: str(p.relative_to(SOURCE)))
def test_run_side_does_not_import_the_compile_side(path: Path) -> None:
    assert not imports(path) & (COMPILE_SIDE | {"check", "cli", "step"})


@pytest.mark.parametrize("path", files("runs", "data"), ids=lambda p: str(p.relative_to(SOURCE)))
def test_runs_and_data_belong_to_the_run_side(path: Path) -> None:
    assert not imports(path) & (COMPILE_SIDE | {"check", "cli", "step"})


@pytest.mark.parametrize("path", files("artifact"), ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_artifact_imports_neither(path: Path) -> None:
    assert imports(path) <= {"artifact", "errors"}


def test_the_rule_can_fail() -> None:
    assert "compiler" in imports(SOURCE / "check" / "verified.py")
    assert "runtime" in imports(SOURCE / "check" / "check.py")


def test_the_engine_knows_no_vendor_word() -> None:
    """In no file, of whatever kind: tables, C++ and TOML speak to users too."""
    read = 0
    for path in SOURCE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".gz", ".npz"):
            text = path.read_text(errors="replace").lower()
            assert not [word for word in VENDOR_WORDS if re.search(rf"(?<![a-z]){word}", text)], path
            read += 1
    assert read > 120 and any(p.suffix == ".h" for p in SOURCE.rglob("*"))


def test_the_engine_alone_has_no_vendor_word_in_its_distribution() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    own = text[: text.index("[tool.ruff]")]
    assert not [word for word in VENDOR_WORDS if word in own.lower()]


FRONTENDS = sorted((ROOT / "frontends").glob("*/src/*"))
FOR_FRONTENDS = {"errors", "zoo", "artifact", "tiles", "frontend", "parallel"}  # beside what `import tilework` gives


@pytest.mark.parametrize("path", [f for room in FRONTENDS for f in sorted(room.rglob("*.py"))], ids=lambda p: p.stem)
def test_a_frontend_uses_the_public_engine(path: Path) -> None:
    assert imports(path) <= FOR_FRONTENDS


def test_every_device_has_a_backend_and_a_runtime() -> None:
    from tilework.found import OURS

    for device in OURS:
        assert (SOURCE / "compiler" / "backends" / f"{device}.py").exists()
        assert (SOURCE / "runtime" / "devices" / f"{device}.py").exists()


def test_running_does_not_load_the_compiler() -> None:
    """Loading an artifact imports neither our compile side nor torch's compiler."""
    import subprocess
    import sys

    code = (
        "import sys, tilework; tilework.load; import tilework.runtime.devices.cpu;"
        "bad = [m for m in sys.modules if m.startswith(('tilework.capture', 'tilework.plan', 'tilework.compiler',"
        " 'torch._inductor', 'torch._dynamo'))]; print(bad); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_names_of_buffers_are_made_in_one_place() -> None:
    """artifact/names.py; the keys of session.gradients() are the user's, and have `input/` in them."""
    from tilework.artifact.names import Kind

    prefix = re.compile(rf"""["']({"|".join(Kind)})/""")
    found = [(path, line) for path in SOURCE.rglob("*.py") if path.name != "names.py" for line in path.read_text().splitlines()
             if prefix.search(line)]  # fmt: skip
    assert {str(path.relative_to(SOURCE)) for path, _ in found} == {"runtime/session.py", "check/sides.py"}
    assert all("input/" in line for _, line in found) and len(found) == 2
