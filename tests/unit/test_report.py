"""Runs as others see them: the list, the page with curves, TensorBoard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tilework.errors import UserError
from tilework.runs.board import Board, resident_bytes
from tilework.runs.curves import COLORS, FIRST, OTHERS, WIDTH, draw, nice, series_of
from tilework.runs.folder import RunFolder
from tilework.runs.report import POINTS, chart, find, page, summary, thinned, tick


def run(path: Path, losses: list[float], state: str = "done", **asked: object) -> Path:
    folder = RunFolder(path)
    folder.begin({"steps": 1000, "source": "digits", "artifact": "m.pef", **asked}, resume=False)
    folder.add_metrics(
        {"step": i + 1, "epoch": 1, "loss": loss, "samples_per_second": 100.0 + i, "seconds": i} for i, loss in enumerate(losses)
    )
    folder.note(state=state)
    folder.unlock()
    return path


class Page(HTMLParser):
    """What is on the page, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag == "script":
            self.fetched.append("script")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_page_compares_runs(tmp_path: Path) -> None:
    a = run(tmp_path / "a", [1 / (i + 1) for i in range(1000)])
    b = run(tmp_path / "<b>&", [0.5] * 20, state="stopped by SIGTERM")
    text = page([a, b])
    found = Page(text)
    assert found.fetched == [] and "url(" not in text and "<b>" not in text
    words = " ".join(found.words)
    assert "1000 of 1000" in words and "20 of 1000" in words and "stopped by SIGTERM" in words and str(b) in words
    charts = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    assert len(charts) == 2 and all(len(c.findall("polyline")) == 2 for c in charts)
    points = charts[0].findall("polyline")[0].get("points", "").split()
    assert len(points) == POINTS
    heights = [float(p.split(",")[1]) for p in points]
    assert heights == sorted(heights)  # the loss falls, so the line goes down the page


def test_gradient_norms_are_on_the_page_where_a_run_has_them(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", [3.0, 2.0]), run(tmp_path / "b", [3.0, 2.0])
    assert "Gradient norm" not in page([a, b])
    RunFolder(b).add_metrics([{"step": 3, "epoch": 1, "loss": 1.0, "samples_per_second": 1.0, "grad_norm": 5.0}])
    text = page([a, b])
    charts = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.S)]
    assert "Gradient norm" in text and len(charts) == 3
    assert [bool(line.get("points")) for line in charts[1].findall("polyline")] == [False, True]


def test_curves_are_means() -> None:
    assert thinned([(i, 2.0 * i) for i in range(5)]) == [(i, 2.0 * i) for i in range(5)]
    many = thinned([(i, i % 2) for i in range(2 * POINTS)] + [(9999, float("nan"))])
    assert len(many) == POINTS and {y for _, y in many} == {0.5}
    assert "Nothing was recorded" in chart(["x"], [[]])
    for curve in ([(1, 3.0)], [(1, 0.0), (2, 0.0)], [(1, -1.0), (2, 5.0)], [(1, 1e-9), (2, 1e9)]):
        ET.fromstring(chart(["x"], [curve]).split("<ul")[0])  # type: ignore[list-item]


def test_one_point_of_many_sizes_is_in_the_picture() -> None:
    svg = ET.fromstring(chart(["x"], [[(1, 1e-3), (50, 1.0), (100, 1e3)]]).split("<ul")[0])
    middle = svg.findall("polyline")[0].get("points", "").split()[1]
    line = [float(n) for n in (svg.findall("line")[2].get("y1"), middle.split(",")[1])]  # type: ignore[arg-type]
    assert abs(line[0] - line[1]) < 0.2  # logarithmic: 1 lies half way between 0.001 and 1000


def test_numbers_of_an_axis() -> None:
    assert [tick(v) for v in (0, 0.7123, 501, 12_600, 2.5e6, 1e12, -3000)] == [
        "0",
        "0.712",
        "501",
        "12.6k",
        "2.5M",
        "1e+12",
        "-3k",
    ]


def test_runs_are_found(tmp_path: Path) -> None:
    assert find(tmp_path) == []
    run(tmp_path / "deep" / "one", [2.0, 1.0])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    assert find(tmp_path) == [tmp_path / "deep" / "one"]
    found = summary(tmp_path / "deep" / "one")
    assert (found.state, found.step, found.best, found.rate, found.checkpoints) == ("done", 2, 1.0, 101.0, [])
    with pytest.raises(UserError, match="has no run"):
        summary(tmp_path / "other")


def test_a_run_that_was_killed_is_not_running(tmp_path: Path) -> None:
    code = (
        "import sys, time; from tilework.runs.folder import RunFolder; f = RunFolder(sys.argv[1]); f.begin({}, resume=False);"
        "print('ready', flush=True); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert summary(tmp_path / "r").state == "running"
    process.kill()
    process.communicate()
    assert summary(tmp_path / "r").state == "killed"


@pytest.mark.slow
def test_the_commands(tmp_path: Path) -> None:
    run(tmp_path / "r", [2.0, 1.0])

    def tilework(*words: str) -> str:
        done = subprocess.run([sys.executable, "-m", "tilework", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert json.loads(tilework("runs", "--json"))[0]["step"] == 2
    (tmp_path / "empty").mkdir()
    assert "2/1000" in tilework("runs") and "no runs here" in tilework("runs", "empty")
    assert "1 run," in tilework("report", "r", "-o", "out/page.html")
    assert (tmp_path / "out" / "page.html").read_text().startswith("<!doctype html>")


def test_tensorboard(tmp_path: Path) -> None:
    """What a run wrote after its checkpoint is gone when it is continued."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(tmp_path, 0)
    board.add(1, [3.0, 2.0, 1.0], 50.0, {"lr": 0.1, "momentum": 0.9}, [7.0, 8.0, 9.0])
    board.close()
    time.sleep(1.1)  # files are told apart by the second
    board = Board(tmp_path, 2)
    board.add(3, [1.5], 60.0, {"lr": 0.05})
    board.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(found.Tags()["scalars"]) == ["train/grad_norm", "train/loss", "train/lr", "train/samples_per_second"]
    assert [(e.step, e.value) for e in found.Scalars("train/grad_norm")] == [(1, 7.0), (2, 8.0)]
    assert [(e.step, e.value) for e in found.Scalars("train/loss")] == [(1, 3.0), (2, 2.0), (3, 1.5)]


def test_tensorboard_shows_memory_histograms_and_pictures(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(tmp_path, 0)
    board.add_memory(2, 5_000_000)
    board.add_parameters(2, {"fc.weight": torch.randn(3, 4), "empty": torch.empty(0), "n": torch.tensor(3)})
    board.add_picture(2, np.full((8, 16, 3), 200, np.uint8))
    board.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    (planned,), (resident,) = (found.Scalars(f"memory/{k}_mb") for k in ("session_planned", "process_resident"))
    assert planned.value == 5.0 and 50 < resident.value < 1e5
    assert sorted(found.Tags()["histograms"]) == ["parameters/fc.weight", "parameters/n"]
    (picture,) = found.Images("samples/input, target, prediction")
    assert (picture.step, picture.width, picture.height) == (2, 16, 8)
    assert resident_bytes(tmp_path / "none") is None


def image_of(path: Path) -> np.ndarray:
    with Image.open(path) as found:
        return np.asarray(found.convert("RGB"))


def test_curves(tmp_path: Path) -> None:
    """A panel for each series that there is; the line is where its values are."""
    lines = [{"step": i + 1, "loss": 1.0 if i < 500 else 3.0, "samples_per_second": 10.0, "lr": 0.1, "seconds": i, "epoch": 1}
             for i in range(1000)]  # fmt: skip
    assert [s.title for s in series_of(lines)] == ["loss", "samples per second"]  # a constant learning rate is no curve
    draw(tmp_path / "c.png", series_of(lines), "runs/one")
    picture = image_of(tmp_path / "c.png")
    assert picture.shape == (FIRST + OTHERS, WIDTH, 3)
    loss = np.abs(picture[:FIRST].astype(int) - COLORS[0]).sum(2) < 120  # pixels of the line
    heights = [np.flatnonzero(loss[:, x]).mean() for x in (200, 400, 650, 850)]
    assert heights[0] == pytest.approx(heights[1], abs=1) and heights[2] == pytest.approx(heights[3], abs=1)
    assert heights[0] - heights[2] > FIRST / 2  # from 1 up to 3
    more = [{**line, "grad_norm": 5.0 / (line["step"]), "lr": line["step"] * 1e-3} for line in lines]
    more += [{"step": 1001, "loss": float("nan"), "grad_norm": float("inf"), "samples_per_second": 0.0}]
    assert [s.title for s in series_of(more)] == ["loss", "gradient norm", "lr", "samples per second"]
    draw(tmp_path / "c.png", series_of(more))
    assert image_of(tmp_path / "c.png").shape == (FIRST + 3 * OTHERS, WIDTH, 3)
    for values in ([2.0], [0.0, 0.0], [-1.0, 5.0], [1e-9, 1e9], [1e30, 1e30]):
        draw(tmp_path / "c.png", series_of([{"step": i, "loss": v} for i, v in enumerate(values, 1)]))
    draw(tmp_path / "none.png", series_of([]))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.png"]


def test_round_numbers() -> None:
    assert nice(0, 3000, 8) == [0, 500, 1000, 1500, 2000, 2500, 3000]
    assert nice(0.07, 2.6, 5) == [1.0, 2.0] and nice(0, 3, 8, whole=True) == [0, 1, 2, 3] and nice(5, 5, 8) == [5]
