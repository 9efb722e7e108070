"""curves.png in the folder of a run: loss, and beside it what else was recorded, by the number of the step.

Each line is the mean of as many steps as a point takes; the band around it goes from the least to the greatest of them."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifact.writer import write_whole
from ..data.source import extra
from .report import tick

NAME = "curves.png"
BINS = 300  # points of a line
SCALE = 2  # pixels of what is drawn to one of the file: lines without steps
WIDTH, FIRST, OTHERS = 960, 330, 210  # of the file; heights of the loss, and of each of the others
LEFT, RIGHT, ABOVE, BELOW = 78, 26, 40, 38
INK, FAINT, GRID = (40, 44, 52), (110, 116, 128), (228, 231, 236)
COLORS = ((37, 99, 168), (194, 84, 27), (58, 125, 52), (138, 79, 163))


@dataclass(frozen=True)
class Series:
    title: str
    points: list[tuple[int, float]]  # step, value; values are finite


def series_of(lines: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Of metrics.jsonl. A learning rate that never changes is no curve."""
    made: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for key, value in line.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                made.setdefault(key, []).append((line["step"], float(value)))
    wanted = [("loss", "loss"), ("grad_norm", "gradient norm")]
    wanted += [(key, key) for key in made if key.split(".")[-1] == "lr" and len({v for _, v in made[key]}) > 1]
    wanted += [("samples_per_second", "samples per second")]
    return [Series(title, made[key]) for key, title in wanted if key in made]


def draw(path: Path, series: Sequence[Series], title: str = "") -> None:
    """A file that is there as a whole, or as it was before."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as e:
        raise extra("Pillow", NAME) from e
    if not series:
        return
    heights = [FIRST if i == 0 else OTHERS for i in range(len(series))]
    picture = Image.new("RGB", (WIDTH * SCALE, sum(heights) * SCALE), "white")
    pen = ImageDraw.Draw(picture, "RGBA")
    first = min(s.points[0][0] for s in series)
    last = max(s.points[-1][0] for s in series)
    top = 0
    for i, (one, height) in enumerate(zip(series, heights, strict=True)):
        panel = _Panel(
            pen, one, top, height, (0 if first <= last / 10 or first == last else first, last), COLORS[i % len(COLORS)]
        )
        panel.draw(title if i == 0 else "")
        top += height
    found = io.BytesIO()
    picture.resize((WIDTH, sum(heights)), Image.Resampling.LANCZOS).save(found, "png", optimize=True)
    write_whole(path, lambda f: f.write(found.getvalue()))


class _Panel:
    """One curve with its axes, in a part of the picture."""

    def __init__(
        self, pen: Any, series: Series, top: int, height: int, steps: tuple[int, int], color: tuple[int, int, int]
    ) -> None:
        self.pen, self.series, self.color = pen, series, color
        self.left, self.right = LEFT, WIDTH - RIGHT
        self.above, self.below = top + ABOVE, top + height - BELOW
        self.first, self.last = steps
        self.last = max(self.last, self.first + 1)
        self.bins = _binned(series.points)
        low, high = min(b[2] for b in self.bins), max(b[3] for b in self.bins)
        self.logarithmic = low > 0 and high / low > 100
        self.low, self.high = self._scaled(low), self._scaled(high)
        if self.high - self.low < 1e-9 * max(1.0, abs(self.high)):
            room = 0.5 * abs(self.high) or 0.5
        else:
            room = 0.05 * (self.high - self.low)
        self.low, self.high = self.low - room, self.high + room
        if not self.logarithmic and low >= 0:
            self.low = max(0.0, self.low)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def _x(self, step: float) -> float:
        return (self.left + (step - self.first) / (self.last - self.first) * (self.right - self.left)) * SCALE

    def _y(self, value: float) -> float:
        share = (self._scaled(value) - self.low) / (self.high - self.low)
        return (self.below - share * (self.below - self.above)) * SCALE

    def draw(self, title: str) -> None:
        note = " (logarithmic)" if self.logarithmic else ""
        self._text(self.left, self.above - 14, self.series.title + note, 15, INK, "ls")
        self._text(self.right, self.above - 14, title, 12, FAINT, "rs")
        for value in self._heights():
            y = self._y(value)
            self.pen.line([(self.left * SCALE, y), (self.right * SCALE, y)], fill=GRID, width=SCALE)
            self._text(self.left - 8, y / SCALE, tick(value), 12, FAINT, "rm")
        for step in nice(self.first, self.last, 8, whole=True):
            x = self._x(step)
            self.pen.line([(x, self.below * SCALE), (x, (self.below + 4) * SCALE)], fill=FAINT, width=SCALE)
            self._text(x / SCALE, self.below + 8, tick(step), 12, FAINT, "ma")
        self._text(self.left - 8, self.below + 8, "step", 12, FAINT, "ra")
        self.pen.line(
            [(self.left * SCALE, self.below * SCALE), (self.right * SCALE, self.below * SCALE)], fill=FAINT, width=SCALE
        )
        upper = [(self._x(step), self._y(high)) for step, _, _, high in self.bins]
        lower = [(self._x(step), self._y(low)) for step, _, low, _ in self.bins]
        line = [(self._x(step), self._y(mean)) for step, mean, _, _ in self.bins]
        if len(line) == 1:
            (x, y), r = line[0], 3 * SCALE
            self.pen.ellipse([x - r, y - r, x + r, y + r], fill=self.color)
            return
        self.pen.polygon([*upper, *reversed(lower)], fill=(*self.color, 56))
        self.pen.line(line, fill=self.color, width=2 * SCALE, joint="curve")

    def _heights(self) -> list[float]:
        if not self.logarithmic:
            return nice(self.low, self.high, (self.below - self.above) // 35)
        lowest, highest = math.ceil(self.low), math.floor(self.high)
        every = max(1, math.ceil((highest - lowest + 1) / 6))
        return [10.0**n for n in range(lowest, highest + 1, every)]

    def _text(self, x: float, y: float, text: str, size: int, color: tuple[int, int, int], anchor: str) -> None:
        from PIL import ImageFont

        self.pen.text((x * SCALE, y * SCALE), text, fill=color, font=ImageFont.load_default(size * SCALE), anchor=anchor)


def _binned(points: Sequence[tuple[int, float]]) -> list[tuple[float, float, float, float]]:
    """(step, mean, least, greatest) of at most BINS groups of neighbours."""
    count = min(BINS, len(points))
    found = []
    for i in range(count):
        part = points[i * len(points) // count : (i + 1) * len(points) // count]
        values = [y for _, y in part]
        found.append((sum(x for x, _ in part) / len(part), sum(values) / len(values), min(values), max(values)))
    return found


def nice(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers between two: 1, 2 or 5 times a power of ten apart, `most` of them at most."""
    raw = (high - low) / max(1, most)
    if raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    apart = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    apart = max(1.0, apart) if whole else apart
    first, last = math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9)
    return [n * apart for n in range(first, last + 1)]
