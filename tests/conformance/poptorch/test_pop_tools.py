"""gc-info, gc-inventory, gc-monitor, vipu and popc, over a view as the daemon of tiles gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from poptorch.tools import devices as module
from poptorch.tools.gcinfo import info, inventory
from poptorch.tools.gcmonitor import main as monitor
from poptorch.tools.others import popc, vipu
from tilework.tiles.view import DaemonView, SessionView, TileView, View


@pytest.fixture(autouse=True)
def four_chips(monkeypatch):
    """Of two tiles each; a process holds the second chip."""
    tiles = [TileView(f"/BOARD_0/CHIP_{i // 2}/TILE_{i % 2}", i // 2, (i,)) for i in range(8)]
    for t in tiles[2:4]:
        t.lease, t.state = "a1", "held"
    lease = SessionView(
        "a1", "exclusive", 4321, "arnoldw", 1, "python mnist_poptorch.py", (2, 3), held_seconds=75.0, shares={"exec": 80.0}
    )
    seen = View(
        "host", "this machine", False, ("BOARD", "CHIP", "TILE"), tiles, DaemonView(1, "root", 0.0, "0", "/run"), leases=[lease]
    )
    monkeypatch.setattr(module, "view", lambda *_: seen)
    monkeypatch.setattr("tilework.tiles.client.view", lambda **_: seen)
    monkeypatch.setattr("socket.gethostname", lambda: "node")


def test_the_list(capsys) -> None:
    assert info(["-l"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "-+- Id:  [0], target: [Fabric], IPU-M host:  [node], IPU#: [0]"
    assert [line for line in lines if "Multi" in line] == [f"-+- Id:  [{i}], target: [Multi IPU]" for i in (4, 5, 6)]
    assert lines[-1].startswith(" |--- Id:  [3]") and len(lines) == 4 + 3 + 2 + 2 + 4


def test_one_device(capsys) -> None:
    assert info(["-d", "1", "--device-info"]) == 0
    found = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert found["user process id"] == "4321" and found["ipu utilisation"] == "80.00%" and found["cpus"] == "2,3"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ipu-count"], "4\n"),
        (["-d", "6", "--ipu-count"], "4\n"),
        (["-d", "4", "--ipu-count"], "2\n"),
        (["--ipu-arch"], "cpu\n"),
    ],
)
def test_counts(capsys, words, text: str) -> None:
    assert info(words) == 0 and capsys.readouterr().out == text


def test_a_device_that_is_not_there(capsys) -> None:
    assert info(["-d", "9"]) == 2
    assert "there is no device 9" in capsys.readouterr().err


def test_the_monitor(capsys) -> None:
    assert monitor([]) == 0
    both = capsys.readouterr().out
    assert monitor(["--no-card-info", "--all-partitions"]) == 0
    processes = capsys.readouterr().out
    assert "IPU-M" in both and "IPU-M" not in processes and both.endswith(processes)
    assert "4321" in processes and "arnoldw" in processes and "python mnist_poptorch.py" in processes
    assert len({len(line) for line in processes.splitlines()}) == 1  # a table
    assert monitor(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(d["processes"]) for d in found] == [0, 1, 0, 0]


def test_the_inventory(capsys) -> None:
    assert inventory([]) == 0
    out = capsys.readouterr().out
    assert out.count("\nIPU ") == 4 and "python mnist_poptorch.py" in out


def test_partitions_are_leases(capsys) -> None:
    assert vipu(["list", "partitions"]) == 0
    assert "arnoldw" in capsys.readouterr().out
    assert vipu(["list", "ipu-attrs"]) == 0 and "1: 2 tiles, held" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "text"), [
    (["create", "partition", "mine", "--size", "3"], "a power of two"), (["create", "partition"], "needs a name"),
    (["create", "allocation", "mine"], "only partitions"), (["remove", "partition", "mine", "--what"], "unknown: --what"),
    (["create", "partition", "mine", "--size", "8"], "at most 4"), (["create", "partition", "12"], "under this name"),
    (["remove", "partition", "mine"], "no tiles are kept"),
])  # fmt: skip
def test_partitions_that_cannot_be(capsys, words, text: str) -> None:
    assert vipu(words) == 2
    assert text in capsys.readouterr().err


def test_popc(capsys) -> None:
    assert popc(["--version"]) == 0
    assert capsys.readouterr().out.startswith("POPLAR version 3.4.0 (")
    assert popc(["codelet.cpp"]) == 2 and "register_custom_op" in capsys.readouterr().err


PROGRAM = """
import torch, poptorch
from tilework.tiles import holding
executor = poptorch.inferenceModel(torch.nn.Linear(4, 2), poptorch.Options().showCompilationProgressBar(False))
executor(torch.zeros(2, 4))
lease = holding._held.lease
print("tiles", *(lease.tiles if lease is not None else ()))
"""


@pytest.mark.slow
def test_a_partition_from_its_making_to_its_end(tmp_path) -> None:
    """Over a daemon of its own: a program in the partition's environment runs on the partition's tiles."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TILEWORK_", "IPUOF_"))}
    env = {**clean, "TILEWORK_RUN": str(tmp_path / "run"), "TILEWORK_DEVICE": "reference"}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env={**env, **more}, capture_output=True, text=True, timeout=60)

    def tool(*words: str) -> subprocess.CompletedProcess[str]:
        return run(sys.executable, "-c", "from poptorch.tools.others import run_vipu; run_vipu()", *words)

    try:
        made = tool("create", "partition", "mine", "--size", "1", "--reconfigurable")
        assert (made.returncode, made.stdout) == (0, "create partition (mine): success.\n"), made.stderr
        again = tool("create", "partition", "mine", "--size", "1")
        assert again.returncode == 2 and "already" in again.stderr
        listed = tool("list", "partitions")
        assert " mine " in listed.stdout, listed
        inside = run(sys.executable, "-c", PROGRAM, IPUOF_VIPU_API_PARTITION_ID="mine")
        assert inside.returncode == 0 and len(inside.stdout.split()) > 1, inside
        for name in ("", "elsewhere"):  # as on a machine where it has always been set
            outside = run(sys.executable, "-c", PROGRAM, IPUOF_VIPU_API_PARTITION_ID=name)
            assert outside.stdout.split() == ["tiles"], outside
        ended = tool("remove", "partition", "mine")
        assert (ended.returncode, ended.stdout) == (0, "remove partition (mine): success.\n"), ended.stderr
        assert " mine " not in tool("list", "partitions").stdout
    finally:
        tool("remove", "partition", "mine")
        run(sys.executable, "-m", "tilework", "daemon", "stop")
