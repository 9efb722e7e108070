"""The file: readable with ordinary tools, complete, verified part by part, and refused politely when it is not right."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch

import forge
import tilework
from models import MODELS
from tilework.artifact.graph import Graph
from tilework.artifact.manifest import Manifest
from tilework.artifact.reader import read_artifact
from tilework.artifact.writer import whole_digest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """An artifact with constants and weights inside, for the reference device."""
    path = tmp_path_factory.mktemp("good") / "residual.pef"
    tilework.compile(
        MODELS["residual"](metadata={"note": [1, "two"]}),
        path,
        options=tilework.Options(device="reference"),
        weights="inside",
    )
    return path


@pytest.fixture(scope="module")
def native(artifact) -> Path:
    return artifact("linear", "cpu")


def refused(path: Path, *words: str, **kwargs) -> str:
    with pytest.raises(tilework.UserError) as e:
        read_artifact(path, **kwargs)
    assert e.value.exit_code == 2
    for word in words:
        assert word in str(e.value)
    return str(e.value)


# ---- what it is ----


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_ordinary_tools_read_it(native: Path, tmp_path: Path) -> None:
    subprocess.run(["unzip", "-q", str(native), "-d", str(tmp_path)], check=True)
    subprocess.run([sys.executable, "-m", "json.tool", str(tmp_path / "manifest.json")], check=True, stdout=subprocess.DEVNULL)
    digest = json.loads((tmp_path / "digest.json").read_text())
    for name, sha in digest["members"].items():
        found = subprocess.run(["sha256sum", str(tmp_path / name)], capture_output=True, text=True, check=True).stdout
        assert found.split()[0] == sha
    assert digest["whole"] == whole_digest(digest["members"]) == read_artifact(native).digest
    text = (tmp_path / "graphs" / "step.txt").read_text()
    assert "tilework.product.default" in text and "models.py:" in text and "out = self.fc(x)" in text
    assert (tmp_path / "native" / "step.so").read_bytes()[:4] == b"\x7fELF"
    assert "Mflop" in (tmp_path / "report.txt").read_text()


def test_manifest_follows_the_published_schema(good: Path, native: Path) -> None:
    schema = json.loads((ROOT / "docs" / "manifest.schema.json").read_text())
    assert schema == msgspec.json.schema(Manifest), "docs/manifest.schema.json is stale: run scripts/write_schema.py"
    for path in (good, native):
        jsonschema.validate(json.loads(zipfile.ZipFile(path).read("manifest.json")), schema)


def test_manifest_says_what_a_reader_wants_to_know(good: Path) -> None:
    m = read_artifact(good).manifest
    s = m.signature
    assert s.name == "5" and [a.name for a in s.inputs] == ["input", "target"] and s.inputs[0].type.shape == [5, 12]
    assert m.metadata == {"note": [1, "two"]} and s.batch_dim == 0
    assert {p.name for p in m.parameters} >= {"0.gate", "2.weight"} and m.groups[0].rule == "adamw"
    assert m.hyperparameters["opt0.g0.weight_decay"] == 0.05
    assert m.programs["step"].sections == ["fwd", "bwd", "opt"]


def test_same_step_gives_the_same_bytes(tmp_path: Path) -> None:
    """But for the time of making."""
    for name in ("a", "b"):
        tilework.compile(MODELS["mlp"](), tmp_path / name / "m.pef", options=tilework.Options(device="reference"))
    a, b = (forge.members_of(tmp_path / n / "m.pef") for n in "ab")
    for members in (a, b):
        members["manifest.json"] = json.dumps(json.loads(members["manifest.json"]) | {"created": ""}).encode()
    assert {k: v for k, v in a.items() if k not in ("digest.json", "report.txt")} == {
        k: v for k, v in b.items() if k not in ("digest.json", "report.txt")
    }


def test_graph_survives_json(good: Path) -> None:
    for graph in read_artifact(good).graphs.values():
        assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == Graph.from_json(graph.to_json())


def test_no_pickle_at_write_or_load(monkeypatch, tmp_path: Path) -> None:
    import pickle

    def never(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    step = MODELS["dropout"]()
    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    tilework.compile(step, tmp_path / "m.pef", options=tilework.Options(device="reference"), weights="inside")
    session = tilework.load(tmp_path / "m.pef")
    session.run(step.inputs[0], step.targets[0])


# ---- damaged, foreign and hostile files ----


def test_missing_folder_and_empty(tmp_path: Path) -> None:
    refused(tmp_path / "no.pef", "no such file")
    refused(tmp_path, "folder")
    (tmp_path / "empty.pef").write_bytes(b"")
    refused(tmp_path / "empty.pef", "an empty file")


def test_foreign_files(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "torch.pef")
    refused(tmp_path / "torch.pef", "no artifact has", "pickle")
    (tmp_path / "text.pef").write_text("hello")
    refused(tmp_path / "text.pef", "not an artifact")
    with zipfile.ZipFile(tmp_path / "zip.pef", "w") as z:
        z.writestr("report.txt", "x")
    refused(tmp_path / "zip.pef", "not an artifact", "manifest.json")


def test_truncated_and_flipped(good: Path, tmp_path: Path) -> None:
    raw = good.read_bytes()
    for size in (10, 100, len(raw) // 2, len(raw) - 1):
        (tmp_path / "t.pef").write_bytes(raw[:size])
        refused(tmp_path / "t.pef", "damaged")
    members = forge.members_of(good)
    changed = members | {"graphs/step.txt": members["graphs/step.txt"] + b" "}
    refused(forge.write(tmp_path / "f.pef", changed, rehash=False), "does not match its SHA-256", "graphs/step.txt")


def test_newer_and_older_versions(good: Path, tmp_path: Path) -> None:
    members = forge.members_of(good)
    newer = forge.change_manifest(members, format=[2, 7], something_new=1)
    refused(forge.write(tmp_path / "n.pef", newer), "newer Tilework", "format 2.7", "format 2.1 or older")
    older = forge.change_manifest(members, format=[1, 2])
    refused(forge.write(tmp_path / "o.pef", older), "old format", "format 1.2")


def test_names_that_lead_outside(good: Path, tmp_path: Path) -> None:
    for name in (
        "../../evil.txt",
        "/etc/passwd",
        "graphs/../../x.json",
        "native/..\\x.so",
        "payload.pkl",
        "native/x.py",
    ):
        path = forge.write(tmp_path / "p.pef", forge.members_of(good) | {name: b"x"})
        native = "not those that the manifest names" if name.startswith("native/") else "no artifact has"
        refused(path, "leads out" if (".." in name or name[0] == "/") else native)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.pef"]


def test_zip_bomb_and_packed_code(good: Path, native: Path, tmp_path: Path) -> None:
    bomb = forge.members_of(good) | {"report.txt": b"\0" * 50_000_000}
    refused(forge.write(tmp_path / "b.pef", bomb), "unpacks to far more")
    packed = forge.write(tmp_path / "c.pef", forge.members_of(native), packed={"native/step.so"})
    refused(packed, "stored plainly")
    doubled = tmp_path / "d.pef"
    doubled.write_bytes(good.read_bytes())
    with pytest.warns(UserWarning), zipfile.ZipFile(doubled, "a") as z:
        z.writestr("manifest.json", "{}")
    refused(doubled, "occurs twice")


def test_manifest_that_contradicts_the_graphs(good: Path, tmp_path: Path) -> None:
    members = forge.members_of(good)
    buffers = json.loads(members["manifest.json"])["buffers"]
    buffers["param/2.weight"]["shape"] = [1, 13]
    refused(forge.write(tmp_path / "m.pef", forge.change_manifest(members, buffers=buffers)), "disagree")
    deep = members | {"manifest.json": b"[" * 10_000}
    refused(forge.write(tmp_path / "r.pef", deep), "format version")


def test_owner_and_mode(good: Path, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "m.pef"
    path.write_bytes(good.read_bytes())
    path.chmod(0o666)
    refused(path, "machine code", "others can write", "--trust", "TILEWORK_TRUST=1")
    read_artifact(path, trust=True)
    monkeypatch.setenv("TILEWORK_TRUST", "1")
    read_artifact(path)
    monkeypatch.delenv("TILEWORK_TRUST")
    path.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        refused(path, "belongs to user 12345")
        os.chown(path, 0, 0)
    read_artifact(path)


def test_fingerprint_names_each_part_that_differs(native: Path, tmp_path: Path) -> None:
    members = forge.members_of(native)
    fingerprint = json.loads(members["manifest.json"])["fingerprint"]
    fingerprint |= {
        "torch": [2, 99],
        "needs": {
            "features": [*fingerprint["needs"]["features"], "avx9000"],
            "glibc": [9, 9],
            "architecture": "riscv128",
        },
    }
    path = forge.write(tmp_path / "m.pef", forge.change_manifest(members, fingerprint=fingerprint))
    with pytest.raises(tilework.MachineError) as e:
        tilework.load(path)
    assert e.value.exit_code == 3
    for words in (
        "torch: needs 2.99",
        "avx9000",
        "glibc: needs 9.9",
        "architecture: needs riscv128",
        "--isa x86-64-v3",
    ):
        assert words in str(e.value)
    assert "device" not in str(e.value).split("\n", 1)[1].split("see:")[0].replace("this machine", "")
    tilework.load(path, device="reference")  # replaying graphs needs none of it
    older = fingerprint | {"torch": [2, 1], "needs": {"features": ["avx"], "glibc": [2, 5], "architecture": "x86_64"}}
    tilework.load(forge.write(tmp_path / "o.pef", forge.change_manifest(members, fingerprint=older)))  # needs <= has


def test_wrong_device(good: Path) -> None:
    with pytest.raises(tilework.MachineError, match="device: needs reference; here: cpu"):
        tilework.load(good, device="cpu")


def test_memory_is_checked_before_it_is_taken(good: Path, tmp_path: Path) -> None:
    members = forge.members_of(good)
    buffers = json.loads(members["manifest.json"])["buffers"]
    buffers["extra/huge"] = {"dtype": "float32", "shape": [2**36], "stride": [1]}
    with pytest.raises(tilework.MachineError, match="do not fit into memory"):
        tilework.load(forge.write(tmp_path / "m.pef", forge.change_manifest(members, buffers=buffers)))


def test_canary_is_not_opened_before_everything_is_verified(native: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    members = forge.members_of(native)
    canary = forge.canary_library(tmp_path, mark)
    for name in list(members):
        if name.endswith(".so"):
            members[name] = canary
    for name in members:  # one damage at a time, anywhere
        if name == "digest.json":
            continue
        damaged = forge.write(tmp_path / "d.pef", members)
        stated = forge.members_of(damaged)["digest.json"]
        changed = members | {name: members[name] + b" ", "digest.json": stated}
        with pytest.raises(tilework.UserError):
            tilework.load(forge.write(tmp_path / "e.pef", changed, rehash=False))
        assert not mark.exists(), name
    code = "import tilework, sys\ntry: tilework.load(sys.argv[1])\nexcept Exception as e: print(type(e).__name__, e)"
    whole = forge.write(tmp_path / "w.pef", members)
    subprocess.run([sys.executable, "-c", code, str(whole)], check=True, capture_output=True)
    assert mark.exists(), "the canary must sing when an intact file is opened, or it proves nothing"


def _mutations(native: Path, folder: Path, count: int) -> dict[str, int]:
    """Every mutated file is refused with a user or environment error, or is accepted because nothing that counts changed."""
    mark = folder / "mark"
    members = forge.members_of(native)
    canary = forge.canary_library(folder, mark)
    members = {n: canary if n.endswith(".so") else d for n, d in members.items()}
    base = forge.write(folder / "base.pef", members)
    raw, r = base.read_bytes(), random.Random(20240229)
    outcomes: dict[str, int] = {}
    for i in range(count):
        path = forge.mutated(members, r, folder / "m.pef", raw)
        try:
            artifact = read_artifact(path)
            tilework.Session(artifact, device="null")
            outcome = "accepted"
        except tilework.TileworkError as e:
            assert e.kind in ("user", "environment"), f"mutation {i}: {e}"
            outcome = e.id
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert not mark.exists(), f"mutation {i} opened native code"
    return outcomes


def test_mutated_artifacts(native: Path, tmp_path: Path) -> None:
    outcomes = _mutations(native, tmp_path, 600)
    assert outcomes.get("artifact-damaged", 0) > 100 and outcomes.get("artifact-manifest", 0) > 30
    assert outcomes.get("accepted", 0) < 400
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base.pef", "canary.c", "canary.so", "m.pef"]


@pytest.mark.full
def test_ten_thousand_mutated_artifacts(native: Path, tmp_path: Path, record_property) -> None:
    outcomes = _mutations(native, tmp_path, 10_000)
    record_property("mutations", outcomes)
    assert sum(outcomes.values()) == 10_000
