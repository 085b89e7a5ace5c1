"""A plot of a row whose metrics are places on one axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks._harness import median_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks._harness import Result


@dataclass(frozen=True, slots=True)
class Lines:
    """One line a contestant: its metrics are the places on the x axis, `height` makes the y of a metric's median."""

    title: str
    x: str
    y: str
    height: Callable[[str, float], float] = lambda _place, value: value
    x_scale: str = "log"
    y_scale: str = "log"

    def draw(self, result: Result, path: Path) -> None:
        """Raises ModuleNotFoundError without matplotlib."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for name, samples in result.samples.items():
            places = [metric for metric in samples[0] if metric.replace(".", "").isdigit()]
            heights = [self.height(place, median_of(result, name, place)) for place in places]
            axes.plot([float(place) for place in places], heights, marker="o", label=_label(result, name))
        axes.set(xscale=self.x_scale, yscale=self.y_scale, xlabel=self.x, ylabel=self.y)
        axes.set_title(self.title)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(path, dpi=110)


def _label(result: Result, name: str) -> str:
    return f"{name}, {result.choices[name].setting}" if name in result.choices else name
