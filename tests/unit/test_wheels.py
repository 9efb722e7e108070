"""The wheels: built from a copy of the source, installed into an empty environment, where the README's code and commands run.

The environment sees this one's site-packages for the dependencies (torch is large) by a .pth file. Such a line adds a folder and
reads no .pth files in it, so the editable install of the source tree stays out; the tests make sure of that.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PLACES = {"tilework": ".", "tilework_sambaflow": "frontends/sambaflow", "tilework_poptorch": "frontends/poptorch"}
pytestmark = pytest.mark.xdist_group("wheels")  # with --dist loadgroup the environment is made once


@dataclass
class Installed:
    wheels: dict[str, Path]
    environment: Path
    folder: Path  # an empty one to work in

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        env |= {"PATH": f"{self.environment / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(self.environment)}
        return subprocess.run([str(word) for word in command], cwd=self.folder, env=env, capture_output=True, text=True)

    def python(self, code: str) -> str:
        done = self.run(self.environment / "bin" / "python", "-c", code)
        assert done.returncode == 0, f"{code}\n{done.stderr}"
        return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    work = tmp_path_factory.mktemp("wheels")
    source = work / "source"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    for name in ("src", "frontends", "apps"):
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    wheels = {}
    for name, place in PLACES.items():
        command = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(work / "dist"),
            str(source / place),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        wheels[name] = next((work / "dist").glob(f"{name}-*.whl"))
    shutil.rmtree(source)  # what runs below cannot come from here
    environment = work / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = environment / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run([*command, *map(str, wheels.values())], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (work / "empty").mkdir()
    return Installed(wheels, environment, work / "empty")


def test_what_is_imported_comes_from_the_wheels(installed: Installed) -> None:
    for module in ("tilework", "sambaflow", "poptorch", "popdist", "popart", "poprun"):
        found = Path(installed.python(f"import {module}; print({module}.__file__)"))
        assert found.is_relative_to(installed.environment), found
    path = installed.python("import sys; print('\\n'.join(sys.path))").splitlines()
    assert not any(Path(folder) == ROOT / "src" for folder in path)


@pytest.mark.parametrize("name", PLACES)
def test_every_file_of_the_source_is_in_the_wheel(installed: Installed, name: str) -> None:
    source = ROOT / PLACES[name] / "src"
    files = [p.relative_to(source) for p in source.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    wanted = {str(p) for p in files if not p.parts[0].endswith(".egg-info")}
    with zipfile.ZipFile(installed.wheels[name]) as wheel:
        assert wanted - set(wheel.namelist()) == set()


def test_the_readmes_code_runs(installed: Installed) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        installed.python(block)


@pytest.mark.full  # tests/unit/test_docs.py runs them in the source tree
def test_the_readmes_commands_run(installed: Installed) -> None:
    lines = [line for block in re.findall(r"<!-- run -->\n```\w*\n(.*?)```", README, re.S) for line in block.strip().splitlines()]
    assert any(line.startswith("tilework compile") for line in lines)
    for line in lines:
        done = installed.run("bash", "-c", line)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert "sambaflow-model" in installed.run("tilework", "explain").stdout, "the frontend's errors are found by entry point"


def test_mypy_sees_the_types(installed: Installed) -> None:
    (installed.folder / "user.py").write_text(
        "import tilework\nfrom sambaflow import samba\n"
        "reveal_type(tilework.load('m.pef'))\nreveal_type(tilework.Options().opt_level)\nreveal_type(samba.__name__)\n"
        "tilework.Options(opt_level='3')\n"
    )
    (installed.folder / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    done = installed.run(sys.executable, "-m", "mypy", "--python-executable", installed.environment / "bin" / "python",
                         "--cache-dir", installed.folder / "types", "user.py")  # fmt: skip
    assert '"tilework.runtime.session.Session"' in done.stdout, done.stdout + done.stderr
    assert '"int"' in done.stdout and 'incompatible type "str"; expected "int"' in done.stdout
    assert "import-untyped" not in done.stdout, "py.typed is missing"


@pytest.mark.parametrize("name", PLACES)
def test_the_metadata_is_complete(installed: Installed, name: str) -> None:
    project = tomllib.loads((ROOT / PLACES[name] / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(installed.wheels[name]) as wheel:
        members = wheel.namelist()
        info = next(m.split("/")[0] for m in members if ".dist-info/" in m)
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    for key in ("Summary", "Author", "Keywords", "License-Expression", "Requires-Python"):
        assert metadata[key], key
    assert metadata["Version"] == installed.python("import tilework; print(tilework.__version__)") == project["version"]
    assert metadata["Description-Content-Type"] == "text/markdown" and len(metadata.get_payload()) > 500
    assert len(metadata.get_all("Classifier")) >= 8 and "Typing :: Typed" in metadata.get_all("Classifier")
    assert licence == (ROOT / "LICENSE").read_text()
    package = name.removeprefix("tilework_")
    assert {f"{package}/py.typed", f"{package}/errors.md"} <= set(members)
