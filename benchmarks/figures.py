"""The arithmetic: quantiles, latencies, targets and units. Pure: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Unit = Callable[[float], str]
    """Writes a metric's value with its unit."""


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, with linear interpolation between two of them.

    Raises ValueError without values and for a share outside 0 to 1.
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    if not 0 <= share <= 1:
        raise ValueError(f"share is a number from 0 to 1, not {share!r}")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the quartiles around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError without values."""
        return cls(quantile(values, 0.25), quantile(values, 0.5), quantile(values, 0.75))


def latencies(seconds: Sequence[float]) -> dict[str, float]:
    """The sample of a latency row: p50, p99, the mean, and p99.9 if there are a thousand values or more."""
    sample = {"p50": quantile(seconds, 0.5), "p99": quantile(seconds, 0.99), "mean": fmean(seconds)}
    if len(seconds) >= 1000:
        sample["p99.9"] = quantile(seconds, 0.999)
    return sample


@dataclass(frozen=True, slots=True)
class Target:
    """A goal for contestant `ours` in one metric of its row. Less of a metric is better.

    Without `against`, the metric itself is at most `at_most`. With it, the ratio to that rival within a round counts:
    `at_least=1.8` asks for 1.8 times the speed, `at_most=1.4` allows 1.4 times as much. Of several rivals, the one with the
    best median counts. `towards` is the next goal. Raises ValueError unless exactly one bound is given.
    """

    ours: str
    metric: str
    against: str | tuple[str, ...] | None = None
    at_least: float | None = None
    at_most: float | None = None
    towards: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a target has either at_least or at_most")

    @property
    def rivals(self) -> tuple[str, ...]:
        return (self.against,) if isinstance(self.against, str) else self.against or ()

    @property
    def contestants(self) -> set[str]:
        return {self.ours, *self.rivals}

    @property
    def question(self) -> str:
        """The comparison in words. A run finds the target in another run by this."""
        if self.against is None:
            return f"{self.ours}, {self.metric}"
        rival = self.against if isinstance(self.against, str) else "the best of the others"
        return f"{self.ours} / {rival}, {self.metric}"

    @property
    def kind(self) -> str:
        if self.against is None:
            return "limit"
        return "times as fast" if self.at_least is not None else "times as much"

    @property
    def reach(self) -> float:
        bound = self.at_most if self.at_least is None else self.at_least
        assert bound is not None
        return bound

    def ratios(self, ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
        """Round by round, in the direction of the bound. Raises ValueError if the numbers of rounds differ."""
        pairs = zip(ours, theirs, strict=True)
        return [one / other if self.at_least is None else other / one for one, other in pairs]

    def is_reached(self, value: float) -> bool:
        return value <= self.reach if self.at_least is None else value >= self.reach


def in_seconds(seconds: float) -> str:
    """Three digits in the unit that fits: '2.61 us', '48.0 ms', '1.26 s'."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))
    digits = f"{seconds / size:#.3g}".rstrip(".")  # '#' keeps the zeros of 48.0, and also the point of 120.
    return f"{digits} {unit}"


def in_mebibytes(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def in_times(ratio: float) -> str:
    return f"{ratio:.3f} x"


def in_items(count: float) -> str:
    return f"{count:.0f} items"


def in_percent(share: float) -> str:
    return f"{share:.2%}"
