"""The arithmetic of the harness: quantiles, paired ratios, targets. Pure: no clock, no process."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Words = Callable[[float], str]
    """How a metric is written."""


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, between two of them by linear interpolation.

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
    """A latency row's sample: p50, p99, the mean, and p99.9 where there are enough values to tell one in a thousand."""
    sample = {"p50": quantile(seconds, 0.5), "p99": quantile(seconds, 0.99), "mean": fmean(seconds)}
    if len(seconds) >= 1000:
        sample["p99.9"] = quantile(seconds, 0.999)
    return sample


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratios round by round. Raises ValueError where the rounds are not the same number."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


@dataclass(frozen=True, slots=True)
class Target:
    """What a row set itself: contestant `ours` against `theirs`, in one of the row's metrics, of which less is better.

    `theirs` may be several: then the best of them, by its median. `at_least=1.8`: ours is 1.8 times as fast, or better.
    `at_most=1.4`: ours takes 1.4 times as much, or less. Exactly one of the two is given, else ValueError. `towards` is
    where it should go when that is reached.
    """

    ours: str
    theirs: str | tuple[str, ...]
    metric: str
    at_least: float | None = None
    at_most: float | None = None
    towards: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a target has either at_least or at_most")

    @property
    def rivals(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @property
    def contestants(self) -> set[str]:
        """Who is judged by it."""
        return {self.ours, *self.rivals}

    @property
    def question(self) -> str:
        """What is compared; a run finds it again in another one by this."""
        theirs = self.theirs if isinstance(self.theirs, str) else "the best of the others"
        return f"{self.ours} / {theirs}, {self.metric}"

    @property
    def wording(self) -> str:
        if self.at_least is not None:
            return f"at least {self.at_least:g} x as fast"
        return f"at most {self.at_most:g} x"

    def ratios(self, ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
        """Round by round: how many times as fast (at_least) or how many times as much (at_most)."""
        if self.at_least is not None:
            return paired_ratios(theirs, ours)
        return paired_ratios(ours, theirs)

    def is_reached(self, ratio: float) -> bool:
        if self.at_least is not None:
            return ratio >= self.at_least
        return self.at_most is not None and ratio <= self.at_most


@dataclass(frozen=True, slots=True)
class Limit:
    """What a row set itself without a rival: a metric of one contestant is `at_most` so much, in the metric's own unit."""

    contestant: str
    metric: str
    at_most: float
    towards: float | None = None

    @property
    def contestants(self) -> set[str]:
        return {self.contestant}

    @property
    def question(self) -> str:
        return f"{self.contestant}, {self.metric}"

    def is_reached(self, value: float) -> bool:
        return value <= self.at_most


def in_words(seconds: float) -> str:
    """Seconds with three digits in the unit that suits them: '2.61 us', '48.0 ms', '1.26 s'."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))
    digits = f"{seconds / size:#.3g}".rstrip(".")  # the form keeps the zeros of 48.0 but also the point of 120.
    return f"{digits} {unit}"


def in_mebibytes(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"


def in_times(ratio: float) -> str:
    return f"{ratio:.3f} x"


def in_items(count: float) -> str:
    return f"{count:.0f} items"


def in_percent(share: float) -> str:
    return f"{share:.2%}"
