"""The tiles of several nodes, seen from one: daemons that listen, each in a folder of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilework.errors import UserError
from tilework.tiles import client
from tilework.tiles.cluster import look

TOKEN = "a-token-for-tests-0123"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """node -> the folder of its daemon; node3 is down, node4 has another token."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    (tmp_path / "other").write_text("another-token-0123456")
    ports, folders, daemons = {f"node{i}": free_port() for i in (1, 2, 3, 4)}, {}, []
    for name in ("node1", "node2", "node4"):
        folders[name] = tmp_path / name
        folders[name].mkdir(mode=0o700)
        words = [
            "--platform",
            "SN10-8",
            "--listen",
            f"127.0.0.1:{ports[name]}",
            "--token-file",
            str(tmp_path / ("other" if name == "node4" else "token")),
        ]
        env = {**os.environ, "TILEWORK_RUN": str(folders[name])}
        daemons.append(subprocess.Popen([sys.executable, "-m", "tilework.tiles.service", *words], env=env))
    for name, folder in folders.items():
        until = time.monotonic() + 60
        while not client.answers(folder):
            assert time.monotonic() < until, name
            time.sleep(0.02)
    listed = ", ".join(f'"{name}=127.0.0.1:{port}"' for name, port in ports.items())
    (tmp_path / "site.toml").write_text(f'[cluster]\ntoken_file = "{token}"\nnodes = [{listed}]\n')
    monkeypatch.setenv("TILEWORK_SITE", str(tmp_path / "site.toml"))
    monkeypatch.setenv("TILEWORK_LEASE", "1")
    yield folders
    for daemon in daemons:
        daemon.kill()
        daemon.wait()


def test_all_nodes(nodes: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_RUN", str(nodes["node2"]))
    held = client.lease("chips:2", command="python train.py", keeps="17")
    one, two, three, four = look()
    assert one.view is not None and one.view.leases == []
    assert two.view is not None and [(x.job, x.command, len(x.tiles)) for x in two.view.leases] == [("17", "python train.py", 8)]
    assert three.view is None and "refused" in three.why and four.why == "the token is not the node's"
    said = subprocess.run([sys.executable, "-m", "tilework", "tiles", "--cluster"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert (
        "node1: DataScale SN10-8, 0 of 32" in said.stdout
        and "8 of 32 tiles held" in said.stdout
        and "[job 17] python train.py" in said.stdout
    )
    assert "node3: no answer" in said.stdout
    as_json = subprocess.run([sys.executable, "-m", "tilework", "tiles", "--cluster", "--json"], capture_output=True, text=True)
    assert set(json.loads(as_json.stdout)) == {"node1", "node2", "node3", "node4"}
    top = subprocess.run([sys.executable, "-m", "tilework", "top", "--cluster", "--once"], capture_output=True, text=True)
    assert top.returncode == 0 and "node2" in top.stdout and "32 tiles, 8 held" in top.stdout, top
    held.release()


def test_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.toml").write_text(f'[cluster]\ntoken_file = "{tmp_path}/none"\nnodes = ["a"]\n')
    monkeypatch.setenv("TILEWORK_SITE", str(tmp_path / "site.toml"))
    with pytest.raises(UserError, match="the token for the nodes' daemons cannot be read"):
        look()
