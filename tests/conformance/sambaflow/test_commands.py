"""The commands that users type: starters, the page's program, mistakes, and a site."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tilework

ROOT = Path(__file__).parents[3]
STARTERS = ROOT / "apps" / "starters"


def run(place: Path, *words: str, code: int = 0, **env: str) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, env={**os.environ, "TILEWORK_DEVICE": "cpu", **env})
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def logreg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("logreg")
    said = run(
        place, str(STARTERS / "logreg" / "logreg.py"), "compile", "--pef-name=logreg", "--output-folder=pef", "--num-tiles", "4"
    )
    assert (place / "pef" / "logreg" / "logreg.plasma_compile.log").stat().st_size
    for kind in ("SAMBA", "MAC"):
        log = place / "pef" / "logreg" / f"logreg.{kind.lower()}.log"
        assert f"[Info][{kind}]# Placing log files in {log}" in said and log.stat().st_size
    assert said.rstrip().endswith(f"[info   ] PEF file {place / 'pef/logreg/logreg.pef'} created")
    return place


def test_run(logreg: Path, tmp_path: Path) -> None:
    said = run(logreg, str(STARTERS / "logreg" / "logreg.py"), "run", "--pef=pef/logreg/logreg.pef", "--data-path", "nowhere",
               "--log-path", str(tmp_path / "logs"), "--acc-report-json", str(tmp_path / "acc.json"), "-e", "2")  # fmt: skip
    assert "Epoch [1/2], Step [1000/6000], Loss: " in said and "Epoch [2/2], Step [6000/6000], Loss: " in said
    assert "digits that Tilework carries" in said
    accuracy = float(re.search(r"Test Accuracy: ([\d.]+) Loss: [\d.]+", said)[1])  # type: ignore[index]
    assert accuracy > 80 and json.loads((tmp_path / "acc.json").read_text())["val_metrics"]["acc"] == pytest.approx(
        accuracy, abs=0.01
    )
    assert (tmp_path / "logs" / "logreg.pt").exists() and list((tmp_path / "logs").glob("events.out.tfevents*"))


def test_test_and_its_failure(logreg: Path, tmp_path: Path) -> None:
    app = STARTERS / "logreg" / "logreg.py"
    assert "host and device agree" in run(logreg, str(app), "test", "--pef=pef/logreg/logreg.pef")
    difference = (  # the host's weights, changed behind the app's back
        "from sambaflow.samba.sambasession import SambaSession\n_trace = SambaSession.trace\n"
        "def _planted(self, model, *a, **k):\n    done = _trace(self, model, *a, **k)\n"
        "    model.lin_layer.bias.data += 0.01\n    return done\nSambaSession.trace = _planted\n"
    )
    planted = app.read_text().replace("parents[1]", "parents[0]").replace("if __name__ ==", difference + "if __name__ ==")
    (tmp_path / "logreg.py").write_text(planted.replace("str(Path(__file__).resolve().parents[0])", repr(str(STARTERS))))
    assert "AssertionError" in run(logreg, str(tmp_path / "logreg.py"), "test", "--pef=pef/logreg/logreg.pef", code=1)


def test_measure(logreg: Path, tmp_path: Path) -> None:
    app = str(STARTERS / "logreg" / "logreg.py")
    said = run(logreg, app, "measure-performance", "--pef=pef/logreg/logreg.pef", "-n", "200", "--json", str(tmp_path / "p.json"))
    found = re.search(r"e2e_latency: ([\d.]+) seconds, throughput: ([\d.]+) samples/s, measured over 200 iterations\.", said)
    assert found and float(found[2]) == pytest.approx(1 / float(found[1]), rel=0.01)
    assert "Measuring peformance with world size:  1" in said and "combined throughput for 1 workers" in said
    assert json.loads((tmp_path / "p.json").read_text())["e2e_latency"] == pytest.approx(float(found[1]), rel=1e-3)
    said = run(logreg, app, "measure-sections", "--pef=pef/logreg/logreg.pef", "-n", "20")
    assert all(re.search(rf"^{s} +[\d.]+ s", said, re.M) for s in ("fwd", "bckwd", "opt"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "--pef=no.pef"], "no such file"),
        (["run", "--pef=pef/logreg/logreg.samba.log"], "not an artifact"),
        (["run", "--pef=pef/logreg/logreg.pef", "-b", "3"], r"batch size 1"),
        (
            ["test", "--pef=pef/logreg/logreg.pef", "--num-classes", "7"],
            r"lin_layer.weight: found \[7, 784\], expected \[10, 784\]",
        ),
        (["run", "--pef=pef/logreg/logreg.pef", "--nonsense"], "--nonsense"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_mistakes(logreg: Path, words: list[str], expected: str) -> None:
    said = run(logreg, str(STARTERS / "logreg" / "logreg.py"), *words, code=2)
    assert re.search(expected, said) and "Traceback" not in said
    if "nonsense" not in str(words) and words[0] != "frobnicate":
        assert "Traceback" in run(logreg, str(STARTERS / "logreg" / "logreg.py"), *words, "--debug", code=2)


def test_what_the_pef_remembers(logreg: Path) -> None:
    from sambaflow.samba.utils.pef_utils import PefInfoStruct, get_pef_info

    path = str(logreg / "pef/logreg/logreg.pef")
    assert get_pef_info(path, {"num_tiles": PefInfoStruct(1), "num_classes": PefInfoStruct(1)}) == {
        "num_tiles": 4,
        "num_classes": 10,
    }
    with pytest.raises(ValueError, match="num_moons"):
        get_pef_info(path, {"num_moons": PefInfoStruct()})
    assert tilework.read_artifact(path).manifest.metadata["sambaflow"]["modules"]["lin_layer"] == "Linear"


@pytest.mark.slow
@pytest.mark.parametrize("app", [pytest.param("res_ffn_mnist", marks=pytest.mark.full), "ffn_mnist"])
def test_other_starters(app: str, tmp_path: Path) -> None:
    script = str(STARTERS / app / f"{app}.py")
    run(tmp_path, script, "compile", "-b", "4", f"--pef-name={app}", "--mac-v2")
    assert "agree" in run(tmp_path, script, "test", "-b", "4", "-p", f"out/{app}/{app}.pef")
    assert "Test Accuracy" in run(tmp_path, script, "run", "-b", "4", "-p", f"out/{app}/{app}.pef", "--limit", "400")


@pytest.mark.slow
def test_boilerplate_in_data_parallel(tmp_path: Path) -> None:
    """The scripts of the starter as they are, after `tilework site install`, but for where /opt is: compile once, then two ranks
    on two RDUs, as jobs."""
    run(tmp_path, "-m", "tilework.cli.main", "site", "install", "--root", str(tmp_path))
    shutil.copytree(tmp_path / "opt/sambaflow/apps/starters", tmp_path / "apps")
    folder = tmp_path / "apps" / "boilerplate"
    (tmp_path / "run").mkdir(mode=0o700)
    env = {**os.environ, "TILEWORK_LEASE": "1", "TILEWORK_PLATFORM": "SN10-8", "TILEWORK_RUN": str(tmp_path / "run"),
           "TILEWORK_JOBS": str(tmp_path / "jobs"), "PATH": f"{tmp_path}/usr/local/bin:{os.environ['PATH']}"}  # fmt: skip
    said = ""
    for words in (["compile_dataparallel.sh"], ["--gres=rdu:2", "run_dataparallel.sh", "--limit", "300"]):
        script = folder / next(w for w in words if w.endswith(".sh"))
        # The environment is active where the job is submitted, as users have it.
        text = script.read_text().replace("set -e\n", "set -e\nsource /opt/sambaflow/venv/bin/activate\n")
        script.write_text(text.replace("/opt/", f"{tmp_path}/opt/"))
        done = subprocess.run(
            ["sbatch", "--wait", "--output=out.log", *words], cwd=folder, capture_output=True, text=True, env=env
        )
        said = (folder / "out.log").read_text()
        (folder / "out.log").unlink()
        assert done.returncode == 0, done.stdout + done.stderr + said
    assert said.count("DataParallel run: True") == 2 and said.count("Step [150/150]") == 2
    accuracies = re.findall(r"Test Accuracy: ([\d.]+) Loss: ([\d.]+)", said)  # lines of two ranks may run into each other
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1]  # the same weights on both ranks


@pytest.mark.slow
def test_the_program_on_the_page(tmp_path: Path) -> None:
    block = re.search(r"```py\n(.*?)```", (ROOT / "docs" / "sambaflow.md").read_text(), re.S)
    assert block is not None
    before = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(784, 10)

    def forward(self, image, label):
        out = self.fc(image)
        return nn.functional.cross_entropy(out, label), out

model, loader = Model(), [(torch.randn(2, 784), torch.randint(0, 10, (2,))) for _ in range(3)]
"""
    (tmp_path / "app.py").write_text(before + block[1])
    run(tmp_path, "app.py", "compile", "-b", "2", "--pef-name", "mine", TILEWORK_DEVICE="reference")
    run(tmp_path, "app.py", "run", "-b", "2", "--pef", "out/mine/mine.pef")


def test_a_site(tmp_path: Path) -> None:
    cli = ["-m", "tilework.cli.main", "site"]
    run(tmp_path, *cli, "install", "--root", str(tmp_path))
    top = tmp_path / "opt" / "sambaflow"
    assert (top / "apps/starters/lenet/lenet.py").exists() and (top / "apps/starters/lenet/venv/bin/activate").exists()
    script = (
        f"source {top}/venv/bin/activate && cp -r {top}/apps/starters . && cd starters/logreg && python logreg.py compile --help"
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--pef-name" in done.stdout, done.stderr
    run(tmp_path, *cli, "install", "--root", str(tmp_path))  # again: replaced
    run(tmp_path, *cli, "remove", "--root", str(tmp_path))
    assert not top.exists()
    (top / "mine").mkdir(parents=True)
    assert "left alone" in run(tmp_path, *cli, "install", "--root", str(tmp_path), code=2)
    assert "is not one of" in run(tmp_path, *cli, "demolish", code=2)
