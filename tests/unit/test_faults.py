"""Faults in the middle of things: kill -9, Ctrl-C, a full disk, two at once. Nothing half-written, no stale lock."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tilework
from models import MODELS
from tilework.artifact.reader import read_artifact
from tilework.compiler import toolchain
from tilework.compiler.cache import Cache, cache_folder

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


def compile_command(out: Path, device: str = "reference", name: str = "linear") -> list[str]:
    return [sys.executable, "-m", "tilework.cli.main", "compile", f"{TESTS}/models.py:{name}", "-o", str(out), "--device", device,
            "--opt-level", "1"]  # fmt: skip


def environment(cache: Path) -> dict[str, str]:
    return with_tests_on_path() | {"TILEWORK_CACHE": str(cache)}


def with_tests_on_path() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of its own, but with the precompiled header already there: it costs 6 s."""
    folder = tmp_path / "cache"
    Cache(folder)
    header = toolchain.precompiled_header(tilework.Options(opt_level=1), cache_folder() / "headers")
    for file in (header, Path(f"{header}.gch")):
        os.link(file, folder / "headers" / file.name)
    return folder


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "cache" and not p.name.endswith((".pef", ".safetensors")))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_ended_in_the_middle(cache: Path, tmp_path: Path, number: signal.Signals) -> None:
    r = random.Random(int(number))
    for i in range(4 if os.environ.get("TILEWORK_FULL") == "1" else 1):
        out = tmp_path / f"m{i}.pef"
        process = subprocess.Popen(compile_command(out, "cpu"), env=environment(cache), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)  # fmt: skip
        time.sleep(2.0 + 4 * r.random())
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
        if out.exists():  # it was quicker than the signal
            read_artifact(out)
        else:
            assert process.returncode == (-9 if number == signal.SIGKILL else 130), err
            assert number == signal.SIGKILL or "Traceback" not in err
    # and afterwards all is well: no lock is held, what was left behind is swept
    out = tmp_path / "after.pef"
    done = subprocess.run(compile_command(out, "cpu"), env=environment(cache), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    read_artifact(out)
    assert leftovers(tmp_path) == [] and list((cache / "scratch").iterdir()) == []


def test_killed_while_writing_leaves_no_artifact(tmp_path: Path) -> None:
    """The moment before the rename: the part file is there, the artifact is not; the next compile sweeps it."""
    code = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
import tilework, pathlib
from models import MODELS
pathlib.Path.replace = lambda self, target: os.kill(os.getpid(), 9)
tilework.compile(MODELS["linear"](), {str(tmp_path / "m.pef")!r}, options=tilework.Options(device="reference"), weights="none")
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert not (tmp_path / "m.pef").exists() and len(leftovers(tmp_path)) == 1
    tilework.compile(MODELS["linear"](), tmp_path / "m.pef", options=tilework.Options(device="reference"), weights="none")
    assert leftovers(tmp_path) == []


def test_two_compiles_at_once(cache: Path, tmp_path: Path) -> None:
    """Of the same thing, to the same file and to different ones: all succeed, and the code is built once."""
    outs = [tmp_path / "same.pef", tmp_path / "same.pef", tmp_path / "other.pef"]
    running = [subprocess.Popen(compile_command(o, "cpu"), env=environment(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
               for o in outs]  # fmt: skip
    for process in running:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err.decode()
    members = [read_artifact(o).native for o in set(outs)]
    assert members[0] == members[1]
    assert len(Cache(cache).entries()) == 3  # the fused step, the other programs together, the driver


def test_disk_full_while_writing(tmp_path: Path, monkeypatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "m.pef"))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(tilework.MachineError, match="no space left") as e:
        tilework.compile(MODELS["linear"](), tmp_path / "m.pef", options=tilework.Options(device="reference"))
    assert e.value.exit_code == 3 and leftovers(tmp_path) == [] and not (tmp_path / "m.pef").exists()


def test_a_really_full_disk(tmp_path: Path) -> None:
    """A file system of 16 kB."""
    place = tmp_path / "small"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(place)], capture_output=True).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    try:
        done = subprocess.run(compile_command(place / "m.pef", name="unet"), env=with_tests_on_path(),
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 3 and "no space left" in done.stderr, done.stderr
        assert [p.name for p in place.iterdir() if p.suffix == ".pef" or ".part" in p.name] == []
        full = subprocess.run(
            compile_command(tmp_path / "m.pef", "cpu"), env=environment(place / "cache"), capture_output=True, text=True
        )
        assert full.returncode == 3 and "no space left" in full.stderr, full.stderr
        assert not (tmp_path / "m.pef").exists()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_compiler_that_is_missing_or_fails(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    toolchain.compiler.cache_clear()
    try:
        with pytest.raises(tilework.MachineError, match=r"apt-get install g\+\+"):
            tilework.compile(MODELS["linear"](), tmp_path / "m.pef", cache=Cache(tmp_path / "cache"))
    finally:
        toolchain.compiler.cache_clear()


def test_cache_says_why_it_missed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    built = []

    def build(folder: Path) -> bytes:
        built.append(folder)
        return b"code"

    first = cache.get("m.step", {"graph": "a" * 64, "torch": "2.13"}, build)
    assert not first.hit and first.why == "first compile of this name"
    assert cache.get("m.step", {"graph": "a" * 64, "torch": "2.13"}, build).hit
    changed = cache.get("m.step", {"graph": "b" * 64, "torch": "2.14"}, build)
    assert changed.why == "changed: graph, torch '2.13' -> '2.14'" and len(built) == 2
    assert cache.get("n.step", {"graph": "a" * 64, "torch": "2.13"}, build).hit  # by content, whatever the name


def test_damaged_cache_entry_is_built_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    parts = {"graph": "x"}
    cache.get("m", parts, lambda _: b"good")
    (tmp_path / "programs" / cache.key(parts) / "code.so").write_bytes(b"evil")
    assert cache.get("m", parts, lambda _: b"good").code == b"good"
    record = json.loads((tmp_path / "programs" / cache.key(parts) / "key.json").read_text())
    assert record["parts"] == parts


def test_prune_removes_the_longest_unused(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for i in range(4):
        cache.get("m", {"i": str(i)}, lambda _: b"x" * 1000)
        os.utime(tmp_path / "programs" / cache.key({"i": str(i)}), (i, i))
    assert cache.prune(2500) == 2
    assert {p["i"] for _, _, _, p in cache.entries()} == {"2", "3"}
