"""sntilestat, snconfig, tilework tiles and top: their layout, and what they say of real processes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from conftest import daemon_pid, kill_daemon, leases_when
from sambaflow.samba.affinity import tiles_of_mask
from sambaflow.tools import snconfig, sntilestat
from tilework.errors import UserError
from tilework.tiles import client
from tilework.tiles.machine import Core, Gpu, Link, Machine
from tilework.tiles.site import Site
from tilework.tiles.topology import detect

GOLDEN = Path(__file__).parent / "golden"
FOUR = Machine(tuple(Core(0, 0, (i,)) for i in range(4)), (), {0: 64 * 2**30}, (Link("0000:01:00.0", "16.0 GT/s PCIe", 16, 0),))


def seen(platform: str, *held: tuple[list[int], int, dict[str, float]], **more: object) -> dict:
    """A view as the daemon gives it: (tiles, pid, shares) of each process."""
    node = detect(platform, Site(), FOUR)
    about = {"user": "arnoldw", "command": "python res_ffn_mnist.py run --num-epochs 100", "job": "", "held_seconds": 75.0,
             "hung": False, "state": "exec", "idle_seconds": 0.0, "steps_per_second": 5210.0, "loss": 0.31,
             "memory_bytes": 5e6} | more  # fmt: skip
    leases = [{"id": str(pid), "pid": pid, "tiles": tiles, "shares": {c: shares.get(c, 0.0) for c in sntilestat.COLUMNS}, **about}
              for tiles, pid, shares in held]  # fmt: skip
    holder = {i: str(pid) for tiles, pid, _ in held for i in tiles}
    tiles = [{"path": t.path, "chip": t.chip, "cpus": t.cpus, "gpu": None, "lease": holder.get(t.index), "drained": None}
             for t in node.tiles]  # fmt: skip
    return {"platform": platform, "title": node.title, "note": node.note, "levels": node.levels, "tiles": tiles, "leases": leases,
            "queue": [], "num_waiting": 1}  # fmt: skip


def same_as_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("TILEWORK_GOLDEN") == "write":
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text(), f"{name}: TILEWORK_GOLDEN=write writes it anew"


def test_an_idle_node() -> None:
    same_as_golden("sntilestat_idle.txt", sntilestat.table(seen("SN30-8")))


def test_four_tiles_of_one_process() -> None:
    busy = {"idle": 80.4, "exec": 7.0, "pload": 10.4, "aload": 2.2}
    text = sntilestat.table(seen("SN10-8", ([0, 1, 2, 3], 49880, busy)))
    same_as_golden("sntilestat_one.txt", text)
    assert text.splitlines()[1].startswith(
        "/XRDU_0/RDU_0/TILE_0  80.4   7.0   10.4    2.2    0.0      0.0  49880  arnoldw python"
    )


def test_two_processes_on_two_chips() -> None:
    busy = {"idle": 8.0, "exec": 91.6, "pload": 0.3, "aload": 0.1}
    view = seen("SN30-8", (list(range(8)), 2750333, busy), (list(range(8, 16)), 2750339, busy))
    same_as_golden("sntilestat_two.txt", sntilestat.table(view, skip_idle=True))


def test_the_seeds_own_lines() -> None:
    """The layout of the vendor's screen, column by column."""
    header = "TILE                 %idle %exec %pload %aload %chkpt %quiesce    PID     USER COMMAND"
    line = "/XRDU_0/RDU_0/TILE_0   8.0  91.6    0.3    0.1    0.0      0.0 2750333  vsastry /opt"
    view = seen("SN30-8", ([0], 2750333, {"idle": 8.0, "exec": 91.6, "pload": 0.3, "aload": 0.1}))
    view["leases"][0] |= {"user": "vsastry", "command": "/opt"}
    assert sntilestat.table(view).splitlines()[:2] == [header, line]


def test_static_configuration() -> None:
    same_as_golden("snconfig_static.txt", snconfig.static(detect("SN10-8", Site(), FOUR), FOUR, banner=False).replace(
        snconfig.processor(), "PROCESSOR"))  # fmt: skip
    link = Link("0000:02:00.0", "32.0 GT/s PCIe", 16, 0)
    gpu = Machine(FOUR.cores, (Gpu(0, "H200", "1650", 132, 150 * 2**30, 0, link.address),), {0: 2**30}, (link,))
    text = snconfig.static(detect("host", Site(), gpu), gpu)
    assert "Model             : H200" in text and "33 multiprocessors" in text and "Size              : 150.0 GB" in text
    first, second = text.split("XRDU_1")[:2]
    assert "Number of PCIES: 0" in first and "Bandwidth         : 63 GB/s" in second
    assert re.search(r"Static Info.*Timestamp: \d{4}-\d\d-\d\d", text, re.S)


def test_finding_hung_tiles() -> None:
    view = seen("SN30-8", ([3], 123, {"exec": 100.0}), hung=True)
    view["leases"][0]["user"] = "ada"
    view["tiles"][8]["drained"] = "fan"
    perfect = [line for line in snconfig.dynamic(view).splitlines() if "perfect" in line]
    assert perfect[0] == "/XRDU_0/RDU_0 tiles perfect: 7 of 8 (TILE_3 hung, pid 123, user ada)"
    assert perfect[1] == "/XRDU_0/RDU_1 tiles perfect: 7 of 8 (TILE_0 drained: fan)"
    assert perfect[2:] == [f"/XRDU_{b}/RDU_{c} tiles perfect: 8 of 8" for b in (1, 2, 3) for c in (0, 1)]


MODULES = {"sntilestat": "sambaflow.tools.sntilestat", "snconfig": "sambaflow.tools.snconfig", "tilework": "tilework.cli.main"}


def tool(name: str, *words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", MODULES[name], *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done
    return done.stdout + done.stderr


def test_the_commands(run_folder: Path, holder) -> None:
    process = holder("tiles:0-3", TILEWORK_PLATFORM="SN30-8")
    process.stdout.readline()
    lines = tool("sntilestat").splitlines()
    assert len(lines) == 66 and lines[1].split()[7] == str(process.pid) and lines[1].split()[9].startswith("python")
    assert lines[-1].startswith("# 64 virtual tiles")
    rows = json.loads(tool("sntilestat", "--json", "--skip-idle"))
    assert [r["pid"] for r in rows] == [process.pid] * 4
    assert all(sum(r[c] for c in sntilestat.COLUMNS) == pytest.approx(100) for r in rows)
    csv = tool("sntilestat", "--csv", "-i", "0.1", "--count", "2", "--skip-idle").splitlines()
    assert len(csv) == 9 and csv[0].startswith("time,tile,idle,exec") and csv[1].split(",")[1] == "/XRDU_0/RDU_0/TILE_0"
    assert "perfect: 8 of 8" in tool("snconfig", "show", "Node", "dynamic")
    assert "Number of XRDUS: 1" in tool("snconfig", "--platform", "host") and "Static Info" in tool(
        "snconfig", "show", "Node", "static"
    )
    assert "expected show Node static" in tool("snconfig", "show", "me", code=2)
    tool("sntilestat", "--count", "0", code=2)
    assert json.loads(tool("tilework", "tiles", "--json"))["platform"] == "SN30-8"
    assert str(process.pid) in tool("tilework", "tiles") and str(process.pid) in tool("tilework", "top", "--once")
    status = json.loads(tool("tilework", "daemon", "status", "--json"))
    assert status["pid"] == daemon_pid(run_folder) and status["leases"] == 1
    assert "tilework_tile_state" in tool("tilework", "daemon", "status", "--metrics")
    path = "/XRDU_0/RDU_0/TILE_0"
    assert path in tool("tilework", "tiles", "--drain", path, "--reason", "fan") and path in tool(
        "tilework", "tiles", "--undrain", path
    )
    assert "SIGTERM" in tool("tilework", "tiles", "--reset", path)
    assert "nobody holds" in tool("tilework", "tiles", "--reset", path, code=2)
    assert "leases found" in tool("tilework", "daemon", "log")
    assert "stopped" in tool("tilework", "daemon", "stop")
    assert "no daemon serves" in tool("tilework", "daemon", "status", code=3)


def test_the_service_file(run_folder: Path, tmp_path: Path) -> None:
    tool("tilework", "daemon", "install", "--root", str(tmp_path))
    unit = (tmp_path / "etc/systemd/system/tilework.service").read_text()
    if entry_points(group="tilework.site"):  # a frontend brings the name; it is found where the package is installed
        assert "Alias=snd.service" in unit
    assert "tilework.tiles.service" in unit and "RuntimeDirectoryPreserve=yes" in unit
    tool("tilework", "daemon", "remove", "--root", str(tmp_path))
    assert not (tmp_path / "etc/systemd/system/tilework.service").exists()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_top_fits_the_screen(width: int, height: int) -> None:
    from rich.console import Console

    from tilework.cli.top import screen

    view = seen("SN30-8", *[([i], 1000 + i, {"exec": 60.0, "idle": 40.0}) for i in range(40)])
    view["leases"][0] |= {"hung": True, "stuck_seconds": 200.0, "stack": ""}
    view["leases"][1] |= {"idle_seconds": 720.0, "state": "idle", "shares": {**view["leases"][1]["shares"], "exec": 0.0}}
    view["queue"] = [{"ask": "1 chip", "user": "bob", "pid": 7, "command": "python x.py", "waited_seconds": 3.0}]
    console = Console(width=width, height=height, no_color=True, record=True, file=io.StringIO())
    console.print(screen(view, width, height))
    lines = console.export_text().splitlines()
    assert len(lines) <= height and all(len(line) <= width for line in lines), lines
    text = "\n".join(lines)
    assert "held, idle for 12 min" in text or width == 80
    assert "!o██" in text and "64 tiles, 40 held, 1 waiting" in text and "hung" in text and "5,210" in text


# ---- affinity ----


def test_the_mask_on_every_platform() -> None:
    """As the seeds say it for an SN10; on others the same scripts mean the same parts of the node."""
    sn10, sn30 = (detect(p, Site(), FOUR) for p in ("SN10-8", "SN30-8"))
    assert tiles_of_mask("0xf", sn10) == [0, 1, 2, 3] and tiles_of_mask("0xf0", sn10) == [4, 5, 6, 7]
    assert tiles_of_mask("0xff000000", sn10) == list(range(24, 32)) and tiles_of_mask("0x5", sn10) == [0, 2]
    assert tiles_of_mask("15", sn10) == [0, 1, 2, 3]
    assert tiles_of_mask("0xf", sn30) == list(range(8)) and tiles_of_mask("0x2", sn30) == [2, 3]
    assert tiles_of_mask("0x00000000000000ff", sn30) == list(range(8)) and tiles_of_mask("0x8000000000000000", sn30) == [63]
    host = detect("host", Site(), Machine(FOUR.cores[:2]))
    assert (
        tiles_of_mask("0xf", host) == [0, 1] and tiles_of_mask("0xff000000", host) == [0, 1] and tiles_of_mask("0x4", host) == [1]
    )
    for wrong in ("0", "-1", "none", "0x", "0x100000000000000000"):
        with pytest.raises(UserError, match="SF_RNT_TILE_AFFINITY"):
            tiles_of_mask(wrong, sn10)


# ---- hung ----


def test_a_session_that_hangs(run_folder: Path, tmp_path: Path) -> None:
    """In a section without progress for the set time: shown as hung, with its stack; reset ends it."""
    site = tmp_path / "site.toml"
    site.write_text("[limits]\nhung_seconds = 1\n")
    code = """
import time
from tilework.tiles import holding
from tilework.tiles.page import EXEC
def stuck_in_this_function():
    time.sleep(60)
lease = holding.hold("tiles:0")
print("ready", flush=True)
with lease.page.process.during(EXEC):
    stuck_in_this_function()
"""
    env = {**os.environ, "TILEWORK_SITE": str(site)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout.readline() == "ready\n"
        assert not client.view()["leases"][0]["hung"]
        leases_when(lambda found: found[0]["hung"] and "stuck_in_this_function" in found[0]["stack"], 5.0)
        perfect = tool("snconfig", "show", "Node", "dynamic")
        assert f"(TILE_0 hung, pid {process.pid}, user " in perfect
        assert "(hung)" in tool("sntilestat") and "stuck_in_this_function" in tool("tilework", "tiles", "--stack")
        tool("tilework", "tiles", "--reset", client.view()["tiles"][0]["path"])
        assert process.wait(10) != 0
        leases_when(lambda found: not found, 2.0)
    finally:
        process.kill()
        process.wait()


def test_a_daemon_ends_when_nobody_needs_it(run_folder: Path, monkeypatch) -> None:
    from tilework.tiles.daemon import Daemon

    run_folder.mkdir()
    daemon = Daemon(run_folder, auto=True)
    assert daemon.open()
    daemon.used = time.monotonic() - 10_000
    daemon.serve()  # returns at once
    daemon.stop()
    kill_daemon(run_folder)
