"""sntilestat, snconfig, tilework tiles and top: their layout, and what they say of real processes."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemons import daemon_pid, leases_when

from sambaflow.samba.affinity import tiles_asked, tiles_of_mask
from sambaflow.tools import snconfig, sntilestat
from tilework.errors import UserError
from tilework.tiles import client, describe, endpoint, messages
from tilework.tiles.endpoint import listen
from tilework.tiles.machine import Core, Gpu, Link, Machine
from tilework.tiles.page import COLUMNS
from tilework.tiles.site import Shape, Site
from tilework.tiles.topology import detect
from tilework.tiles.view import DaemonView, SessionView, TileView, View, WaitingView

GOLDEN = Path(__file__).parent / "golden"
FOUR = Machine(tuple(Core(0, 0, (i,)) for i in range(4)), (), {0: 64 * 2**30}, (Link("0000:01:00.0", "16.0 GT/s PCIe", 16, 0),))


def seen(platform: str, *held: tuple[list[int], int, dict[str, float]], site: Site | None = None, **more: Any) -> View:
    """A view as the daemon gives it: (tiles, pid, shares) of each process."""
    node = detect(platform, site or Site(), FOUR)
    leases = [SessionView(**{"id": str(pid), "kind": "exclusive", "pid": pid, "user": "arnoldw", "uid": 1, "tiles": tuple(tiles),
                             "command": "python res_ffn_mnist.py run --num-epochs 100", "held_seconds": 75.0, "state": "exec",
                             "steps_per_second": 5210.0, "loss": 0.31, "memory_bytes": 5_000_000,
                             "shares": {c: shares.get(c, 0.0) for c in COLUMNS}} | more)
              for tiles, pid, shares in held]  # fmt: skip
    view = View(node.platform, node.title, node.virtual, node.levels,
                [TileView(t.path, t.chip, t.cpus, t.memory_node) for t in node.tiles],
                DaemonView(1, "root", 0.0, "0", "/run"), node.note, "", leases, num_waiting=1)  # fmt: skip
    return told(view)


def told(view: View) -> View:
    """The states of its tiles, as the daemon works them out."""
    holder = {i: lease for lease in view.leases for i in lease.tiles}
    for i, tile in enumerate(view.tiles):
        lease = holder.get(i)
        tile.lease = lease.id if lease else None
        tile.state, tile.activity = describe._state(lease, tile.drained), describe._activity(lease)
    return view


def same_as_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("TILEWORK_GOLDEN") == "write":
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text(), f"{name}: TILEWORK_GOLDEN=write writes it anew"


def test_an_idle_node() -> None:
    same_as_golden("sntilestat_idle.txt", sntilestat.table(seen("SN30-8")))


def test_four_tiles_of_one_process() -> None:
    busy = {"idle": 80.4, "exec": 7.0, "load": 10.4, "copy": 2.2}
    text = sntilestat.table(seen("SN10-8", ([0, 1, 2, 3], 49880, busy)))
    same_as_golden("sntilestat_one.txt", text)
    assert text.splitlines()[1].startswith(
        "/XRDU_0/RDU_0/TILE_0  80.4   7.0   10.4    2.2    0.0      0.0  49880  arnoldw python"
    )


def test_two_processes_on_two_chips() -> None:
    busy = {"idle": 8.0, "exec": 91.6, "load": 0.3, "copy": 0.1}
    view = seen("SN30-8", (list(range(8)), 2750333, busy), (list(range(8, 16)), 2750339, busy))
    same_as_golden("sntilestat_two.txt", sntilestat.table(view, skip_idle=True))


def test_the_seeds_own_lines() -> None:
    """The layout of the vendor's screen, column by column."""
    header = "TILE                 %idle %exec %pload %aload %chkpt %quiesce    PID     USER COMMAND"
    line = "/XRDU_0/RDU_0/TILE_0   8.0  91.6    0.3    0.1    0.0      0.0 2750333  vsastry /opt"
    view = seen("SN30-8", ([0], 2750333, {"idle": 8.0, "exec": 91.6, "load": 0.3, "copy": 0.1}))
    view.leases[0].user, view.leases[0].command = "vsastry", "/opt"
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
    view.leases[0].user = "ada"
    view.tiles[8].drained = "fan"
    told(view)
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
    assert all(sum(v for v in r.values() if isinstance(v, float)) == pytest.approx(100) for r in rows)
    table = tool("sntilestat", "--csv", "-i", "0.1", "--count", "2", "--skip-idle").splitlines()
    assert len(table) == 9 and table[0].startswith("time,tile,idle,exec") and table[1].split(",")[1] == "/XRDU_0/RDU_0/TILE_0"
    assert "perfect: 8 of 8" in tool("snconfig", "show", "Node", "dynamic")
    assert "Number of XRDUS: 4" in tool("snconfig") and "Static Info" in tool("snconfig", "show", "Node", "static")
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
    assert "nobody runs" in tool("tilework", "tiles", "--reset", path, "--platform", "SN30-8", code=2)
    assert "leases found" in tool("tilework", "daemon", "log")
    assert "stopped" in tool("tilework", "daemon", "stop")
    assert "no daemon serves" in tool("tilework", "daemon", "status", code=3)


def test_the_service_file(run_folder: Path, tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/tilework.service"
    tool("tilework", "daemon", "install", "--root", str(tmp_path))
    text = unit.read_text()
    if entry_points(group="tilework.site"):  # a frontend brings the name; it is found where the package is installed
        assert "Alias=snd.service" in text
    assert "RuntimeDirectoryPreserve=yes" in text and "LogsDirectory" not in text
    command = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    assert command == f"ExecStart={sys.executable} -m tilework.tiles.service"
    token = tmp_path / "a 100% secret"
    token.write_text(TOKEN)
    options = ["--listen", "127.0.0.1:9464", "--token-file", str(token), "--platform", "SN10-8"]
    tool("tilework", "daemon", "install", "--root", str(tmp_path), *options)
    command = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    assert command.endswith(f' --platform=SN10-8 --listen=127.0.0.1:9464 "--token-file={tmp_path}/a 100%% secret"')
    assert "[tiles-listen]" in tool("tilework", "daemon", "install", "--root", str(tmp_path), "--listen", "nowhere", code=2)
    tool("tilework", "daemon", "remove", "--root", str(tmp_path))
    assert not unit.exists()


@pytest.mark.parametrize("journal", [True, False])
def test_where_a_service_logs(run_folder: Path, journal: bool) -> None:
    """To stderr, which systemd keeps, and to no file; without the time there, which the journal knows."""
    env = {k: v for k, v in os.environ.items() if k != "JOURNAL_STREAM"} | ({"JOURNAL_STREAM": "8:1"} if journal else {})
    words = [sys.executable, "-m", "tilework.tiles.service"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env)
    try:
        line = process.stderr.readline()
        assert "leases found" in line and line.startswith("INFO") == journal
        assert not (run_folder / "daemon.log").exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_top_fits_the_screen(width: int, height: int) -> None:
    from rich.console import Console

    from tilework.cli.top import screen

    view = seen("SN30-8", *[([i], 1000 + i, {"exec": 60.0, "idle": 40.0}) for i in range(40)])
    view.leases[0].hung = True
    view.leases[1].idle_seconds, view.leases[1].state = 720.0, "idle"
    view.leases[1].shares["exec"] = 0.0
    view.queue = [WaitingView("1 chip", "bob", 7, "python x.py", 3.0)]
    told(view)
    console = Console(width=width, height=height, no_color=True, record=True, file=io.StringIO())
    console.print(screen(view, width, height))
    lines = console.export_text().splitlines()
    assert len(lines) <= height and all(len(line) <= width for line in lines), lines
    text = "\n".join(lines)
    assert "held, idle for 12 min" in text and "x drained" in text and "…" not in text.split("x drained")[0].splitlines()[-1]
    assert "!o██" in text and "64 tiles, 40 held, 0 shared, 1 waiting" in text and "hung" in text and "5,210" in text


def shown(view: View, width: int = 80, height: int = 24) -> list[str]:
    from rich.console import Console

    from tilework.cli.top import screen

    console = Console(width=width, height=height, no_color=True, record=True, file=io.StringIO())
    console.print(screen(view, width, height))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert len(lines) <= height and all(len(line) <= width for line in lines), lines
    return lines


def shape(boards: int, chips: int, tiles: int, levels: tuple[str, str, str] | None = None) -> Site:
    return Site(shape=Shape("lab", boards, chips, tiles, levels))


@pytest.mark.parametrize("held", [0, 3, 40])
@pytest.mark.parametrize("lab", [(1, 1, 96), (1, 1, 1024), (2, 64, 8), (1024, 1, 1), (8, 8, 16)])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (200, 50), (24, 10)])
def test_top_shows_or_counts_every_tile(width: int, height: int, lab: tuple[int, int, int], held: int) -> None:
    """Whatever the node's shape is: a letter for each tile, or a number where they are too many."""
    view = seen("lab", *[([i], 1000 + i, {"exec": 100.0}) for i in range(held)], site=shape(*lab))
    view.tiles[-1].drained = "fan"
    lines = shown(told(view), width, height)
    rows = lines[2 : next(i for i, line in enumerate(lines) if line.startswith("· free"))]  # after the heading and the note
    more = re.match(r"and (\d+) tiles more", rows[-1])
    drawn = sum(line.count(letter) for line in (rows[:-1] if more else rows) for letter in "·█x")
    assert drawn + (int(more[1]) if more else 0) == len(view.tiles), lines
    if held and (width, height) != (24, 10):
        assert any(line.split()[:1] == ["1000"] for line in lines), "and somebody who holds one"
    if lab == (1, 1, 96) and width == 80:
        assert not more and len(rows) == 2
    if lab == (2, 64, 8) and width == 80:
        assert more and rows[-1].endswith("1 drained")


def test_long_names_leave_room_for_the_tiles() -> None:
    lines = shown(seen("lab", site=shape(1, 1, 4, ("B" * 50, "C" * 50, "T"))))
    assert any(line.endswith("_0 ····") for line in lines)


def test_q_ends_top_wherever_it_is_typed(run_folder: Path) -> None:
    """Also behind other keys that came with it."""
    import pty

    main, side = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "tilework.cli.main", "top", "--interval", "60"], stdin=side, stdout=side,
                               env={**os.environ, "TERM": "xterm"})  # fmt: skip
    try:
        os.close(side)
        text = b""
        while b"no session runs" not in text:
            text += os.read(main, 4096)
        os.write(main, b"xq")
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_top_says_where_it_cannot_save(run_folder: Path) -> None:
    text = tool("tilework", "top", "--svg", "/nonexistent/x.svg", code=3)
    assert "/nonexistent/x.svg: the picture cannot be saved" in text and "bug" not in text


@pytest.mark.parametrize("interval", ["inf", "nan", "1e300", "0", "-1"])
def test_intervals_that_are_none(run_folder: Path, interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tilework.cli import top

    assert sntilestat.main([f"-i={interval}"]) == 2
    text = capsys.readouterr().err
    assert "from 0.1 to 86400 seconds" in text and "Traceback" not in text
    with pytest.raises(UserError, match="--interval") as e:
        top.command(interval=float(interval))
    assert e.value.expected == "from 0.2 to 86400 seconds"


def test_csv_says_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    view = seen("SN10-8", ([0, 1], 7, {"exec": 100.0}), hung=True, user="ada", command='python "a, b".py')
    view.tiles[1].drained, view.tiles[2].drained = "", "fan"
    told(view)
    monkeypatch.setattr(sntilestat, "view", lambda *_: view)
    assert sntilestat.main(["--csv", "--platform", "SN10-8"]) == 0
    text = capsys.readouterr().out
    assert "\r" not in text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert text.splitlines()[0] == "time,tile,idle,exec,pload,aload,chkpt,quiesce,pid,user,command,state,reason"
    assert [r["state"] for r in rows[:4]] == ["hung", "hung", "drained", "free"] and rows[2]["reason"] == "fan"
    assert rows[0]["command"] == 'python "a, b".py' and len(rows) == 32


def test_one_line_a_tile(run_folder: Path) -> None:
    """For scripts; and nobody minds where they read no further."""
    command = "python train.py" + " --long-option :x: 1" * 9
    lease = client.lease("tiles:0", command=command)
    lines = tool("tilework", "tiles").splitlines()
    assert len(lines) == 1 + len(client.view().tiles) and all(line == line.rstrip() for line in lines)
    assert lines[1].startswith(lease.paths[0]) and lines[1].endswith(command)
    for words in (("tiles",), ("tiles", "--json"), ("top", "--once")):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-m", "tilework.cli.main", *words], stdout=write, stderr=subprocess.PIPE, text=True
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (0, ""), words


# ---- which platform ----

LAB = """platform = "lab"
[shape]
title = "lab"
boards = 1
chips = 2
tiles = 3
levels = ["BOX", "UNIT", "TILE"]
"""


def test_a_site_file_that_only_the_daemon_has(run_folder: Path, tmp_path: Path, holder, monkeypatch, capsys) -> None:
    """The tools believe the daemon, not a file of their own."""
    (tmp_path / "site.toml").write_text(LAB)
    process = holder("tiles:0", TILEWORK_SITE=str(tmp_path / "site.toml"))
    process.stdout.readline()
    assert snconfig.main([]) == 0 and "Platform Name: lab" in (text := capsys.readouterr().out)
    assert "Number of UNITS: 2" in text and text.count("TILE Name") == 6
    monkeypatch.setenv("SF_RNT_TILE_AFFINITY", "0xf0")
    assert tiles_asked(Namespace(), "none.pef") == "tiles:3,4,5"
    assert snconfig.main(["--platform", "SN10-8"]) == 0
    said = capsys.readouterr()
    assert "platform SN10-8 asked for; this machine's tiles are lab (the site's choice)" in said.err
    assert "Platform Name: lab" in said.out


def test_a_platform_that_is_not_in_use(run_folder: Path, holder, monkeypatch, capsys) -> None:
    process = holder("tiles:0")
    process.stdout.readline()
    line = "platform SN30-8 asked for; this machine's tiles are host (in use)\n"
    for main, words in ((sntilestat.main, []), (snconfig.main, ["show", "Node"])):
        assert main([*words, "--platform", "nonsense"]) == 2
        said = capsys.readouterr()
        assert "[tiles-platform] no platform 'nonsense'" in said.err and said.out == ""
        assert main([*words, "--platform", "SN30-8"]) == 0
        said = capsys.readouterr()
        assert said.err.endswith(": " + line) and said.err.count("\n") == 1 and "virtual" not in said.out
    assert said.out.count("Platform Name: host") == 2
    seen = client.view(platform="SN30-8")
    assert any(text in line for text in shown(seen, 100, 30)[1:2])
    from tilework.cli import tiles

    path = seen.tiles[0].path
    for what in ("drain", "undrain", "reset_tile"):  # what is changed must be what was asked for
        with pytest.raises(UserError, match="SN30-8 asked for") as e:
            tiles.command(platform="SN30-8", **{what: path})
        assert e.value.id == "tiles-platform"
    assert process.poll() is None and all(t.drained is None for t in client.view().tiles)
    tiles.command(platform="SN30-8")
    said = capsys.readouterr()
    assert said.err == "tilework: " + line and str(process.pid) in said.out


def test_draining_on_an_idle_node(run_folder: Path, capsys) -> None:
    """What a look shows is what is drained, whatever platform the last session had."""
    from tilework.cli import tiles

    client.lease("1", platform="SN10-8").release()
    assert client.view().platform == "host"
    tiles.command(drain="/board_0/chip_0/tile_0")
    assert client.view().platform == "host" and "drained" in capsys.readouterr().out
    tiles.command(undrain="/board_0/chip_0/tile_0")
    tiles.command(drain="/XRDU_0/RDU_0/TILE_0", platform="SN10-8")
    assert client.view().platform == "SN10-8"
    with pytest.raises(UserError, match="no platform"):
        client.lease("1", platform="nonsense")


def test_history(run_folder: Path, capsys) -> None:
    from tilework.cli import tiles

    client.lease("1", command="first").release()
    mine = client.lease("1", command="second")
    tiles.command(history=5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["COMMAND", "second", "first"]
    assert "still there" in lines[1] and "released" in lines[2]
    with pytest.raises(UserError, match="at a time"):
        tiles.command(history=5, drain="/XRDU_0/RDU_0/TILE_0")
    mine.release()


def test_a_path_that_is_empty(run_folder: Path, holder, capsys) -> None:
    """An unset variable is no tile at all."""
    from tilework.cli import tiles

    process = holder("tiles:0")
    process.stdout.readline()
    for what in ("drain", "undrain", "reset_tile"):
        for path in ("", "/"):
            with pytest.raises(UserError, match="names no board, chip or tile"):
                tiles.command(**{what: path})
    with pytest.raises(UserError, match="names no board, chip or tile"), client.talking() as ask:
        ask(messages.Drain(""))  # the daemon does not rely on the tool
    assert process.poll() is None and all(t.drained is None for t in client.view().tiles)
    path = client.view().tiles[0].path
    tiles.command(drain=path, reason="fan")
    tiles.command()
    text = capsys.readouterr().out
    assert f"drained: {path}" in text and re.search(r"held, \w+, drained fan", text)
    tiles.command(undrain=path)
    assert f"in use again: {path}" in capsys.readouterr().out


def test_a_daemon_of_another_version() -> None:
    """What it does not say yet, or says more, is no reason to fail."""
    about = msgspec.to_builtins(seen("SN10-8", ([0], 7, {"exec": 100.0})))
    del about["platform_note"], about["shared"], about["leases"][0]["processes"]
    about["colour"] = about["tiles"][0]["colour"] = "blue"
    view = msgspec.json.decode(msgspec.json.encode(about), type=View)
    assert len(shown(view)) > 5 and len(sntilestat.table(view).splitlines()) == 34 and "perfect" in snconfig.dynamic(view)


# ---- sessions without tiles ----


def test_who_shares_the_machine_is_shown(run_folder: Path, holder, capsys) -> None:
    """In every tool, beside who holds a tile."""
    from tilework.cli import tiles

    sharing, holding = holder("", TILEWORK_JOB="mine"), holder("tiles:0")
    assert sharing.stdout.readline() == "shared\n" and holding.stdout.readline() == "0\n"
    until = time.monotonic() + 10
    while not (view := client.view()).shared:
        assert time.monotonic() < until
    assert [x.pid for x in view.shared] == [sharing.pid] and [x.pid for x in view.leases] == [holding.pid]
    assert view.shared[0].label == "mine" and view.tiles[1].state == "free"
    tiles.command()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[0] == "shared" and str(sharing.pid) in lines[-1] and "[mine] python" in lines[-1]
    tiles.command(json=True)
    assert json.loads(capsys.readouterr().out)["shared"][0]["pid"] == sharing.pid
    assert sntilestat.main(["--skip-idle"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[2].startswith("shared ") and lines[2].split()[7] == str(sharing.pid)
    assert snconfig.main(["show", "Node", "dynamic"]) == 0
    assert f"shared       : idle, pid {sharing.pid}" in capsys.readouterr().out
    text = "\n".join(shown(client.view()))
    assert "1 held, 1 shared" in text and f"{sharing.pid} " in text and "shared, idle" in text
    with client.talking() as ask:
        assert 'tilework_leases{kind="shared"} 1.0' in ask(messages.Metrics())["text"]


# ---- over HTTP ----

TOKEN = "0123456789abcdef"


def served(tmp_path: Path, address: str = "127.0.0.1:0"):
    (tmp_path / "token").write_text(TOKEN + "\n")
    return listen(address, str(tmp_path / "token"))


def get(server, path: str = "/metrics", token: str = TOKEN) -> tuple[int, str]:
    import http.client

    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


def test_slow_clients_shut_nobody_out(run_folder: Path, tmp_path: Path, monkeypatch) -> None:
    """They drip a byte now and then, without ever showing a token."""
    client.view()
    monkeypatch.setattr(endpoint, "ASKING_SECONDS", 2.0)
    server = served(tmp_path)
    slow = []
    before = threading.active_count()
    try:
        for _ in range(100):
            slow.append(socket.create_connection(server.server_address))
            slow[-1].send(b"GET /metr")
        assert get(server)[0] == 200 and get(server, token="wrong" * 4)[0] == 401
        assert threading.active_count() - before <= endpoint.ROOM
        until = time.monotonic() + 6
        while threading.active_count() > before and time.monotonic() < until:
            for sock in slow[-endpoint.ROOM :]:
                with contextlib.suppress(OSError):
                    sock.send(b"i")  # what is dripped gives no more time
            time.sleep(0.1)
        assert threading.active_count() == before and get(server)[0] == 200
    finally:
        server.shutdown()
        server.server_close()
        for sock in slow:
            sock.close()


def test_the_listener_without_its_daemon(run_folder: Path, tmp_path: Path) -> None:
    server = served(tmp_path)
    try:
        status, text = get(server)
        assert status == 503 and text == "no daemon serves this machine's tiles\n"
        assert get(server, "/else")[0] == 404
        client.view()
        assert get(server)[0] == 200
    finally:
        server.shutdown()
        server.server_close()


def test_where_to_listen(run_folder: Path, tmp_path: Path) -> None:
    client.view()
    try:
        server = served(tmp_path, "[::1]:0")
    except UserError as e:
        assert "Address family" in e.found or "Cannot assign" in e.found, e  # a machine without IPv6
    else:
        assert get(server)[0] == 200
        server.shutdown()
        server.server_close()
    for wrong in (
        "::1:9464",
        "[::1]",
        "127.0.0.1",
        "127.0.0.1:99999",
        "127.0.0.1:x",
        ":9464",
        "[127.0.0.1]:1",
        "a b:1",
        "x" * 70 + ":1",
    ):
        with pytest.raises(UserError) as e:
            served(tmp_path, wrong)
        assert e.value.id == "tiles-listen"
    for content in (b"\xff" * 20, b"two words and more", b"short"):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UserError, match="bad: the token") as e:
            listen("127.0.0.1:0", str(tmp_path / "bad"))
        assert e.value.id == "tiles-listen"


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
        assert not client.view().leases[0].hung
        leases_when(lambda found: found[0].hung and "stuck_in_this_function" in found[0].stack)
        perfect = tool("snconfig", "show", "Node", "dynamic")
        assert f"(TILE_0 hung, pid {process.pid}, user " in perfect
        assert "(hung)" in tool("sntilestat") and "stuck_in_this_function" in tool("tilework", "tiles", "--stack")
        tool("tilework", "tiles", "--reset", client.view().tiles[0].path)
        assert process.wait(10) != 0
        leases_when(lambda found: not found)
    finally:
        process.kill()
        process.wait()


def test_a_daemon_ends_when_nobody_needs_it(run_folder: Path, monkeypatch) -> None:
    from tilework.tiles.daemon import Daemon

    run_folder.mkdir(0o700)
    daemon = Daemon(run_folder, auto=True)
    assert daemon.open()
    daemon.used = time.monotonic() - 10_000
    daemon.serve()  # returns at once
    daemon.stop()


def test_what_nobody_knows_is_not_made_up(run_folder: Path, holder) -> None:
    process = holder("tiles:0")
    process.stdout.readline()
    seen = client.view()
    seen.leases[0].shares = {}
    lines = sntilestat.table(seen).splitlines()
    assert lines[1].split()[1:7] == ["N/A"] * 6 and lines[2].split()[1] == "100.0"
    assert lines[0].index("PID") == lines[1].index(str(process.pid)) + len(str(process.pid)) - 3
