"""The U-Net of apps/image, by the scripts and arguments that its users type, at a size for a laptop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
UNET = ROOT / "apps" / "image" / "unet"
LINE = re.compile(
    r"inner train loop time : ([\d.e-]+) for (\d+) epochs, number of global steps: (\d+), e2e samples_per_sec: ([\d.]+)"
)
SMALL = ["--in-channels=3", "--in-width=32", "--in-height=32", "-b", "4", "--init-features", "4", "--depth", "2"]


def call(folder: Path, *words: str, status: int = 0, **env: str) -> str:
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TILEWORK_LEASE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*words], cwd=folder, capture_output=True, text=True, timeout=250, env=os.environ | own | env)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines(text: str) -> list[tuple[float, int, int, float]]:
    return [(float(t), int(e), int(n), float(r)) for t, e, n, r in LINE.findall(text)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unet")
    text = call(place, str(UNET / "Unet2d.sh"), "compile", "32", "4", "1", "one", "--size", "tiny")
    assert "/one/Unet2d.out for output" in text and (place / PEF).exists()
    return place


PEF = "out/Unet2d/unet_train_4_32_single_4/unet_train_4_32_single_4.pef"


def test_one_instance(folder: Path) -> None:
    again = call(folder, str(UNET / "Unet2d.sh"), "compile", "32", "4", "1", "one", "--size", "tiny")
    assert "is there already" in again and "Compilation succeeded" not in again
    text = call(folder, str(UNET / "Unet2d.sh"), "run", "32", "4", "1", "one", "--size", "tiny", EPOCHS="3")
    ((took, epochs, steps, rate),) = lines(text)
    assert (epochs, steps) == (3, 48) and rate == pytest.approx(steps * 4 / took, rel=1e-6)
    losses = [float(v) for v in re.findall(r"Loss: ([\d.]+)", text)]
    assert losses == sorted(losses, reverse=True) and len(losses) == 3
    (output,) = folder.glob("results/*/*/one/Unet2d.out")
    assert lines(output.read_text()) == lines(text)
    assert list(output.parent.glob("log_dir_unet_32_4_single_4/events.*"))


def test_several_instances(folder: Path) -> None:
    for command in ("pcompile", "prun"):
        text = call(folder, str(UNET / "Unet2d.sh"), command, "32", "4", "2", "two", "--size", "tiny")
    assert (folder / "out/Unet2d/unet_train_4_32_NP_4/unet_train_4_32_NP_4.pef").exists()
    found = lines(text)
    assert [f[1:3] for f in found] == [(2, 16)] * 2  # each instance has half of the pictures
    assert all(rate == pytest.approx(16 * 4 * 2 / took, rel=1e-6) for took, _, _, rate in found)


def test_the_test_command(folder: Path) -> None:
    assert "test passed" in call(folder, sys.executable, str(UNET / "hook.py"), "test", "--pef", PEF, *SMALL)


@pytest.mark.parametrize(
    ("flag", "words"), [("--min-throughput=1e9", "at least 1000000000"), ("--max-throughput=0.1", "at most 0.1")]
)
def test_throughput_out_of_range_fails_the_run(folder: Path, flag: str, words: str) -> None:
    hook = [sys.executable, str(UNET / "unet_hook.py"), "run", "--do-train", "--pef", PEF, *SMALL]
    text = call(folder, *hook, "--num-samples", "16", flag, status=1)
    assert words in text and len(lines(text)) == 1


def test_pictures_and_their_cache(folder: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(8):
        place = folder / "kaggle_3m" / f"patient{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(place / f"{i}.tif")
        Image.fromarray((rng.random((40, 40)) > 0.7).astype(np.uint8) * 255).save(place / f"{i}_mask.tif")
    run = [sys.executable, str(UNET / "hook.py"), "run", "--pef", PEF, *SMALL, "--data-dir", "kaggle_3m", "--epochs", "2"]
    plain = re.findall(r"Loss: ([\d.]+)", call(folder, *run, "--num-workers", "2"))
    first = call(folder, *run, "--data-cache", "cache", "--data-in-memory")
    assert "8 pictures decoded into cache" in first
    second = call(folder, *run, "--data-cache", "cache")
    assert "decoded" not in second
    assert plain == re.findall(r"Loss: ([\d.]+)", first) == re.findall(r"Loss: ([\d.]+)", second) and len(plain) == 2
    (folder / "kaggle_3m" / "patient1" / "3.tif").write_bytes(b"torn")
    assert "patient1/3.tif" in call(folder, *run, status=2)
    assert "skipped" in call(folder, *run, "--bad-records", "skip")


def test_wrong_arguments(folder: Path) -> None:
    assert "pcompile|prun" in call(folder, str(UNET / "Unet2d.sh"), "compile", status=2)
    assert "for 1 instance" in call(folder, str(UNET / "Unet2d.sh"), "run", "32", "4", "2", "x", status=2)
    assert "expected compile" in call(folder, str(UNET / "Unet2d.sh"), "walk", "32", "4", "1", "x", status=2)
    assert "tiny, small or full" in call(folder, str(UNET / "Unet2d.sh"), "run", "32", "4", "1", "x", "--size", "huge", status=2)
    odd = ["--in-channels=3", "--in-width=30", "--in-height=30", "--depth", "2"]
    assert "divisible by 4" in call(folder, sys.executable, str(UNET / "compile.py"), "compile", *odd, status=1)


def test_the_older_scripts(folder: Path) -> None:
    text = call(folder, str(UNET / "unet_all.sh"), "32", "4", "--size", "tiny")
    assert "COMPILE" in text and "NN=2" in text and "Duration:" in text and len(lines(text)) == 2
    script = str(UNET / "unet_compile_run_inf_rl.sh")
    out = {"OUTDIR": str(folder / "older")}
    call(folder, script, "compile", "32", "4", "--size", "tiny", **out)
    assert "test passed" in call(folder, script, "test", "32", "4", "--size", "tiny", **out)
    assert len(lines(call(folder, script, "run", "32", "4", "--size", "tiny", **out))) == 1
