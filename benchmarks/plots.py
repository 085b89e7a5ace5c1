"""Plots as SVG, readable on light and dark pages: lines of a row's metrics, and the ratios of the headlines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.figures import in_seconds
from benchmarks.results import from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness import Row
    from benchmarks.results import Json, Result

_STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif }
text { fill: #24292f } .quiet { fill: #6e7781 } .title { font-size: 14px; font-weight: 600 }
.grid { stroke: #d0d7de } .one { stroke: #6e7781 } .line { fill: none; stroke-width: 1.6 } .ours { stroke-width: 3 }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117 } text { fill: #e6edf3 } .quiet { fill: #8d96a0 } .grid { stroke: #30363d } .one { stroke: #8d96a0 }
}
"""

_COLOURS = {
    "percore": "#2f81f7",
    "asyncio": "#8b949e",
    "ProcessPoolExecutor": "#e5534b",
    "ThreadPoolExecutor": "#c69026",
    "InterpreterPoolExecutor": "#b083f0",
    "loky": "#57ab5a",
    "distex": "#e0823d",
    "aiomultiprocess": "#d859a8",
    "mpire": "#8e7f5f",
    "wool": "#39a7a0",
    "anyio": "#986ee2",
    "hand split": "#8b949e",
    "bare": "#8b949e",
    "one": "#8b949e",
}
"""By the beginning of a contestant's name, so that a library has the same colour everywhere."""

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEGEND = 880, 400, 64, 54, 46, 290


@dataclass(frozen=True, slots=True)
class Plot:
    """A line per contestant, except `hidden`: the metrics in `places` at their x, their medians, after `height`, as y.

    `log` names the logarithmic axes, `seconds` those whose numbers are written as a duration.
    """

    title: str
    x: str
    y: str
    places: Mapping[str, float]
    height: Callable[[float], float] = float
    log: str = "xy"
    seconds: str = ""
    hidden: str = ""

    def svg(self, result: Result) -> str:
        lines = {name: self._points(result, name) for name in result.samples if name != self.hidden}
        lines = {name: points for name, points in lines.items() if points}
        xs, ys = ([point[axis] for points in lines.values() for point in points] for axis in (0, 1))
        right, bottom = _WIDTH - _LEGEND, _HEIGHT - _BOTTOM
        across, up = Axis.over(xs, (_LEFT, right), is_log="x" in self.log), Axis.over(ys, (bottom, _TOP), is_log="y" in self.log)
        return _document(_HEIGHT, self.title, [*self._axes(across, up), *_lines(result, lines, across, up)])

    def _points(self, result: Result, name: str) -> list[tuple[float, float]]:
        measured = result.samples[name][0]
        return [(x, self.height(result.median(name, metric))) for metric, x in self.places.items() if metric in measured]

    def _axes(self, across: Axis, up: Axis) -> Iterator[str]:
        (left, right), (bottom, top) = across.pixels, up.pixels
        say_x, say_y = (in_seconds if axis in self.seconds else _number for axis in "xy")
        for value in across.ticks():
            x = across.at(value)
            yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>' + _text(x, bottom + 16, say_x(value), anchor="middle")
        for value in up.ticks():
            y = up.at(value)
            yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>' + _text(left - 6, y + 4, say_y(value), anchor="end")
        yield _text((left + right) / 2, bottom + 36, self.x, "quiet", "middle")
        yield _text(12, top - 10, self.y, "quiet")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One line of the plot of ratios: how many times as fast percore is, with its quartiles."""

    caption: str
    rival: str
    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    pixels: tuple[float, float]
    is_log: bool

    @classmethod
    def over(cls, values: Sequence[float], pixels: tuple[float, float], *, is_log: bool) -> Axis:
        """From the least value, or 0, to the greatest, with some space."""
        if is_log:
            return cls(min(values) / 1.15, max(values) * 1.15, pixels, is_log)
        return cls(0.0, max(values) * 1.05, pixels, is_log)

    def at(self, value: float) -> float:
        low, high, place = (math.log10(x) if self.is_log else x for x in (self.low, self.high, value))
        start, end = self.pixels
        return start + (place - low) / (high - low) * (end - start)

    def ticks(self) -> list[float]:
        """At least three: powers of ten, with 2 and 5 where they are few; on a linear axis round steps."""
        if not self.is_log:
            power = 10.0 ** math.floor(math.log10(self.high))
            step = next(size * power for size in (0.2, 0.5, 1.0, 2.0) if self.high / (size * power) <= 8)
            return [number * step for number in range(int(self.high / step) + 1)]
        for digits in ((1,), (1, 5), (1, 2, 5)):
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**power for power in powers for digit in digits if self.low <= digit * 10.0**power <= self.high]
            if len(found) > 3:
                break
        return found


def drawn(rows: Mapping[str, Row], figures: Mapping[str, Json]) -> dict[str, str]:
    """The plots of those rows that have one and were measured."""
    there = ((name, row.plot) for name, row in rows.items() if row.plot is not None and name in figures)
    return {name: plot.svg(from_json(figures[name])) for name, plot in there}


def write_all(rows: Mapping[str, Row], figures: Mapping[str, Json], folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn(rows, figures).items():
        path = folder / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        yield path


def ratios(lines: Sequence[Ratio]) -> str:
    """A point per comparison, on a log axis: to the right of 1 percore is faster."""
    left, right, step = 410, _WIDTH - 60, 24
    bottom = _TOP + 24 + step * len(lines)
    values = [value for line in lines for value in (line.low, line.high)]
    axis = Axis.over([*values, 0.4], (left, right), is_log=True)
    parts = [
        _text(axis.at(1.12), _TOP + 10, "percore is faster →", "quiet"),
        _text(axis.at(0.9), _TOP + 10, "← slower", "quiet", "end"),
    ]
    for value in (0.5, 1, 2, 5, 10, 20):
        x, kind = axis.at(value), "one" if value == 1 else "grid"
        parts += [
            f'<path class="{kind}" d="M{x:.1f} {_TOP + 18}V{bottom}"/>',
            _text(x, bottom + 16, f"{value:g} x", anchor="middle"),
        ]
    before = ""
    for number, line in enumerate(lines):
        y = _TOP + 36 + step * number
        colour = _COLOURS["percore" if line.median >= 0.995 else "ProcessPoolExecutor"]
        low, median, high = map(axis.at, (line.low, line.median, line.high))
        parts += [
            "" if line.caption == before else _text(12, y + 4, line.caption),
            _text(left - 8, y + 4, line.rival, "quiet", "end"),
            f'<path stroke="{colour}" stroke-width="3" d="M{low:.1f} {y}H{high:.1f}"/>',
            f'<circle cx="{median:.1f}" cy="{y}" r="5" fill="{colour}"/>' + _text(high + 9, y + 4, f"{line.median:.2f}"),
        ]
        before = line.caption
    return _document(bottom + 26, "percore's speed, as a multiple of another way's", parts)


def _lines(result: Result, lines: Mapping[str, list[tuple[float, float]]], across: Axis, up: Axis) -> Iterator[str]:
    """The lines, and a legend in the order in which they end."""
    ordered = sorted(lines, key=lambda name: -lines[name][-1][1])
    dashes = _dashes(ordered)
    for number, name in enumerate(ordered):
        ours = " ours" if name.startswith("percore") else ""
        style = f'class="line{ours}" stroke="{_colour(name)}" stroke-dasharray="{dashes[name]}"'
        points = [(across.at(x), up.at(y)) for x, y in lines[name]]
        yield f'<polyline {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        yield "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(name)}"/>' for x, y in points)
        y = _TOP + 14 + 20 * number
        yield f'<path {style} d="M{_WIDTH - _LEGEND + 16} {y}h26"/>'
        setting = f", {result.choices[name].setting}" if name in result.choices else ""
        yield _text(_WIDTH - _LEGEND + 48, y + 4, f"{name}{setting}")


def _dashes(names: Iterable[str]) -> dict[str, str]:
    """Several lines of one colour differ in their dashes."""
    seen: dict[str, Iterator[int]] = {}
    kinds = ("none", "7 4", "2 3", "10 3 2 3", "1 4")
    return {name: kinds[next(seen.setdefault(_colour(name), count())) % len(kinds)] for name in names}


def _colour(name: str) -> str:
    return next((colour for beginning, colour in _COLOURS.items() if name.startswith(beginning)), "#2f81f7")


def _number(value: float) -> str:
    """10k and 2M, as on an axis."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:.3g}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _document(height: float, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(filter(None, parts))
    size = f'width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>'
    return f"{head}\n{_text(12, 20, title, 'title')}\n{body}\n</svg>\n"
