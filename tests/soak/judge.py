"""Whether a series grows.

A count (descriptors, threads, tasks) is taken at quiet points, so it should be constant. It may be higher now and then; it grows if
the least of its last third is above the least of its first third.

A size (memory, objects) has noise. A line is fitted by least squares. Its slope has a standard error, which is made larger by the
factor sqrt((1 + r) / (1 - r)), where r is the correlation of each residual with the one before it: the values of a heap are not
independent. A size grows if its slope is more than three of these errors above a bound that is named beside it.

A series may consist of groups, such as the lives of several processes. Each group has a level of its own, and all have one slope.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

Points: TypeAlias = Sequence[tuple[float, float]]
"""Hours, and values."""

SIGMAS: Final = 3.0
FEWEST: Final = 12
"""Points that a verdict needs."""
_MOST_CORRELATED: Final = 0.98


@dataclass(frozen=True, slots=True)
class Line:
    """A fitted line. The slope and its standard error are per hour."""

    slope: float
    error: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of one series.

    Attributes:
        points: how many were judged.
        first, last: the means of the first and of the last third; for a count, their least values.
        lowest, highest: of all values.
        line: what was fitted; None for a count.
        grows: whether it grows. None if there are too few points.
    """

    points: int
    first: float = 0.0
    last: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    line: Line | None = None
    grows: bool | None = None


def fitted(groups: Sequence[Points]) -> Line | None:
    """Fit lines of one slope to the groups. None if nothing can be fitted."""
    centred = [_centred(group) for group in groups if len(group) > 1]
    xx = sum(x * x for group in centred for x, _ in group)
    freedom = sum(len(group) - 1 for group in centred) - 1
    if not xx or freedom < 1:
        return None
    slope = sum(x * y for group in centred for x, y in group) / xx
    rests = [[y - slope * x for x, y in group] for group in centred]
    squares = sum(rest * rest for group in rests for rest in group)
    error = math.sqrt(squares / freedom / xx)
    products = sum(one * after for group in rests for one, after in pairwise(group))
    correlation = min(_MOST_CORRELATED, max(0.0, products / squares)) if squares > 0 else 0.0
    return Line(slope, error * math.sqrt((1 + correlation) / (1 - correlation)))


def _centred(group: Points) -> Points:
    mean_x = sum(x for x, _ in group) / len(group)
    mean_y = sum(y for _, y in group) / len(group)
    return [(x - mean_x, y - mean_y) for x, y in group]


def judge_size(groups: Sequence[Points], bound: float) -> Verdict:
    """Say whether a size grows by more than `bound` an hour."""
    points = sorted(point for group in groups for point in group)
    values = [y for _, y in points]
    if len(points) < FEWEST or (line := fitted(groups)) is None:
        return Verdict(len(points), lowest=min(values, default=0.0), highest=max(values, default=0.0))
    third = len(values) // 3
    first, last = (sum(part) / third for part in (values[:third], values[-third:]))
    return Verdict(len(values), first, last, min(values), max(values), line, line.slope - SIGMAS * line.error > bound)


def judge_count(groups: Sequence[Points]) -> Verdict:
    """Say whether a count grows in any of the groups."""
    values = [y for group in groups for _, y in group]
    judged = [[y for _, y in group] for group in groups if len(group) >= FEWEST]
    if not judged:
        return Verdict(len(values), lowest=min(values, default=0.0), highest=max(values, default=0.0))
    ends = [(min(group[: len(group) // 3]), min(group[-(len(group) // 3) :])) for group in judged]
    first, last = max(ends, key=lambda end: end[1] - end[0])
    return Verdict(len(values), first, last, min(values), max(values), None, last > first)
