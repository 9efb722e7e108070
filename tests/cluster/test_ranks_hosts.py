"""Two network namespaces, joined by one cable, as two machines with two ranks each: sums within each machine through its memory,
between them through the network; and what happens when the cable is pulled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launchers import HERE, IN_FULL, Ranks
from test_ranks_parity import judge
from training import compile_for

NAMES = [f"tilework-{os.getpid()}-{i}" for i in range(2)]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[str]:
    """The name of the first machine's end of it."""
    if os.getuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, and ip (apt-get install iproute2)")
    ends = [f"tw{os.getpid() % 10000}{i}" for i in "ab"]
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", NAMES[0], "type", "veth", "peer", "name", ends[1], "netns", NAMES[1])
    except subprocess.CalledProcessError as e:
        _remove()
        pytest.skip(f"no network namespaces here: {e.stderr.strip()[:100]}")
    for name, end, address in zip(NAMES, ends, ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        ip("-n", name, "link", "set", end, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield ends[0]
    _remove()


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def started(folder: Path, program: str, *words: str) -> list[subprocess.Popen[str]]:
    """Ranks 0 and 1 on the first machine, 2 and 3 on the second."""
    found = []
    for rank in range(4):
        env = {**{k: v for k, v in os.environ.items() if not k.startswith("TILEWORK_")}, "TILEWORK_LEASE": "0", "RANK": str(rank),
               "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0],
               "MASTER_PORT": "29577", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # fmt: skip
        command = ["ip", "netns", "exec", NAMES[rank // 2], sys.executable, str(HERE / "programs" / f"{program}.py"), *words]
        found.append(subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return found


@pytest.mark.slow
def test_parity_over_two_hosts(cable: str, ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 4, "adamw", 1)
    ways = [
        ("device", "auto", None),
        ("device", "ring", None),
        ("host", "ring", None),
        ("host", "hierarchical", None),
        ("host", "auto", None),
    ]
    cases = [{"path": str(path), "reduce": r, "algorithm": a, "steps": 10, "overlap": o} for r, a, o in ways]
    processes = started(ranks.folder, "train", json.dumps({"cases": cases}))
    said = [p.communicate(timeout=200) for p in processes]
    assert [p.returncode for p in processes] == [0] * 4, said
    result = sorted((json.loads(f.read_text()) for f in ranks.folder.glob("told-*.json")), key=lambda r: int(r["rank"]))
    assert result[0]["nodes"] == [[0, 1], [2, 3]]
    for i in range(len(cases)):
        judge(result, i, "adamw")


@IN_FULL
def test_the_cable_is_pulled(cable: str, ranks: Ranks) -> None:
    path = compile_for(ranks.folder, 4, "sgd", 1)
    processes = started(ranks.folder, "endless", str(path))
    for p in processes:
        assert p.stdout is not None
        while "training" not in (line := p.stdout.readline()):
            assert line, p.communicate()
    time.sleep(0.3)
    ip("-n", NAMES[0], "link", "set", cable, "down")
    try:
        said = [p.communicate(timeout=60)[1] for p in processes]
    finally:
        ip("-n", NAMES[0], "link", "set", cable, "up")
        for p in processes:
            p.kill()
    assert all(p.returncode == 76 for p in processes), [(p.returncode, s) for p, s in zip(processes, said, strict=True)]
    assert all("ranks-lost" in s and "rank" in s for s in said), said
    assert any("between the machines" in s for s in said), said
