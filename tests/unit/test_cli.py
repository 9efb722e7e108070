"""The command: every verb, --json, --help with an example, and the exit codes 0, 1, 2, 3, 4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forge

TESTS = Path(__file__).parents[1]
VERBS = ["compile", "run", "test", "measure", "inspect", "cache", "doctor", "explain"]

MODEL = '''
import torch, torch.nn.functional as F
from torch import nn
import tilework

def build(width: int = 8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), (x, y)

def other():
    torch.manual_seed(1)
    return build()[0], nn.CrossEntropyLoss(), None, (torch.randn(5, 4), torch.zeros(5, dtype=torch.int64))

def different():
    """The same shapes, but it computes something else."""
    class Odd(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 1.01
    torch.manual_seed(0)
    model = Odd(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return tilework.Step(model=model, loss=nn.CrossEntropyLoss(), inputs=(torch.randn(5, 4),),
                         targets=(torch.zeros(5, dtype=torch.int64),), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

def batches(rows):
    g = torch.Generator().manual_seed(0)
    for _ in range(7):
        yield torch.randn(rows, 4, generator=g), torch.randint(0, 3, (rows,), generator=g)

def broken_batches():
    yield torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)
    raise RuntimeError("the disk with the data is gone")

def nan_batches():
    yield torch.randn(5, 4), torch.zeros(5, dtype=torch.int64)
    yield torch.full((5, 4), float("nan")), torch.zeros(5, dtype=torch.int64)

def raises():
    return 1 / 0

def nothing():
    return 42

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return self.fc(x)

def branches():
    m = Branches()
    return {"model": m, "inputs": (torch.randn(5, 4),), "targets": (torch.zeros(5, dtype=torch.int64),), "loss": F.cross_entropy}
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "model.py").write_text(MODEL)
    done = tilework(folder, "compile", "model.py:build", "-o", "m.pef", "--device", "reference")
    assert done.returncode == 0, done.stderr
    return folder


def tilework(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tilework.cli.main", *args], cwd=folder, capture_output=True, text=True,
                          env=os.environ | env, timeout=300)  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(tmp_path: Path, verb: str) -> None:
    done = tilework(tmp_path, verb, "--help")
    assert done.returncode == 0 and f"Example: tilework {verb}" in done.stdout
    assert "--json" in done.stdout


def test_version_and_no_arguments(tmp_path: Path) -> None:
    import tilework as package

    assert tilework(tmp_path, "--version").stdout.strip() == f"tilework {package.__version__}"
    assert "compile" in tilework(tmp_path).stdout


def test_compile_says_what_it_did(place: Path) -> None:
    done = tilework(
        place,
        "compile",
        "model.py:build",
        "-o",
        "n.pef",
        "--device",
        "null",
        "--weights",
        "inside",
        "--json",
        "--set",
        "width=16",
    )
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["artifact"] == "n.pef" and result["weights"] is None
    assert (
        set(result["programs"]) == {"step", "fwd", "bwd", "opt", "infer"}
        and result["memory"]["param"] == (4 * 16 + 16 + 16 * 3 + 3) * 4
    )
    planned = tilework(place, "compile", "model.py:build", "-o", "never.pef", "--plan-only")
    assert "fwd+bwd+opt" in planned.stdout and not (place / "never.pef").exists()


def test_inspect(place: Path) -> None:
    text = tilework(place, "inspect", "m.pef", "--operators").stdout
    for words in ("float32[5,4]", "opt0.g0", "fwd+bwd+opt", "memory", "sgd", "sha256"):
        assert words in text
    graph = tilework(place, "inspect", "m.pef", "--graph", "fwd").stdout
    assert "aten.addmm.default" in graph and "write %output/loss" in graph
    manifest = json.loads(tilework(place, "inspect", "m.pef", "--json").stdout)
    assert manifest["name"] == "m" and all(p["ok"] for p in manifest["fits"])
    wrong = tilework(place, "inspect", "m.pef", "--graph", "fwdd")
    assert wrong.returncode == 2 and "did you mean 'fwd'" in wrong.stderr


def test_run_trains_saves_and_goes_on(place: Path) -> None:
    done = tilework(
        place,
        "run",
        "m.pef",
        "--data",
        "model.py:batches",
        "--epochs",
        "3",
        "--save",
        "w.safetensors",
        "--log",
        "l.jsonl",
        "--json",
    )
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["steps"] == 21 and result["last_loss"] < result["first_loss"] + 1
    lines = [json.loads(line) for line in (place / "l.jsonl").read_text().splitlines()]
    assert len(lines) == 21 and lines[-1]["epoch"] == 3
    more = tilework(
        place,
        "run",
        "m.pef",
        "--data",
        "model.py:batches",
        "--weights",
        "w.safetensors",
        "--steps",
        "2",
        "--hyper",
        "lr=0.01",
    )
    assert more.returncode == 0 and "2 steps" in more.stdout
    assert tilework(place, "run", "m.pef", "--steps", "1").returncode == 0  # random data


def test_run_reports_the_users_mistakes(place: Path) -> None:
    broken = tilework(place, "run", "m.pef", "--data", "model.py:broken_batches")
    assert broken.returncode == 2 and "the disk with the data is gone" in broken.stderr and "model.py:" in broken.stderr
    assert "Traceback" not in broken.stderr
    nan = tilework(place, "run", "m.pef", "--data", "model.py:nan_batches", "--nan-error")
    assert nan.returncode == 2 and "not a number at step 2" in nan.stderr
    assert tilework(place, "run", "m.pef", "--data", "model.py:nan_batches").returncode == 0
    assert tilework(place, "run", "m.pef", "--hyper", "lr=fast").returncode == 2
    assert "did you mean 'lr'" in tilework(place, "run", "m.pef", "--hyper", "lrr=1").stderr


@pytest.mark.slow
def test_test_passes_and_fails(place: Path) -> None:
    good = tilework(place, "test", "m.pef", "model.py:build")
    assert good.returncode == 0 and "against your module in eager PyTorch" in good.stdout
    # inference: 1 output; the step and the one after it: 2 outputs, 4 parameters; by section also 4 gradients; the verdict
    assert good.stdout.count("pass") == 1 + 2 * (2 + 4) + (2 + 4 + 4) + 1 and "2.weight" in good.stdout
    only = tilework(place, "test", "m.pef", "--brief")
    assert only.returncode == 0 and "graph only" in only.stdout and "gradient" in only.stdout
    bad = tilework(place, "test", "m.pef", "model.py:different")
    assert bad.returncode == 1 and "FAIL: first difference in output loss" in bad.stdout
    result = json.loads(tilework(place, "test", "m.pef", "model.py:different", "--json").stdout)
    assert result["ok"] is False and result["first_difference"]["name"] == "loss"
    kinds = {row["kind"] for row in result["rows"]}
    assert kinds == {"output", "gradient", "parameter", "inference output", "second output", "second parameter"}


def test_measure(place: Path) -> None:
    result = json.loads(tilework(place, "measure", "m.pef", "--seconds", "0.05", "--json").stdout)
    assert set(result["rows"]) == {"step", "fwd", "bwd", "opt", "infer"} and result["samples_per_step"] == 5
    assert all(0 < row["min_us"] <= row["median_us"] for row in result["rows"].values())


def test_doctor_and_cache(place: Path, tmp_path: Path) -> None:
    checks = json.loads(tilework(place, "doctor", "--json").stdout)
    assert {c["name"] for c in checks} >= {"python", "torch", "cache", "memory"}
    missing = tilework(place, "doctor", PATH="/nonexistent")
    assert missing.returncode == 3 and "apt-get install g++" in missing.stdout
    cache = json.loads(tilework(place, "cache", "--json", TILEWORK_CACHE=str(tmp_path)).stdout)
    assert cache["folder"] == str(tmp_path) and cache["programs"] == []
    assert "removed 0" in tilework(place, "cache", "--clear", TILEWORK_CACHE=str(tmp_path)).stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["compile"], "Missing argument"),
        (["compile", "model.py:build", "--nonsense"], "nonsense"),
        (["compile", "model.py"], "FILE.py:function"),
        (["compile", "nothere.py:build"], "no such file"),
        (["compile", "model.py:bild"], "did you mean 'build'"),
        (["compile", "model.py:raises"], "ZeroDivisionError"),
        (["compile", "model.py:nothing"], "must return the training step"),
        (["compile", "model.py:build", "--set", "depth=3"], "width"),
        (["compile", "tilework.zoo.uno:build", "--set", "towers=3"], "did you mean 'tower'"),
        (["compile", "tilework.zoo.uno:build", "--set", "size=tinny"], "did you mean 'tiny'"),
        (["compile", "model.py:build", "--device", "tpu"], "reference"),
        (["compile", "model.py:build", "--weights", "cloud"], "separate"),
        (["compile", "model.py:branches"], "if x.sum() > 0:"),
        (["run", "none.pef"], "no such file"),
        (["run", "model.py"], "not an artifact"),
        (["test", "m.pef", "model.py:build", "--set", "width=5"], "0.weight"),
        (["inspect", "w.pef"], "no such file"),
        (["bogus"], "bogus"),
    ],
)
def test_user_mistakes_exit_with_2(place: Path, args: list[str], words: str) -> None:
    done = tilework(place, *args)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr


def test_what_the_users_code_prints_is_not_json(place: Path) -> None:
    (place / "loud.py").write_text(
        "print('hello')\nfrom model import build as quiet\ndef build():\n    print('building')\n    return quiet()\n"
    )
    done = tilework(place, "compile", "loud.py:build", "-o", "loud.pef", "--device", "null", "--json")
    assert json.loads(done.stdout)["artifact"] == "loud.pef" and "building" in done.stderr


@pytest.mark.slow
def test_places_of_mistakes_in_files(place: Path) -> None:
    (place / "syntax.py").write_text("x = 1\ndef build(:\n    pass\n")
    assert "syntax.py:2" in tilework(place, "compile", "syntax.py:build").stderr
    assert "there is no module 'nope'" in tilework(place, "compile", "nope.mod:build").stderr
    assert "does not take digits" in tilework(place, "run", "m.pef", "--data", "digits").stderr
    assert "is a folder" in tilework(place, "compile", "model.py:build", "-o", ".").stderr
    assert "loud.py:4" not in tilework(place, "compile", "model.py:raises").stderr


def test_the_environment_exits_with_3_and_json_errors(place: Path) -> None:
    members = forge.members_of(place / "m.pef")
    fingerprint = json.loads(members["manifest.json"])["fingerprint"] | {"device": "cuda"}
    forge.write(place / "gpu.pef", forge.change_manifest(members, fingerprint=fingerprint))
    done = tilework(place, "run", "gpu.pef", "--device", "cpu", "--json")
    assert done.returncode == 3 and json.loads(done.stdout)["error"] == "artifact-fingerprint"
    assert tilework(place, "run", "gpu.pef", "--device", "null").returncode == 0


def test_our_bug_exits_with_4(place: Path) -> None:
    code = "import tilework.cli.main as m, tilework.cli.doctor as d; d._checks = lambda: 1 / 0; m.main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 4 and "bug in Tilework" in done.stderr and "Traceback" in done.stderr


def test_options_of_a_run_in_a_folder(place: Path) -> None:
    """An option that would do nothing is refused, not passed over."""
    found = tilework(place, "run", "m.pef", "--steps", "1", "--num-workers", "2", "--log-dir", "board", "--resume")
    assert found.returncode == 2 and "--resume" in found.stderr and "--log-dir" in found.stderr and "--run-dir" in found.stderr
    found = tilework(place, "run", "m.pef", "--data", "digits", "--run-dir", "r", "--save", "w.safetensors")
    assert found.returncode == 2 and "--save: not for a run" in found.stderr and not (place / "r").exists()
