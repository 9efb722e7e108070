"""The apps beside the starters, by the scripts and arguments that their users type, at a size for a laptop."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
UNET = ROOT / "apps" / "image" / "unet"
GPT = ROOT / "apps" / "nlp" / "transformers_on_rdu"
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


# ---- GPT ----

FLAGS = [
    "--module_name",
    "gpt2_pretrain",
    "--task_name",
    "clm",
    "-b",
    "4",
    "--size",
    "tiny",
    "--max_seq_length",
    "16",
    "--do_train",
    "--overwrite_output_dir",
    "--tokenizer_name",
    "gpt2",
    "--model_name",
    "gpt2",
    "--non_split_head",
]


def facts(text: str) -> list[dict[str, float]]:
    return [ast.literal_eval(line) for line in text.splitlines() if line.startswith("{'")]


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder, and what the first run said."""
    place = tmp_path_factory.mktemp("gpt")
    return place, call(place, str(GPT / "Gpt1.5B_single.sh"), "one", "--size", "tiny", STEPS="300")


def test_gpt_single(gpt: tuple[Path, str]) -> None:
    place, text = gpt
    *steps, last = facts(text)
    assert [s["step"] for s in steps] == list(range(1, 301)) and last.keys() == {
        "e2e_train_time", "training_sequences_per_second", "final_loss"
    }  # fmt: skip
    assert last["training_sequences_per_second"] == pytest.approx(300 * 4 / last["e2e_train_time"])
    assert last["final_loss"] == steps[-1]["loss"] < steps[0]["loss"] - 0.5
    (output,) = place.glob("results/*/*/one/Gpt1.5B.out")
    assert facts(output.read_text()) == facts(text) and f"Using {output} for output" in text
    again = call(place, str(GPT / "Gpt1.5B_single.sh"), "one", "--size", "tiny", STEPS="2", MIN_THROUGHPUT="1e9", status=1)
    assert "gpt15_single.pef is there already" in again and "expected at least 1000000000" in again


@pytest.mark.full
def test_gpt_on_two_instances(gpt: tuple[Path, str]) -> None:
    text = call(gpt[0], str(GPT / "Gpt1.5B_compile.sh"), "two", "--size", "tiny", STEPS="5")
    found = [f for f in facts(text) if "final_loss" in f]
    assert len(found) == 2
    assert all(f["training_sequences_per_second"] == pytest.approx(5 * 4 * 2 / f["e2e_train_time"]) for f in found)


def test_gpt_from_files_of_tokens(gpt: tuple[Path, str]) -> None:
    """The next token is the one that follows: sequences that count are learned."""
    import h5py
    import torch

    place = gpt[0]
    pef = str(next(place.glob("scratch/*/GPT_RUN/gpt15_single/*.pef")))
    counted = (np.arange(16)[None, :] + np.arange(64)[:, None]) % 64
    (place / "h5").mkdir()
    with h5py.File(place / "h5" / "train.h5", "w") as f:
        f["input_ids"] = counted
    (place / "bin").mkdir()
    np.tile(np.arange(64, dtype=np.uint16), 20).tofile(place / "bin" / "train.bin")
    how = ["--learning_rate", "0.01", "--max_steps", "150", "--logging_steps", "10", "--output_dir", "weights"]
    run = [sys.executable, str(GPT / "transformers_hook.py"), "run", "--pef", pef, *FLAGS, *how]
    for folder in ("h5", "bin"):
        found = facts(call(place, *run, "--data_dir", folder))
        assert found[-1]["final_loss"] < 0.5 and [f["step"] for f in found[:-1]] == list(range(10, 151, 10))
    weights = torch.load(place / "weights" / "pytorch_model.bin")
    assert weights["wte.weight"].shape == (64, 32)
    with h5py.File(place / "h5" / "train.h5", "w") as f:
        f["input_ids"] = counted[:, :12]
    assert "has 12 tokens" in call(place, *run, "--data_dir", "h5", status=1)
    (place / "empty").mkdir()
    assert "there is no *.h5" in call(place, *run, "--data_dir", "empty", status=1)


def test_the_configuration_of_the_full_size() -> None:
    """1.5 billion parameters, by the name that the scripts give; nothing is built."""
    import json

    found = json.loads((GPT / "configs" / "gpt2_config_xl_50260.json").read_text())
    width, layers = found["n_embd"], found["n_layer"]
    count = (found["vocab_size"] + found["n_positions"]) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert 1.5e9 < count < 1.6e9 and width % found["n_head"] == 0


UNO = ROOT / "apps" / "starters" / "uno" / "uno.py"


@pytest.mark.full
def test_uno_in_spatial_batches(tmp_path: Path) -> None:
    """2 runs of 20 mini-batches instead of 40 runs: the numbers are the same."""
    call(tmp_path, sys.executable, str(UNO), "compile", "-b", "16", "--pef-name", "uno", "--mapping", "spatial")
    pef = ["-b", "16", "-p", "out/uno/uno.pef"]
    assert "test passed" in call(tmp_path, sys.executable, str(UNO), "test", *pef)
    spatial = [sys.executable, str(UNO), "run", *pef, "--mapping", "spatial", "--num-spatial-batches", "20", "-e", "3",
               "--train-samples", "640", "--val-samples", "320"]  # fmt: skip
    many, single = call(tmp_path, *spatial, "--spatial_train"), call(tmp_path, *spatial)
    steps, found = zip(*re.findall(r"Step \[(\d+)/40\], Loss: ([\d.]+)", many), strict=True)
    assert steps == ("20", "40") * 3 and float(found[-1]) < float(found[0])
    assert set(re.findall(r"Step \[(?:20|40)/40\], Loss: ([\d.]+)", single)) == set(found)
    validation = [line for line in many.splitlines() if line.startswith("Validation samples: 320")]
    assert validation and validation[0] in single
    refused = call(tmp_path, sys.executable, str(UNO), "run", *pef, "--spatial_train", status=1)
    assert "--spatial_train needs --mapping spatial" in refused
