"""Plots as SVG, readable on light and dark pages: lines of a row's metrics, and the ratios of the headlines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from benchmarks.results import from_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from benchmarks.figures import Unit
    from benchmarks.results import Json, Result

_STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif } text { fill: #24292f } .quiet { fill: #6e7781 }
.title { font-size: 14px; font-weight: 600 } .grid { stroke: #d0d7de } .one { stroke: #6e7781 } polyline { fill: none }
@media (prefers-color-scheme: dark) {
svg { background: #0d1117 } text { fill: #e6edf3 } .quiet { fill: #8d96a0 } .grid { stroke: #30363d } .one { stroke: #8d96a0 }
}
"""

_OURS, _WORSE, _LIMIT = "#2f81f7", "#e5534b", "#8b949e"
_COLOURS = {
    "percore": _OURS,
    "ProcessPoolExecutor": _WORSE,
    "ThreadPoolExecutor": "#c69026",
    "InterpreterPoolExecutor": "#b083f0",
    "loky": "#57ab5a",
    "distex": "#e0823d",
    "aiomultiprocess": "#d859a8",
    "mpire": "#8e7f5f",
    "wool": "#39a7a0",
    "anyio": "#986ee2",
    "asyncio tasks": _LIMIT,
    "hand split": _LIMIT,
    "bare echo": _LIMIT,
}
"""By the beginning of a contestant's name: a library has the same colour everywhere."""

_WIDTH, _HEIGHT, _TOP, _LEGEND = 880, 400, 54, 590


def _number(value: float) -> str:
    """10k and 2M, as on an axis."""
    size, letter = next(((size, letter) for size, letter in ((1e6, "M"), (1e3, "k")) if value >= size), (1, ""))
    return f"{value / size:.3g}{letter}"


@dataclass(frozen=True, slots=True)
class Plot:
    """A line per contestant, except `hidden`, on two log axes: the metrics in `places` at their x, and their medians.

    With `rates` the y is calls in a second, one divided by the median.
    """

    title: str
    x: str
    y: str
    places: Mapping[str, float]
    rates: bool = False
    say_x: Unit = _number
    say_y: Unit = _number
    hidden: str = ""

    def svg(self, result: Result) -> str:
        lines = {name: self._points(result, name) for name in result.samples if name != self.hidden}
        lines = {name: points for name, points in lines.items() if points}
        across = _axis([x for points in lines.values() for x, _ in points], 64, _LEGEND)
        up = _axis(heights := [y for points in lines.values() for _, y in points], _HEIGHT - 46, _TOP)
        parts = [_text(320, _HEIGHT - 10, self.x, "quiet", "middle"), _text(12, _TOP - 10, self.y, "quiet")]
        for value in sorted({x for points in lines.values() for x, _ in points}):
            parts.append(f'<path class="grid" d="M{across(value):.1f} {_TOP}V{_HEIGHT - 46}"/>')
            parts.append(_text(across(value), _HEIGHT - 30, self.say_x(value), anchor="middle"))
        for value in _ticks(min(heights), max(heights)):
            parts.append(f'<path class="grid" d="M64 {up(value):.1f}H{_LEGEND}"/>')
            parts.append(_text(58, up(value) + 4, self.say_y(value), anchor="end"))
        for number, (name, points) in enumerate(sorted(lines.items(), key=lambda line: -line[1][-1][1])):
            setting = f", {result.choices[name].setting}" if name in result.choices else ""
            parts += _line(name, [(across(x), up(y)) for x, y in points], _TOP + 14 + 20 * number, f"{name}{setting}")
        return _document(_HEIGHT, self.title, parts)

    def _points(self, result: Result, name: str) -> list[tuple[float, float]]:
        medians = [(x, result.median(name, metric)) for metric, x in self.places.items() if metric in result.samples[name][0]]
        return [(x, 1 / y if self.rates else y) for x, y in medians]


def drawn(plots: Mapping[str, Plot | None], figures: Mapping[str, Json]) -> dict[str, str]:
    """The plots of those rows that have one and were measured, by file name."""
    there = ((name, plot) for name, plot in plots.items() if plot is not None and name in figures)
    return {f"{name}.svg": plot.svg(from_json(figures[name])) for name, plot in there}


@dataclass(frozen=True, slots=True)
class Ratio:
    """One line of the plot of ratios: how many times as fast percore is, with its quartiles."""

    caption: str
    rival: str
    low: float
    median: float
    high: float


def ratios(lines: Sequence[Ratio]) -> str:
    """A point per comparison, on a log axis: to the right of 1 percore is faster."""
    left, bottom = 410, _TOP + 24 + 24 * len(lines)
    axis = _axis([0.4, *(line.high for line in lines)], left, _WIDTH - 60)
    parts = [_text(axis(1.12), _TOP, "percore is faster →", "quiet"), _text(axis(0.9), _TOP, "← slower", "quiet", "end")]
    for value in (0.5, 1, 2, 5, 10, 20):
        kind = "one" if value == 1 else "grid"
        parts.append(f'<path class="{kind}" d="M{axis(value):.1f} {_TOP + 8}V{bottom}"/>')
        parts.append(_text(axis(value), bottom + 16, f"{value:g} x", anchor="middle"))
    before = ""
    for y, line in zip(range(_TOP + 28, bottom, 24), lines, strict=True):
        colour = _OURS if line.median >= 0.995 else _WORSE
        parts += [
            _text(12, y + 4, "" if line.caption == before else line.caption),
            _text(left - 8, y + 4, line.rival, "quiet", "end"),
            f'<path stroke="{colour}" stroke-width="3" d="M{axis(line.low):.1f} {y}H{axis(line.high):.1f}"/>',
            f'<circle cx="{axis(line.median):.1f}" cy="{y}" r="5" fill="{colour}"/>',
            _text(axis(line.high) + 9, y + 4, f"{line.median:.2f}"),
        ]
        before = line.caption
    return _document(bottom + 26, "percore's speed, as a multiple of another library's", parts)


def _axis(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """From a value to its place between `start` and `end`, on a log scale with some space at both ends."""
    low, high = math.log(min(values) / 1.15), math.log(max(values) * 1.15)
    return lambda value: start + (math.log(value) - low) / (high - low) * (end - start)


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with more digits between them on a short axis."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1,) if high / low > 1000 else (1, 2, 5) if high / low > 6 else (1, 1.5, 2, 3, 5, 7)
    return [digit * 10.0**power for power in powers for digit in digits if low / 1.1 <= digit * 10.0**power <= high * 1.1]


def _line(name: str, points: Sequence[tuple[float, float]], y: float, caption: str) -> Iterator[str]:
    """A line and its place in the legend. Coroutines are dashed: they have the colour of the same library's threads."""
    colour = next((colour for beginning, colour in _COLOURS.items() if name.startswith(beginning)), _LIMIT)
    dashes = "7 4" if "coroutines" in name or name == "percore, plain function" else "none"
    width = 3 if colour == _OURS else 1.6
    style = f'stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"'
    yield f'<polyline {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
    yield "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
    yield f'<path {style} d="M{_LEGEND + 16} {y}h26"/>' + _text(_LEGEND + 48, y + 4, caption)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _document(height: float, title: str, parts: Iterable[str]) -> str:
    size = f'width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>'
    return "\n".join((head, _text(12, 20, title, "title"), *parts, "</svg>\n"))
